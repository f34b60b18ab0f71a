"""Cache entries of a request: an entry is a run of tokens, and becomes blocks of the store."""

import struct
from enum import IntEnum
from typing import NamedTuple

from benchmarks.storage_workload.traffic.models import BlockShape

_KEY = struct.Struct(">BIIII")
_TRACE_KEY = struct.Struct(">BQ")


class Kind(IntEnum):
    """The origin of the tokens. The value is the first byte of the key."""

    SYSTEM = 1  # a prompt that many users begin with
    TURN = 2  # of one conversation
    CHUNK = 3  # of one document
    TRACE = 4  # of a recorded prompt
    FILLER = 5  # of no request: blocks that fill a disk before a run


class Blocks(NamedTuple):
    """Some blocks of the store, in the order of a prompt."""

    keys: list[bytes]
    lengths: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)

    def part(self, start: int, end: int | None = None) -> "Blocks":
        return Blocks(self.keys[start:end], self.lengths[start:end])

    def __add__(self, other: object) -> "Blocks":
        if not isinstance(other, Blocks):
            return NotImplemented
        return Blocks(self.keys + other.keys, self.lengths + other.lengths)


NO_BLOCKS = Blocks([], [])


class Entry(NamedTuple):
    """A system prompt (number), a turn (user, conversation, turn) or a chunk (document, chunk)."""

    kind: Kind
    tokens: int
    first: int
    second: int = 0
    third: int = 0

    def blocks(self, shape: BlockShape) -> Blocks:
        lengths = shape.lengths(self.tokens)
        pack, kind, first, second, third = _KEY.pack, self.kind, *self[2:]
        return Blocks(
            [pack(kind, first, second, third, place) for place in range(len(lengths))], lengths
        )


class TraceEntry(NamedTuple):
    """The blocks of a recorded prompt by their ids, each of the trace's block size."""

    ids: tuple[int, ...]
    tokens: int

    def blocks(self, shape: BlockShape) -> Blocks:
        keys = [_TRACE_KEY.pack(Kind.TRACE, number) for number in self.ids]
        return Blocks(keys, [shape.num_bytes] * len(keys))


AnyEntry = Entry | TraceEntry
