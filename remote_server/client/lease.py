"""One lease: the blocks of a get that lie in the server's arena, copied into its rows.

The rule of this file: a block is announced only when its generation word, read after its last
byte, is what the server said, and its checksum is right where it landed. Until then its row may
hold anything; and no row is touched whose get has ended.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add

import xxhash

from remote_server import protocol
from remote_server.client.arena_view import WORD_BYTES, ArenaView
from remote_server.client.gates import Gate, Point
from remote_server.client.get_window import GetTransfer
from remote_server.client.region import RegisteredRegion
from remote_server.errors import RemoteProtocolError
from remote_server.protocol import Leased

# What is copied before it is hashed: small enough to be still in the core's own cache.
PIECE_BYTES = 256 << 10

# Letting go of the GIL costs more than copying this much, when another thread then takes it.
_HOLD_GIL_BELOW_BYTES = 128 << 10

_copy_holding_the_gil = ctypes.PyDLL(None).memmove
_copy_holding_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_holding_the_gil.restype = None
_copy_without_the_gil = ctypes.CDLL(None).memmove
_copy_without_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_without_the_gil.restype = None
_hash = xxhash.xxh3_64_intdigest


@dataclass(slots=True)
class Copied:
    """What became of the blocks that one step copied: indices into the transfer's keys."""

    good: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    num_bytes: int = 0
    good_bytes: int = 0


class Lease:
    """Blocks that may be copied from the arena until `done`, one step at a time."""

    def __init__(
        self,
        reply: Leased,
        transfer: GetTransfer,
        indices: list[int],
        num_bytes: int,
        region: RegisteredRegion,
        arena: ArenaView,
        *,
        integrity: bool,
    ) -> None:
        """`indices` are the transfer's blocks that were asked for; `num_bytes` is their share
        of the window. Raises `RemoteProtocolError` when `reply` contradicts itself."""
        _check(reply, len(indices), arena.num_bytes, integrity=integrity)
        self.number = reply.lease
        self.transfer = transfer
        self.num_bytes = num_bytes
        missing = set(range(len(indices))).difference(reply.found)
        self.missing = [indices[position] for position in sorted(missing)]
        """Blocks that the server does not have."""
        found = [indices[position] for position in reply.found]
        rows = transfer.rows
        self.short = [
            index
            for index, length in zip(found, reply.lengths, strict=True)
            if rows[index].nbytes != length
        ]
        """Blocks that are not as long as their rows; they are not copied."""
        keep = list(range(len(found)))
        if self.short:
            keep = [at for at in keep if rows[found[at]].nbytes == reply.lengths[at]]
        self.indices = [found[at] for at in keep]
        self._lengths = [reply.lengths[at] for at in keep]
        self._sources = [arena.address + reply.offsets[at] for at in keep]
        self._targets = [region.address + transfer.offsets[found[at]] for at in keep]
        self._words = [reply.words[at] // WORD_BYTES for at in keep]
        self._generations = [reply.generations[at] for at in keep]
        self._checksums = [reply.checksums[at] for at in keep] if integrity else []
        self._arena = arena
        self._next = 0

    @property
    def done(self) -> bool:
        """Every block has been copied."""
        return self._next == len(self.indices)

    @property
    def open(self) -> list[int]:
        """The blocks that have not been copied yet."""
        return self.indices[self._next :]

    def step(self, num_bytes: int, clock: Callable[[], float], gate: Gate) -> Copied:
        """Copy blocks until `num_bytes` are reached or the deadline of their get has passed,
        and say what has become of them."""
        if not self._arena.mapped:
            raise RuntimeError("a lease outlived its arena")
        copied = Copied()
        first = self._next
        bad: list[int] = []
        deadline = self.transfer.deadline
        while self._next < len(self.indices) and copied.num_bytes < num_bytes:
            gate(Point.BEFORE_COPY)
            if clock() >= deadline:
                break
            end, run_bytes = self._run()
            if self._checksums:
                self._copy_and_hash(end, run_bytes, bad, gate)
            else:
                self._copy(self._targets[self._next], self._sources[self._next], run_bytes)
            copied.num_bytes += run_bytes
            self._next = end
        gate(Point.BEFORE_GENERATION)
        self._sort(first, bad, copied)
        return copied

    # ── copying ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> tuple[int, int]:
        """Where the next run ends, and its bytes: one block, or small ones that are neighbours
        on both sides."""
        at = self._next
        lengths, sources, targets = self._lengths, self._sources, self._targets
        source, target, num_bytes = sources[at], targets[at], lengths[at]
        for end in range(at + 1, len(self.indices)):
            together = num_bytes + lengths[end]
            if (
                together > PIECE_BYTES
                or sources[end] != source + num_bytes
                or targets[end] != target + num_bytes
            ):
                return end, num_bytes
            num_bytes = together
        return len(self.indices), num_bytes

    def _copy_and_hash(self, end: int, num_bytes: int, bad: list[int], gate: Gate) -> None:
        """Copy the run up to `end` and note in `bad` which blocks are not what they should be."""
        first, transfer = self._next, self.transfer
        indices = self.indices[first:end]
        seeds = protocol.identities(transfer.namespace, [transfer.keys[i] for i in indices])
        if num_bytes > PIECE_BYTES:
            if self._copy_large(first, seeds[0], gate) != self._checksums[first]:
                bad.append(first)
            return
        self._copy(self._targets[first], self._sources[first], num_bytes)
        gate(Point.BEFORE_CHECKSUM)
        sums = [*map(_hash, [transfer.rows[i] for i in indices], seeds)]
        if sums != self._checksums[first:end]:
            bad += [at for at in range(first, end) if sums[at - first] != self._checksums[at]]

    def _copy_large(self, at: int, seed: int, gate: Gate) -> int:
        """Copy one block in pieces, each hashed as soon as it is there; returns its checksum."""
        row = self.transfer.rows[self.indices[at]]
        target, source = self._targets[at], self._sources[at]
        hasher = xxhash.xxh3_64(seed=seed)
        for start in range(0, row.nbytes, PIECE_BYTES):
            piece = row[start : start + PIECE_BYTES]
            self._copy(target + start, source + start, piece.nbytes)
            hasher.update(piece)
        gate(Point.BEFORE_CHECKSUM)
        return hasher.intdigest()

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        if num_bytes < _HOLD_GIL_BELOW_BYTES:
            _copy_holding_the_gil(target, source, num_bytes)
        else:
            _copy_without_the_gil(target, source, num_bytes)

    def _sort(self, first: int, bad: list[int], copied: Copied) -> None:
        """Read the generation words, after everything else, and judge what was copied."""
        words, span = self._arena.words, slice(first, self._next)
        generations = [words[number] for number in self._words[span]]
        if generations == self._generations[span] and not bad:
            copied.good, copied.good_bytes = self.indices[span], copied.num_bytes
            return
        wrong = set(bad)
        for at, generation in enumerate(generations, start=first):
            if generation != self._generations[at]:
                copied.expired.append(self.indices[at])
            elif at in wrong:
                copied.corrupt.append(self.indices[at])
            else:
                copied.good.append(self.indices[at])
                copied.good_bytes += self._lengths[at]


def _check(reply: Leased, num_asked: int, arena_bytes: int, *, integrity: bool) -> None:
    found = reply.found
    lists = (reply.offsets, reply.lengths, reply.words, reply.generations)
    if any(len(one) != len(found) for one in lists) or (
        integrity and len(reply.checksums) != len(found)
    ):
        raise RemoteProtocolError("a lease contradicts itself")
    if not found:
        return
    if len(set(found)) != len(found) or max(found) >= num_asked:
        raise RemoteProtocolError("a lease names blocks that were not asked for")
    if max(map(add, reply.offsets, reply.lengths)) > arena_bytes:
        raise RemoteProtocolError("a lease names bytes outside the arena")
    if max(reply.words) + WORD_BYTES > arena_bytes or any(at % WORD_BYTES for at in reply.words):
        raise RemoteProtocolError("a lease names no generation words")
