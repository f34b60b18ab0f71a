"""Faults of a proxy to one message: each function returns the bytes to send in its place.

A `Tamper` gets a seeded generator and the message, and returns runs of bytes to send instead;
`CUT` among them ends the connection there. `None` means: nothing to be done to this one.
"""

import random
from collections.abc import Callable
from typing import Final

from zmtp import Kind, Span, Unit, message_of


class Cut:
    """In place of bytes: the connection ends here."""


CUT: Final = Cut()

Output = bytes | Cut
CARRIERS = (Kind.MESSAGE, Kind.BLOCK)
"""Units that a program sends; the others are the handshakes and heartbeats below it."""

Tamper = Callable[[random.Random, Unit], list[Output] | None]


def flip_at(raw: bytes, byte: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def _flip_within(rng: random.Random, raw: bytes, places: list[tuple[int, int]]) -> bytes:
    """One bit, anywhere in one of `places`, each byte equally likely."""
    at = rng.randrange(sum(end - start for start, end in places))
    for start, end in places:
        if at < end - start:
            return flip_at(raw, start + at, rng.randrange(8))
        at -= end - start
    raise AssertionError("unreachable")


def _body(span: Span) -> tuple[int, int]:
    return span.body, span.end


def flip_payload(rng: random.Random, unit: Unit) -> list[Output] | None:
    """One bit of a block, or of its checksum where it has one. Nothing for a message that carries
    none."""
    places = [_body(span) for span in unit.spans[2:]]
    if unit.kind not in CARRIERS or not any(end > start for start, end in places):
        return None
    return [_flip_within(rng, unit.raw, places)]


def flip_header(rng: random.Random, unit: Unit) -> list[Output] | None:
    """One bit of our own header: the message's type, its keys, lengths, checksums and so on; of a
    block on a lane, its request, position or length."""
    if unit.kind not in CARRIERS or len(unit.spans) < 2:
        return None
    return [_flip_within(rng, unit.raw, [_body(unit.spans[1])])]


def flip_framing(rng: random.Random, unit: Unit) -> list[Output] | None:
    """One bit of what is neither header nor block: flags and lengths of frames, the magic."""
    if unit.kind is not Kind.MESSAGE:
        return None
    places = [(span.start, span.body) for span in unit.spans]
    return [_flip_within(rng, unit.raw, [*places, _body(unit.spans[0])])]


def flip_anywhere(rng: random.Random, unit: Unit) -> list[Output] | None:
    """One bit of anything, the handshake and the heartbeats included."""
    return [_flip_within(rng, unit.raw, [(0, len(unit.raw))])] if unit.raw else None


def truncate(rng: random.Random, unit: Unit) -> list[Output] | None:
    """A frame loses its end, or the message its last frames; the framing stays valid. A block of
    a lane loses its end."""
    if unit.kind is Kind.BLOCK:
        return [unit.raw[: rng.randrange(len(unit.raw))]]
    if unit.kind is not Kind.MESSAGE:
        return None
    bodies = unit.bodies
    if len(bodies) > 1 and rng.random() < 0.5:
        return [message_of(bodies[: rng.randrange(1, len(bodies))])]
    at = rng.randrange(len(bodies))
    if not bodies[at]:
        return None
    bodies[at] = bodies[at][: rng.randrange(len(bodies[at]))]
    return [message_of(bodies)]


def reorder_frames(rng: random.Random, unit: Unit) -> list[Output] | None:
    """Two frames change places, payload frames where there are two."""
    bodies = unit.bodies
    first = 2 if len(bodies) > 3 else 0
    if unit.kind is not Kind.MESSAGE or len(bodies) < 2:
        return None
    a, b = rng.sample(range(first, len(bodies)), 2)
    bodies[a], bodies[b] = bodies[b], bodies[a]
    return [message_of(bodies)]


def repeat_frame(rng: random.Random, unit: Unit) -> list[Output] | None:
    """One frame comes twice."""
    if unit.kind is not Kind.MESSAGE:
        return None
    bodies = unit.bodies
    at = rng.randrange(len(bodies))
    return [message_of([*bodies[: at + 1], *bodies[at:]])]


def repeat_message(_: random.Random, unit: Unit) -> list[Output] | None:
    """The whole message, or block of a lane, comes twice."""
    return [unit.raw, unit.raw] if unit.kind in CARRIERS else None


def drop_message(_: random.Random, unit: Unit) -> list[Output] | None:
    """The whole message, or block of a lane, is lost, and the connection lives on."""
    return [] if unit.kind in CARRIERS else None


def cut_off(rng: random.Random, unit: Unit) -> list[Output] | None:
    """The connection ends in the middle of the message."""
    return [unit.raw[: rng.randrange(len(unit.raw))], CUT] if unit.raw else None


class ReorderMessages:
    """Every second message waits and is sent after the one that follows it. One per direction."""

    def __init__(self) -> None:
        self._waiting: bytes | None = None

    def __call__(self, _: random.Random, unit: Unit) -> list[Output] | None:
        if unit.kind is not Kind.MESSAGE:
            return None
        if self._waiting is None:
            self._waiting = unit.raw
            return []
        waiting, self._waiting = self._waiting, None
        return [unit.raw, waiting]


TAMPERS: dict[str, Tamper] = {
    "flip payload": flip_payload,
    "flip header": flip_header,
    "flip framing": flip_framing,
    "flip anywhere": flip_anywhere,
    "truncate": truncate,
    "reorder frames": reorder_frames,
    "repeat frame": repeat_frame,
    "repeat message": repeat_message,
    "drop message": drop_message,
    "cut mid-message": cut_off,
}
"""By name, for those that pick one at random. Reordering messages needs one object per use."""
