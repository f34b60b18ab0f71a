"""The fault proxy injects each fault: a chaos suite without faults would pass as well."""

import random
from collections.abc import Iterator

import pytest
import zmq
from chaos_server import PATIENCE_S, eventually
from fault_proxy import FaultProxy
from faults import BOTH, TO_SERVER, Faults
from lane_wire import GREETING_BYTES, HEADER, LaneParser
from tampering import TAMPERS, ReorderMessages, flip_header, flip_payload
from zmtp import Kind, Parser, message_of, unit_of

MESSAGE = [b"KVF1", b"header of sixteen", b"a" * 300, b"b" * 70_000]
MARK = [b"mark"]


class Line:
    """A DEALER and a ROUTER with a proxy between them."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.rcvtimeo = int(PATIENCE_S * 1000)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.proxy = FaultProxy(self.endpoint, seed=1)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.reconnect_ivl = 10
        self.dealer.connect(self.proxy.endpoint)
        self.dealer.send(b"hello")
        self.name = self.router.recv_multipart()[0]

    def received(self) -> list[bytes]:
        """The next message at the router."""
        return self.router.recv_multipart()[1:]

    def arrived(self) -> list[list[bytes]]:
        """What comes to the router before a mark that is sent now."""
        self.dealer.send_multipart(MARK)
        return list(iter(self.received, MARK))

    def close(self) -> None:
        self.proxy.close()
        self.context.destroy(linger=0)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def frame(length: int) -> bytes:
    return HEADER.pack(7, 0, length) + bytes(range(length)) + b"digest_8"


FRAMES = [frame(length) for length in (0, 1, 40, 200, 3)]


@pytest.mark.parametrize(
    ("parser", "stream", "kind", "whole"),
    [
        (Parser, bytes(64) + b"\x04\x05READY" + message_of(MESSAGE) * 3 + b"\x04\x03abc",
         Kind.MESSAGE, [message_of(MESSAGE)] * 3),
        (lambda: LaneParser(GREETING_BYTES), b"KVFL" + bytes(4) + b"".join(FRAMES),
         Kind.BLOCK, FRAMES),
    ],
    ids=["messages", "lane"],
)  # fmt: skip
def test_the_units_of_a_stream_back_to_back_are_the_stream_however_it_was_cut(
    parser, stream, kind, whole
):
    rng = random.Random(4)
    for _ in range(20):
        parsing, units, rest = parser(), [], stream
        while rest:
            size = rng.randrange(1, 1 + len(stream) // 5)
            units += parsing.feed(rest[:size])
            rest = rest[size:]
        assert b"".join(unit.raw for unit in units) == stream
        assert [unit.raw for unit in units if unit.kind is kind] == whole


def places_changed(tamper, unit) -> set[int]:
    """Where `tamper` flips a bit, of many that it flips."""
    rng, places = random.Random(5), set[int]()
    for _ in range(400):
        (changed,) = tamper(rng, unit)
        pairs = zip(unit.raw, changed, strict=True)
        (at,) = (n for n, (one, other) in enumerate(pairs) if (one ^ other).bit_count() == 1)
        places.add(at)
    return places


def test_a_flip_changes_one_bit_and_only_where_it_says():
    unit = unit_of([b"KVF1", b"header of sixteen", b"a" * 300, b"b" * 40])
    for name, frames in (("header", {1}), ("payload", {2, 3}), ("framing", {0, None})):
        hit = {
            next((n for n, span in enumerate(unit.spans) if span.body <= at < span.end), None)
            for at in places_changed(TAMPERS[f"flip {name}"], unit)
        }
        assert hit <= frames, name
    (block,) = LaneParser(0).feed(frame(4))
    assert places_changed(flip_header, block) == {*range(16)}
    assert places_changed(flip_payload, block) == {*range(16, 28)}


def test_each_tampering_changes_what_arrives(line):
    arrived = {}
    for name, tamper in TAMPERS.items():
        if name in ("flip framing", "flip anywhere", "cut mid-message"):
            continue  # may end the connection
        shot = line.proxy.shoot(TO_SERVER, tamper)
        line.dealer.send_multipart(MESSAGE)
        arrived[name] = line.arrived()
        assert shot.hit.is_set()
    assert arrived.pop("drop message") == []
    assert arrived.pop("repeat message") == [MESSAGE] * 2
    for name, messages in arrived.items():
        assert messages != [MESSAGE], name
    line.proxy.set(Faults(tamper=ReorderMessages()))
    line.dealer.send(b"one")
    assert line.arrived() == [], "the mark comes first"
    assert line.received() == [b"one"]


def test_what_is_swallowed_never_comes_and_what_is_frozen_comes_later(line):
    line.proxy.set(Faults(swallowed=frozenset({TO_SERVER})))
    line.dealer.send_multipart(MESSAGE)
    eventually(lambda: line.proxy.counts["swallowed"], "it is swallowed")
    line.proxy.set(Faults(frozen=BOTH))
    line.dealer.send(b"frozen")
    line.proxy.clear()
    assert line.arrived() == [[b"frozen"]]


@pytest.mark.parametrize("faults", [Faults(latency_s=600), Faults(bytes_per_s=1)])
def test_what_is_slow_waits_in_the_proxy(line, faults):
    line.proxy.set(faults)
    line.dealer.send_multipart(MESSAGE)
    eventually(lambda: line.proxy.waiting_bytes, "it is on its way")
    assert not line.router.poll(0)


def test_a_caught_message_stops_within_and_goes_on_or_ends_as_told(line):
    caught = line.proxy.catch(TO_SERVER, "", fraction=0.5)
    line.dealer.send_multipart(MESSAGE)
    caught.wait()
    assert not line.router.poll(0)
    caught.release(deliver=True)
    assert line.arrived() == [MESSAGE]
    caught = line.proxy.catch(TO_SERVER, "", fraction=0.5)
    line.dealer.send_multipart(MESSAGE)
    caught.wait()
    caught.release(deliver=False)
    eventually(lambda: line.proxy.num_connections == 1, "the dealer has connected again")
    assert line.arrived() == []
