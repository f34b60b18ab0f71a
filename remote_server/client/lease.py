"""One lease: the blocks of a get that lie in the server's arena, copied into its rows.

The rule of this file: a block is announced only when its generation word, read after its last
byte, is what the server said, and its checksum is right where it landed. Until then its row may
hold anything; and no row is touched whose get has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import add

from remote_server import protocol
from remote_server.client.arena_view import WORD_BYTES, ArenaView
from remote_server.client.gates import Gate, Point
from remote_server.client.get_window import GetTransfer
from remote_server.client.region import RegisteredRegion
from remote_server.errors import RemoteProtocolError
from remote_server.protocol import Leased
from remote_server.shm.copying import copy_and_hash_group, copy_group, group_blocks


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
        self._group_blocks = group_blocks(max(self._lengths, default=1))
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
            group = slice(self._next, min(self._next + self._group_blocks, len(self.indices)))
            if self._checksums:
                self._copy_and_hash(group, bad, gate)
            else:
                copy_group(self._targets[group], self._sources[group], self._lengths[group])
            copied.num_bytes += sum(self._lengths[group])
            self._next = group.stop
        gate(Point.BEFORE_GENERATION)
        self._sort(first, bad, copied)
        return copied

    # ── copying ──────────────────────────────────────────────────────────────────────────

    def _copy_and_hash(self, group: slice, bad: list[int], gate: Gate) -> None:
        """Copy a group and note in `bad` which of its blocks are not what they should be."""
        transfer, indices = self.transfer, self.indices[group]
        computed = copy_and_hash_group(
            self._targets[group],
            self._sources[group],
            [transfer.rows[index] for index in indices],
            protocol.identities(transfer.namespace, [transfer.keys[index] for index in indices]),
            partial(gate, Point.BEFORE_CHECKSUM),
        )
        announced = self._checksums[group]
        if computed != announced:
            pairs = enumerate(zip(computed, announced, strict=True), start=group.start)
            bad += [at for at, (is_now, should_be) in pairs if is_now != should_be]

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
