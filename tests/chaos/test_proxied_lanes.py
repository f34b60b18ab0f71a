"""Lanes pass through the fault proxy, and meet its faults there."""

import random
from collections.abc import Iterator

import pytest
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from faults import BOTH, TO_CLIENT, TO_SERVER, Faults
from gate_proxy import GateProxy
from lane_wire import GREETING_BYTES, HEADER, LaneParser, moved
from oracle import LARGE, MEDIUM
from tampering import TAMPERS, flip_header, flip_payload
from zmtp import Kind, unit_of

from remote_server import protocol
from remote_server.protocol import LaneOpened

NUMBERS = range(3)


@pytest.fixture(scope="module")
def server():
    """One for all: nothing here is done to the server itself."""
    with ChaosServer() as server:
        yield server
        server.wait_until_at_rest()


@pytest.fixture
def client(make_client) -> ChaosClient:
    client: ChaosClient = make_client("lanes")
    assert client.finish(client.put(LARGE, NUMBERS, force=True)) == "stored"
    return client


@pytest.fixture
def gate(server) -> Iterator[GateProxy]:
    with GateProxy(server.endpoint) as gate:
        yield gate


def frame(length: int) -> bytes:
    return HEADER.pack(7, 0, length) + bytes(range(length)) + b"digest_8"


def test_the_units_of_a_lane_back_to_back_are_its_bytes_however_they_were_cut():
    rng = random.Random(4)
    frames = [frame(length) for length in (0, 1, 40, 200, 3)]
    stream = b"KVFL" + bytes(4) + b"".join(frames)
    for _ in range(50):
        parser, units, rest = LaneParser(GREETING_BYTES), [], stream
        while rest:
            size = rng.randrange(1, 90)
            units += parser.feed(rest[:size])
            rest = rest[size:]
        assert b"".join(unit.raw for unit in units) == stream
        assert [unit.raw for unit in units if unit.kind is Kind.BLOCK] == frames


def test_a_lane_is_announced_at_the_proxy_and_nothing_else_of_the_message_changes():
    opened = LaneOpened(request_id=9, epoch="e", number=2, token=bytes(16), host="far", port=5)
    message = unit_of([*protocol.encode(opened)])
    found = moved(message, 4711)
    assert found is not None
    unit, announced = found
    assert announced == ("far", 5, bytes(16))
    expected = LaneOpened(request_id=9, epoch="e", number=2, token=bytes(16), host="", port=4711)
    assert protocol.decode_reply(unit.bodies[1]) == expected
    assert moved(unit_of([b"KVF1", b"no header"]), 4711) is None


def test_a_bit_of_a_block_or_its_checksum_is_payload_and_its_header_is_a_header():
    rng = random.Random(5)
    parser = LaneParser(0)
    (unit,) = parser.feed(frame(4))
    for tamper, expected in ((flip_payload, range(16, 28)), (flip_header, range(16))):
        places = set()
        for _ in range(400):
            (changed,) = tamper(rng, unit) or []
            assert isinstance(changed, bytes)
            places |= {n for n, byte in enumerate(unit.raw) if changed[n] != byte}
        assert places == set(expected)
    assert TAMPERS["repeat message"](rng, unit) == [unit.raw, unit.raw]
    assert TAMPERS["drop message"](rng, unit) == []
    (short,) = TAMPERS["truncate"](rng, unit) or []
    assert isinstance(short, bytes)
    assert unit.raw.startswith(short) and short != unit.raw


def test_blocks_pass_by_no_other_way(client, proxy):
    assert proxy.counts["lanes"] == 2
    counters = client.client.stats().result(10).counters
    assert counters["lanes_opened"] >= 2
    proxy.set(Faults(frozen=BOTH))
    assert client.finish(client.get(LARGE, NUMBERS, timeout_s=0.3)) == "late"
    proxy.clear()
    eventually(lambda: client.finish(client.get(LARGE, NUMBERS)) == "hit", "it goes on")


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT], ids=lambda one: one.name.lower())
def test_a_block_that_is_caught_halfway_breaks_its_lane_and_costs_its_own_transfer(
    direction, client, proxy
):
    """Also when the proxy ends the lane: the other connections stay."""
    before = client.client.counters()
    caught = proxy.catch(direction, "lane", fraction=0.5)
    if direction is TO_SERVER:
        request = client.put(MEDIUM, NUMBERS, force=True)
    else:
        request = client.get(LARGE, NUMBERS)
    caught.wait()
    caught.release(deliver=False)
    # The server may report the end of the lane before the client has seen it.
    assert client.finish(request) in ("unavailable", "part hit", "declined")
    after = client.client.counters()
    assert after["lanes_broken"] == before["lanes_broken"] + 1
    assert after["connects"] == before["connects"]
    eventually(lambda: client.client.lanes.num_open == 2, "another lane is opened")
    assert client.finish(client.get(LARGE, NUMBERS)) == "hit"


def test_blocks_of_a_lane_wait_at_a_closed_gate_and_are_whole_when_it_opens(
    server, gate, make_client
):
    """Messages beside lanes have fewer bytes than the gate lets through."""
    client = make_client("lanes", gate.endpoint)
    assert client.finish(client.put(LARGE, NUMBERS, force=True)) == "stored"
    before = server.stats().counters["lane_bytes_out"]
    with gate.held(after_bytes=LARGE.block_bytes) as blocked:
        request = client.get(LARGE, NUMBERS)
        assert blocked.wait(10)
        assert not request.future.done()
    assert client.finish(request) == "hit"
    sent = server.stats().counters["lane_bytes_out"] - before
    assert sent == len(NUMBERS) * LARGE.block_bytes


def test_a_server_that_moved_awaits_lanes_at_its_new_address(make_client, proxy, server):
    client = make_client("lanes")
    with ChaosServer() as other:
        proxy.target = other.endpoint
        proxy.reset_connections()
        eventually(lambda: client.client.counters()["server_restarts"] == 1, "it is found")
        client.wait_until_ready()
        assert client.finish(client.put(LARGE, NUMBERS)) == "stored"
        assert other.stats().counters["lanes_opened"] > 0
        proxy.target = server.endpoint
        proxy.reset_connections()
        eventually(lambda: client.client.counters()["server_restarts"] == 2, "it is found again")
        client.wait_until_ready()
