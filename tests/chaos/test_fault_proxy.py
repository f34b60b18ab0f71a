"""The fault proxy injects each fault: a chaos suite without faults would pass as well."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from chaos_server import eventually
from fault_proxy import FaultProxy
from faults import BOTH, TO_CLIENT, TO_SERVER, Faults
from proxy_process import ProxyProcess
from tampering import FLIPS, TAMPERS, ReorderMessages
from zmtp import Kind, Parser, message_of

MESSAGE = [b"KVF1", b"header of sixteen", b"a" * 300, b"b" * 70_000]


class Line:
    """A DEALER and a ROUTER with a proxy between them."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.proxy = FaultProxy(self.endpoint, seed=1)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.reconnect_ivl = 10
        self.dealer.connect(self.proxy.endpoint)
        self.dealer.send(b"hello")
        self.name = self.router.recv_multipart()[0]

    def send(self, number: int = 1) -> None:
        for _ in range(number):
            self.dealer.send_multipart(MESSAGE)

    def received(self, timeout_s: float = 5.0) -> list[bytes] | None:
        """The next message at the router; None when none comes."""
        if not self.router.poll(timeout_s * 1000):
            return None
        return self.router.recv_multipart()[1:]

    def close(self) -> None:
        self.proxy.close()
        self.context.destroy(linger=0)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def num_bits_between(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_the_units_of_a_stream_back_to_back_are_the_stream_however_it_was_cut():
    rng = random.Random(4)
    stream = bytes(64) + b"\x04\x05READY" + message_of(MESSAGE) * 3 + b"\x04\x03abc"
    for _ in range(20):
        parser, units, rest = Parser(), [], stream
        while rest:
            size = rng.randrange(1, 5000)
            units += parser.feed(rest[:size])
            rest = rest[size:]
        assert b"".join(unit.raw for unit in units) == stream
        messages = [unit.bodies for unit in units if unit.kind is Kind.MESSAGE]
        assert messages == [MESSAGE] * 3


def test_without_faults_everything_passes_both_ways_and_in_order(line):
    line.send(3)
    assert [line.received() for _ in range(3)] == [MESSAGE] * 3
    line.router.send_multipart([line.name, *MESSAGE])
    assert line.dealer.recv_multipart() == MESSAGE


@pytest.mark.parametrize("place", FLIPS)
def test_a_flip_changes_one_bit_and_only_where_it_says(place):
    rng = random.Random(5)
    raw = message_of(MESSAGE)
    (unit,) = Parser().feed(bytes(64) + raw)[1:]
    body = {"header": range(1, 2), "payload": range(2, 4)}
    for _ in range(50):
        (changed,) = FLIPS[place](rng, unit)
        assert num_bits_between(raw, changed) == 1
        at = next(n for n, (a, b) in enumerate(zip(raw, changed, strict=True)) if a != b)
        inside = [n for n, span in enumerate(unit.spans) if span.body <= at < span.end]
        if place == "framing":
            assert inside in ([], [0])
        else:
            assert inside[0] in body[place]


def test_each_tampering_changes_what_arrives(line):
    arrived = {}
    for name, tamper in TAMPERS.items():
        if name in ("flip anywhere", "cut mid-message"):
            continue  # may end the connection
        shot = line.proxy.shoot(TO_SERVER, tamper)
        line.send(2)  # the second one is whole, and shows where the first has ended
        assert shot.hit.wait(5)
        arrived[name] = [line.received()]
        while arrived[name][-1] not in (None, MESSAGE):
            arrived[name].append(line.received(0.5))
        while line.received(0.05):
            arrived[name].append(MESSAGE)
    assert arrived["drop message"] == [MESSAGE]
    assert arrived["repeat message"] == [MESSAGE] * 3
    for name in ("flip payload", "truncate", "reorder frames", "repeat frame"):
        assert arrived[name][0] != MESSAGE, name
        assert arrived[name][-1] == MESSAGE, name


def test_reordering_sends_the_second_message_first(line):
    line.proxy.set(Faults(tamper=ReorderMessages()))
    line.dealer.send(b"one")
    line.dealer.send(b"two")
    assert [line.received(), line.received()] == [[b"two"], [b"one"]]


def test_what_is_swallowed_never_comes_and_what_is_frozen_comes_later(line):
    line.proxy.set(Faults(swallowed=frozenset({TO_SERVER})))
    line.send()
    eventually(lambda: line.proxy.counts["swallowed"], "it is swallowed")
    line.proxy.set(Faults(frozen=BOTH))
    line.dealer.send(b"frozen")
    assert line.received(0.1) is None
    line.proxy.clear()
    assert line.received() == [b"frozen"]


def test_a_caught_message_stops_within_and_goes_on_or_ends_as_told(line):
    caught = line.proxy.catch(TO_SERVER, "", fraction=0.5)
    line.send(2)
    caught.wait()
    assert line.received(0.1) is None
    caught.release(deliver=True)
    assert [line.received(), line.received()] == [MESSAGE, MESSAGE]
    caught = line.proxy.catch(TO_SERVER, "", fraction=0.5)
    line.send()
    caught.wait()
    caught.release(deliver=False)
    eventually(lambda: line.proxy.num_connections == 1, "the dealer has connected again")
    line.dealer.send(b"again")
    assert line.received() == [b"again"]


def test_latency_and_bandwidth_delay_by_as_much(line):
    line.proxy.set(Faults(latency_s=0.2))
    began = time.monotonic()
    line.send()
    assert line.received() == MESSAGE
    assert time.monotonic() - began >= 0.2
    line.proxy.set(Faults(bytes_per_s=350_000))
    began = time.monotonic()
    line.send()
    assert line.received() == MESSAGE
    assert time.monotonic() - began >= 0.2, "70 kB at 350 kB/s"


def test_the_server_may_move_and_those_who_are_refused_come_back(line):
    other = line.context.socket(zmq.ROUTER)
    other.linger = 0
    port = other.bind_to_random_port("tcp://127.0.0.1")
    line.proxy.set(Faults(refuse=True))
    eventually(lambda: line.proxy.counts["refused"] > 1, "it is tried again and again")
    assert line.proxy.num_connections == 0
    line.proxy.target = f"tcp://127.0.0.1:{port}"
    line.proxy.clear()
    line.dealer.send(b"moved")
    assert other.recv_multipart()[1:] == [b"moved"]


def test_a_proxy_in_a_process_of_its_own_does_the_same_and_ends_with_its_owner(line):
    with ProxyProcess(line.endpoint) as proxy:
        line.dealer.connect(proxy.endpoint)
        line.dealer.disconnect(line.proxy.endpoint)
        line.send()
        assert line.received() == MESSAGE
        proxy.set(Faults(swallowed=BOTH))
        line.send()
        eventually(lambda: proxy.count("swallowed"), "it is swallowed")
        with pytest.raises(AttributeError):
            proxy._call("no_such_call")
        proxy.clear()
        line.dealer.send(b"passes")
        assert line.received() == [b"passes"]
        proxy.aim("tcp://127.0.0.1:1")
        proxy.reset_connections()
        line.dealer.send(b"lost")
        assert line.received(0.2) is None
        proxy.aim(line.endpoint)
        assert line.received() == [b"lost"]
        pid = proxy.pid
    assert not Path(f"/proc/{pid}").exists()
    proxy.close()


def test_the_other_direction_is_not_touched(line):
    shot = line.proxy.shoot(TO_CLIENT, TAMPERS["drop message"])
    line.send()
    assert line.received() == MESSAGE
    assert not shot.hit.is_set()
