"""The fault proxy injects each fault: a chaos suite without faults would pass as well.

That what is swallowed, frozen or caught does not come is what `test_network.py` and
`test_server_ends.py` begin with: their requests would end well.
"""

import random

import pytest
from chaos_client import ChaosClient
from chaos_server import PATIENCE_S, eventually
from faults import Faults
from lane_wire import GREETING_BYTES, HEADER, LaneParser
from oracle import LARGE
from tampering import TAMPERS, ReorderMessages, flip_header, flip_payload
from zmtp import Kind, Parser, message_of, unit_of

MESSAGE = [b"KVF1", b"header of sixteen", b"a" * 300, b"b" * 70_000]


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


def test_each_tampering_sends_something_else():
    unit, one = unit_of(MESSAGE), unit_of([b"one", b"more"])
    sent = {name: tamper(random.Random(1), unit) for name, tamper in TAMPERS.items()}
    assert sent["drop message"] == [] and sent["repeat message"] == [unit.raw] * 2
    assert all(output != [unit.raw] and output is not None for output in sent.values()), sent
    reorder = ReorderMessages()
    assert [reorder(random.Random(1), each) for each in (one, unit)] == [[], [unit.raw, one.raw]]


@pytest.mark.parametrize("faults", [Faults(latency_s=600), Faults(bytes_per_s=1)])
def test_what_is_slow_waits_in_the_proxy(proxy, faults):
    with ChaosClient(proxy.endpoint, "tcp") as client:
        client.wait_until_ready()
        proxy.set(faults)
        put = client.put(LARGE, [1])
        eventually(lambda: proxy.waiting_bytes, "it is on its way")
        assert not put.future.done()
        assert client.client.cancel_all(PATIENCE_S)
        assert client.finish(put) == "late"
