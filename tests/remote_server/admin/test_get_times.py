"""Where the time of a get goes: what the server sends on request, and how a client splits it."""

from collections.abc import Iterator

import pytest
from client_helpers import NAMESPACE, Clock
from disk_server import IN_MEMORY, checked_server, put_all
from handler_bench import HandlerBench
from wire_peer import Peer, key

from remote_server import protocol
from remote_server.client.results import GetStopwatch, GetTimes
from remote_server.protocol import Blocks, Get, Got, Hello, Put
from remote_server.server.sending.times import UNTIMED, RequestTimes, times_now

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


# ── the server's half ────────────────────────────────────────────────────────────────────────


KEYS = [key(number) for number in range(4)]


@pytest.fixture
def bench() -> Iterator[HandlerBench]:
    """With four blocks."""
    bench = HandlerBench()
    bench.ask(Hello(request_id=1, protocol=2, namespace="ns", block_bytes=4096))
    put = Put(request_id=2, namespace="ns", keys=KEYS, lengths=[100] * 4, checksums=[],
              blocks_per_frame=4)  # fmt: skip
    bench.ask(put, bytes(400))
    bench.turn()
    bench.router.sent.clear()
    yield bench
    bench.close()


def headers(bench: HandlerBench) -> list[bytes]:
    """Of all messages that the client has received."""
    bench.settle()
    return [frames[1] for _, frames in bench.router.sent]


def a_get(**fields: object) -> Get:
    return Get(request_id=9, namespace="ns", keys=KEYS, **fields)


def test_each_message_of_a_timed_get_carries_the_time_since_the_request_arrived(bench):
    whole = bench.ask(a_get(timed=True, stream=False))
    assert whole.lengths == [100] * 4 and whole.server_us == 1
    bench.settle()
    bench.router.sent.clear()
    bench.router.full.add(b"c")
    bench.ask(a_get(timed=True))
    bench.now += 0.25
    got, blocks = map(protocol.decode_reply, headers(bench))
    assert isinstance(got, Got) and isinstance(blocks, Blocks)
    assert (got.server_us, got.storage_us) == (1, 0), "0 would be: not measured"
    assert (blocks.server_us, blocks.storage_us) == (250_000, 0)


def test_the_time_that_blocks_take_from_disk_is_time_of_the_store(tmp_path, context):
    with checked_server(tmp_path) as server:
        peer = Peer(context, server.endpoint)
        put_all(peer, IN_MEMORY + 4)  # the first ones are on disk alone
        peer.send(Get(request_id=99, namespace="big", keys=[key(0)], timed=True))
        (got, _), (blocks, _) = peer.receive(), peer.receive()
    assert got.storage_us < blocks.storage_us <= blocks.server_us


def test_time_of_the_store_is_a_part_of_the_servers_time(clock):
    times = RequestTimes(clock(), clock)
    times.add_storage(0.125)
    clock.now += 0.5
    times.storage_begins()
    clock.now += 0.25
    times.storage_begins()
    times.storage_ends()
    times.storage_ends()
    assert times.now() == (750_000, 375_000)
    times.add_storage(9.0)
    assert times.now() == (750_000, 750_000)
    assert times_now(None) == UNTIMED == (0, 0)


# ── old and new together ─────────────────────────────────────────────────────────────────────


def test_without_timed_nothing_of_it_is_on_the_wire(bench):
    assert b"timed" not in protocol.encode(a_get())[1]
    bench.ask(a_get())
    assert not [header for header in headers(bench) if b"_us" in header]


@pytest.mark.parametrize("how", [{}, {"timed": True}], ids=["by default", "timed"])
def test_a_get_from_a_server_that_sends_no_times_lands_without_times(fake, make_client, how):
    fake.hold(NAMESPACE, {key(1): bytes(4096)})
    result = make_client(fake.endpoint).get(
        NAMESPACE, [key(1)], [memoryview(bytearray(4096))], **how
    ).result()  # fmt: skip
    assert fake.wait_for(Get)[0].message.timed == bool(how)
    assert (result.landed, result.times) == ([0], None)


# ── the client's half ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> GetStopwatch:
    return GetStopwatch(clock)


def blocks_at(server_us: int, storage_us: int = 0) -> Blocks:
    return Blocks(
        request_id=7, epoch="e", indices=[], lengths=[], checksums=[], more=False,
        server_us=server_us, storage_us=storage_us,
    )  # fmt: skip


def total(times: GetTimes) -> float:
    return (times.serialize_s + times.network_s + times.server_s + times.storage_s
            + times.deserialize_s)  # fmt: skip


def test_the_parts_are_those_of_the_last_message_and_sum_up_to_all_of_it(clock, watch):
    clock.now += 0.001
    watch.sending(7)
    clock.now += 0.030  # 2 there, 25 in the server of which 20 in its storage, 3 back
    came = clock.now
    clock.now += 0.004
    watch.landed(blocks_at(25_000, 20_000), came)
    times = watch.times
    assert times is not None
    parts = [times.serialize_s, times.network_s, times.server_s, times.storage_s,
             times.deserialize_s]  # fmt: skip
    assert parts == pytest.approx([0.001, 0.005, 0.005, 0.020, 0.004])
    assert total(times) == pytest.approx(times.ended - times.began) == pytest.approx(0.035)


def test_a_message_that_waited_for_earlier_blocks_to_land_was_not_on_the_network_meanwhile(
    clock, watch
):
    watch.sending(7)
    clock.now += 0.010
    came = clock.now
    clock.now += 0.006  # the first block lands, while the second one arrives
    watch.landed(blocks_at(8_000), came)
    came = clock.now
    clock.now += 0.006
    watch.landed(blocks_at(9_000), came)
    times = watch.times
    assert times is not None
    assert (times.server_s, times.network_s) == (pytest.approx(0.009), pytest.approx(0.001))
    assert times.deserialize_s == pytest.approx(0.012)
    assert total(times) == pytest.approx(0.022)


def test_a_server_that_says_more_than_passed_takes_no_more_than_passed(clock, watch):
    watch.sending(7)
    clock.now += 0.010
    watch.landed(blocks_at(99_000, 98_000), clock.now)
    times = watch.times
    assert times is not None and times.network_s == 0
    assert total(times) == pytest.approx(0.010)
