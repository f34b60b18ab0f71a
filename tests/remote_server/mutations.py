"""Messages that are nearly right: drawn as small programs, applied to honest messages.

A program is drawn before the message exists that it will spoil, because replies are made on
another thread. So its steps hold plain numbers, taken modulo what they find. They shrink well.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

Frames = list[bytes]

NUMBERS = (
    0, 1, 2, 3, -1, 7, 8, 127, 128, 511, 512, 4095, 4096, 4097, 65535, 1 << 16, 1 << 20,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, -(1 << 63),
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, False, 0.5, float("nan"), "", "x", "ns", "a\0b", "é" * 700, b"", b"key",
    bytes(129), b"\xff" * 300, [], [[]], [0], [0, 0], [1 << 63], [b""], ["x"], {}, {"": 0},
    {"no_slot": -1},
)  # fmt: skip

RAW = (
    b"", b"\x80", b"\xc1", b"\xc0", b"\x91" * 3000, b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\xa4type", b"\x81\x80\x01",
    b"\x81\xa1\xff\x01", b"\x81\xa4type\xa5found", b"\xd6\xff\0\0\0\0",
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\x82\xa4type\xa1\xff\xaarequest_id\x01",
    b"\x83\xa4type\xa5clear\xaarequest_id\x01\xa9namespace\xa1\xff",
)  # fmt: skip
"""Headers that are nothing, nothing yet, or far too much."""


class Step(NamedTuple):
    """`what` to do, and three numbers: where, and with what."""

    what: str
    a: int
    b: int
    c: int


def steps(*kinds: str) -> st.SearchStrategy[Step]:
    number = st.integers(0, 1 << 16)
    return st.builds(Step, st.sampled_from(kinds), number, number, number)


HEADER = (
    "set", "drop", "add", "number", "item", "shorten", "repeat", "swap", "flip", "cut", "append",
    "raw", "type",
)  # fmt: skip
FRAMES = (
    "no frame", "another frame", "frame twice", "swap frames", "short frame", "long frame",
    "flip frame", "empty frame", "cut message", "magic",
)  # fmt: skip

programs = st.lists(st.one_of(steps(*HEADER), steps(*FRAMES)), min_size=1, max_size=2)
"""What to do to one message."""


def spoil(message: Sequence[bytes], program: Sequence[Step]) -> Frames:
    """The frames of a message, magic and header and payload, after `program`."""
    frames = [bytes(frame) for frame in message]
    for step in program:
        if step.what in HEADER:
            if len(frames) > 1:
                frames[1] = spoil_map(frames[1], step)
        else:
            frames = _spoil_frames(frames, step)
    return frames


def spoil_map(header: bytes, step: Step) -> bytes:
    """A MessagePack map after one step of `HEADER`."""
    what, a, b, c = step
    match what:
        case "raw":
            return RAW[a % len(RAW)]
        case "flip" if header:
            at = a % len(header)
            return header[:at] + bytes([header[at] ^ 1 << b % 8]) + header[at + 1 :]
        case "cut" if header:
            return header[: a % len(header)]
        case "append":
            return header + RAW[a % len(RAW)] + bytes(b % 3)
    try:
        fields = msgspec.msgpack.decode(header)
    except Exception:  # an earlier step has made it unreadable
        return header
    if not isinstance(fields, dict) or not fields:
        return header
    name = [*fields][a % len(fields)]
    match what:
        case "set":
            fields[name] = VALUES[b % len(VALUES)]
        case "drop":
            del fields[name]
        case "add":
            fields[f"field {b % 3}"] = VALUES[c % len(VALUES)]
        case "type":
            fields["type"] = TYPES[b % len(TYPES)]
        case _:
            fields[name] = _spoil_value(fields[name], step)
    try:
        return msgspec.msgpack.encode(fields)
    except Exception:  # spoiled beyond what can be encoded
        return header


TYPES = (
    "hello", "lookup", "put", "get", "touch", "verify", "stats", "clear", "put_shared",
    "get_shared", "release", "keep", "kept", "welcome", "found", "stored", "got", "blocks",
    "leased", "touched",
    "verified", "stats_reply", "cleared", "error", "attach", "attached", "not_attached", "record",
    "recorded", "",
)  # fmt: skip


def _spoil_value(value: Any, step: Step) -> Any:
    """Another value of the same kind, or nearly."""
    what, _, b, c = step
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _another_number(value, b, c)
    if isinstance(value, str):
        return value + "x" * (b % 3) if b % 2 else value[: b % (len(value) + 1)]
    if isinstance(value, bytes) and value and what != "shorten":
        at = b % len(value)
        return value[:at] + bytes([c % 256]) + value[at + 1 :]
    if isinstance(value, bytes):
        return value[:-1]
    if isinstance(value, dict) and value:
        name = [*value][b % len(value)]
        return value | {name: _spoil_value(value[name], Step(what, 0, c, b))}
    if not isinstance(value, list) or not value:
        return VALUES[c % len(VALUES)]
    at, other = b % len(value), c % len(value)
    items = list(value)
    match what:
        case "shorten":
            del items[at]
        case "repeat":
            items.insert(other, items[at])
        case "swap":
            items[at], items[other] = items[other], items[at]
        case _:
            items[at] = _spoil_value(items[at], Step("number", 0, c, b))
    return items


def _another_number(value: int, b: int, c: int) -> int:
    number = (value + 1, value - 1, value * 2, NUMBERS[c % len(NUMBERS)])[b % 4]
    return number if -(1 << 63) <= number < 1 << 64 else 0


def _spoil_frames(frames: Frames, step: Step) -> Frames:
    what, a, b, c = step
    if what == "magic":
        return [(b"", b"KVF2", b"KVF1x", b"kvf1")[a % 4], *frames[1:]]
    if what == "cut message":
        return frames[: a % (len(frames) + 1)]
    if what == "another frame":
        at = 1 + a % len(frames) if frames else 0
        return [*frames[:at], bytes([b % 256]) * (c % 5000), *frames[at:]]
    if len(frames) < 3:
        return frames
    at, other = 2 + a % (len(frames) - 2), 2 + b % (len(frames) - 2)
    frame = frames[at]
    match what:
        case "no frame":
            return [*frames[:at], *frames[at + 1 :]]
        case "frame twice":
            return [*frames[:at], frame, *frames[at:]]
        case "swap frames":
            frames[at], frames[other] = frames[other], frames[at]
        case "short frame":
            frames[at] = frame[: -1 - b % 100]
        case "long frame":
            frames[at] = frame + bytes(1 + b % 5000)
        case "empty frame":
            frames[at] = b""
        case "flip frame" if frame:
            spot = b % len(frame)
            frames[at] = frame[:spot] + bytes([frame[spot] ^ 1 << c % 8]) + frame[spot + 1 :]
    return frames


raw_messages = st.one_of(
    st.lists(st.binary(max_size=40), max_size=5),
    st.binary(max_size=200).map(lambda header: [b"KVF1", header]),
    st.sampled_from(RAW).map(lambda header: [b"KVF1", header]),
)
"""Messages of whatever bytes there are. Mostly shorter than an honest one."""
