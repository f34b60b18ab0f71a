"""Leases of the server's arena: one get's, and the window of all."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import add

from remote_server import protocol
from remote_server.client.get_window import GetTransfer
from remote_server.client.region import RegisteredRegion
from remote_server.client.shm_views import WORD_BYTES, ArenaView
from remote_server.errors import RemoteProtocolError
from remote_server.fault_points import Pause, Point
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

    def step(self, num_bytes: int, clock: Callable[[], float], gate: Pause) -> Copied:
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

    def _copy_and_hash(self, group: slice, bad: list[int], gate: Pause) -> None:
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


# A server of many clients must find something to evict while they are all reading.
SHARE_OF_ARENA = 16


@dataclass(slots=True, eq=False)
class LeaseBatch:
    """One GetShared message without an answer yet."""

    transfer: GetTransfer
    indices: list[int]
    num_bytes: int


class LeaseWindow:
    """Batches that wait for their lease, leases being copied, and those to be given back."""

    def __init__(self, most_bytes: int) -> None:
        self._wanted_bytes = self._most_bytes = most_bytes
        self._num_bytes = 0
        self.batches: dict[int, LeaseBatch] = {}
        self.leases: deque[Lease] = deque()
        """Oldest first."""
        self.to_release: deque[int] = deque()

    def limit(self, arena_bytes: int) -> None:
        """Of an arena this large; what is held already stays."""
        self._most_bytes = min(self._wanted_bytes, arena_bytes // SHARE_OF_ARENA)

    @property
    def next_bytes(self) -> int:
        """About how much to ask for now.

        Half of the window: the server answers for one while we copy the other. When nothing is
        under way, an eighth of that, to have something to copy soon.
        """
        nothing = not self.batches and not self.leases
        return max(1, self._most_bytes // (16 if nothing else 2))

    def has_room(self, num_bytes: int) -> bool:
        """Whether that much more may be asked for. Something always may when nothing is."""
        nothing = not self.batches and not self.leases
        return nothing or self._num_bytes + num_bytes <= self._most_bytes

    def ask(self, request_id: int, batch: LeaseBatch) -> None:
        """It was asked for."""
        self.batches[request_id] = batch
        self._num_bytes += batch.num_bytes

    def forget(self, request_id: int) -> None:
        """It will not be leased, or nobody wants it any more."""
        self._num_bytes -= self.batches.pop(request_id).num_bytes

    def hold(self, request_id: int, lease: Lease) -> None:
        """It was leased: its share is the lease's from here on."""
        del self.batches[request_id]
        self.leases.append(lease)

    def drop(self, lease: Lease) -> None:
        """Nothing more will be copied of it."""
        self.leases.remove(lease)
        self._num_bytes -= lease.num_bytes
        self.give_back(lease.number)

    def drop_all_of(self, transfer: GetTransfer) -> None:
        """It is about to end."""
        for lease in [lease for lease in self.leases if lease.transfer is transfer]:
            self.drop(lease)

    def give_back(self, number: int) -> None:
        """The server is to be told that this lease is over; 0 is none."""
        if number:
            self.to_release.append(number)

    @property
    def has_leftovers(self) -> bool:
        """Whether gets that have ended still hold a share for what they asked."""
        return any(batch.transfer.ended for batch in self.batches.values())

    def forget_leftovers(self) -> None:
        """No lease will come for those."""
        for number in [number for number, one in self.batches.items() if one.transfer.ended]:
            self.forget(number)

    def clear(self) -> None:
        """Hold nothing, whatever was held."""
        self.batches.clear()
        self.leases.clear()
        self.to_release.clear()
        self._num_bytes = 0

    def check(self, transfers: Iterable[GetTransfer]) -> None:
        """Every block of `transfers` without a fate is asked for once, or leased, or waits."""
        held: list[LeaseBatch | Lease] = [*self.batches.values(), *self.leases]
        assert self._num_bytes == sum(one.num_bytes for one in held), self._num_bytes
        assert not any(lease.transfer.ended for lease in self.leases), "a lease outlived its get"
        assert not any(lease.done for lease in self.leases), "a finished lease was kept"
        for transfer in transfers:
            own = [one for one in held if one.transfer is transfer]
            parts = (one.indices if isinstance(one, LeaseBatch) else one.open for one in own)
            transfer.check([index for part in parts for index in part])
