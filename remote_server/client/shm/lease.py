"""Leases of blocks in the server's arena: one lease, and the window over all leases."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from remote_server import protocol
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_channel import Batch
from remote_server.errors import RemoteProtocolError
from remote_server.native.job import Job, Kind
from remote_server.protocol import Got, Leased
from remote_server.shm.mapping import WORD_BYTES, ArenaView
from remote_server.shm.region import RegisteredRegion

# Bytes of one job: a millisecond or two.
GROUP_BYTES = 16 << 20


@dataclass(slots=True)
class Copied:
    """Outcome of one group: indices into the transfer's keys."""

    good: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    num_bytes: int = 0
    good_bytes: int = 0


class Group(NamedTuple):
    """Blocks of a lease that one job copies. Their rows belong to the job until it has ended."""

    lease: "Lease"
    places: slice
    job: Job


class Lease:
    """Blocks that may be copied from the arena until `done`, one group after the other."""

    def __init__(
        self,
        reply: Got,
        leased: Leased,
        batch: "LeaseBatch",
        region: RegisteredRegion,
        arena: ArenaView,
        *,
        integrity: bool,
    ) -> None:
        """`batch` is what was requested. Raises `RemoteProtocolError` when `reply` contradicts
        itself."""
        transfer, indices = batch.transfer, batch.indices
        _check(reply, leased, len(indices), arena.num_bytes, integrity=integrity)
        self.number = leased.number
        self.transfer = transfer
        self.num_bytes = batch.num_bytes
        """Its share of the window."""
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
        """Blocks whose length differs from their rows'; they are not copied."""
        keep = list(range(len(found)))
        if self.short:
            keep = [at for at in keep if rows[found[at]].nbytes == reply.lengths[at]]
        self.indices = [found[at] for at in keep]
        self._lengths = [reply.lengths[at] for at in keep]
        self._sources = [arena.address + leased.offsets[at] for at in keep]
        self._targets = [region.address + transfer.offsets[found[at]] for at in keep]
        self._words = [leased.words[at] // WORD_BYTES for at in keep]
        self._generations = [leased.generations[at] for at in keep]
        self._checksums = [reply.checksums[at] for at in keep] if integrity else []
        self._group_blocks = max(1, GROUP_BYTES // max(self._lengths, default=1))
        self._arena = arena
        self._next = 0
        self.copying: list[Group] = []
        """Begun, and not landed."""

    @property
    def has_more(self) -> bool:
        """Blocks remain to be begun."""
        return self._next < len(self.indices)

    @property
    def done(self) -> bool:
        """Every block has been copied."""
        return not (self.copying or self.has_more)

    @property
    def open(self) -> list[int]:
        """The blocks that have not landed yet."""
        begun = [index for group in self.copying for index in self.indices[group.places]]
        return begun + self.indices[self._next :]

    def next_group(self, clock: Callable[[], float]) -> Group | None:
        """Begin the next blocks; None when the deadline of their get has passed. The caller runs
        the job, and no longer than the arena is mapped."""
        if clock() >= self.transfer.deadline:
            return None
        self._require_map()
        places = slice(self._next, min(self._next + self._group_blocks, len(self.indices)))
        seeds = None
        if self._checksums:
            keys = [self.transfer.keys[index] for index in self.indices[places]]
            seeds = protocol.identities(self.transfer.namespace, keys)
        job = Job(
            Kind.COPY, self._targets[places], self._sources[places], self._lengths[places],
            seeds=seeds, stream=True,
        )  # fmt: skip
        group = Group(self, places, job)
        self._next = places.stop
        self.copying.append(group)
        return group

    def landed(self, group: Group) -> Copied:
        """Sort the blocks of `group`, whose job has ended, by outcome."""
        self._require_map()
        self.copying.remove(group)
        announced, job = self._checksums[group.places], group.job
        bad: list[int] = []
        if job.failed or (announced and job.digests.tolist() != announced):
            intact = job.intact(announced)
            bad = [at for at, good in enumerate(intact, group.places.start) if not good]
        copied = Copied(num_bytes=job.num_bytes)
        self._sort(group.places, bad, copied)
        return copied

    def _require_map(self) -> None:
        if not self._arena.mapped:
            raise RuntimeError("a lease is copied after its arena was unmapped")

    def _sort(self, span: slice, bad: list[int], copied: Copied) -> None:
        """Read the generation words, after all else, and sort the copied blocks by outcome."""
        words = self._arena.words
        generations = [words[number] for number in self._words[span]]
        if generations == self._generations[span] and not bad:
            copied.good, copied.good_bytes = self.indices[span], copied.num_bytes
            return
        wrong = set(bad)
        for at, generation in enumerate(generations, start=span.start):
            if generation != self._generations[at]:
                copied.expired.append(self.indices[at])
            elif at in wrong:
                copied.corrupt.append(self.indices[at])
            else:
                copied.good.append(self.indices[at])
                copied.good_bytes += self._lengths[at]


def _check(
    reply: Got, leased: Leased, num_asked: int, arena_bytes: int, *, integrity: bool
) -> None:
    found = reply.found
    lists = (leased.offsets, reply.lengths, leased.words, leased.generations)
    if any(len(one) != len(found) for one in lists) or (
        integrity and len(reply.checksums) != len(found)
    ):
        raise RemoteProtocolError("a lease contradicts itself")
    if not found:
        return
    if len(set(found)) != len(found) or max(found) >= num_asked:
        raise RemoteProtocolError("a lease names blocks that were not requested")
    if max(map(add, leased.offsets, reply.lengths)) > arena_bytes:
        raise RemoteProtocolError("a lease names bytes outside the arena")
    if max(leased.words) + WORD_BYTES > arena_bytes or any(at % WORD_BYTES for at in leased.words):
        raise RemoteProtocolError("a lease names no generation words")


# A server must find blocks to evict while many clients read.
SHARE_OF_ARENA = 16


@dataclass(slots=True, eq=False)
class LeaseBatch(Batch):
    """One get without a reply yet."""

    num_bytes: int


class LeaseWindow:
    """Batches that wait for their lease, leases being copied, and leases to release."""

    def __init__(self, most_bytes: int) -> None:
        self._wanted_bytes = self._most_bytes = most_bytes
        self._num_bytes = 0
        self.batches: dict[int, LeaseBatch] = {}
        self.leases: deque[Lease] = deque()
        """Oldest first."""
        self.to_release: deque[int] = deque()

    def limit(self, arena_bytes: int) -> None:
        """Bound the window by the size of the arena. Leases already held stay."""
        self._most_bytes = min(self._wanted_bytes, arena_bytes // SHARE_OF_ARENA)

    @property
    def next_bytes(self) -> int:
        """Size of the next request, approximately: half of the window. The server prepares one half
        while we copy the other."""
        return max(1, self._most_bytes // 2)

    def has_room(self, num_bytes: int) -> bool:
        """The window has space for that much more. An empty window has space for anything."""
        nothing = not self.batches and not self.leases
        return nothing or self._num_bytes + num_bytes <= self._most_bytes

    def ask(self, request_id: int, batch: LeaseBatch) -> None:
        """Record a batch as requested."""
        self.batches[request_id] = batch
        self._num_bytes += batch.num_bytes

    def forget(self, request_id: int) -> None:
        """Drop a batch: no lease will come, or its get has ended."""
        self._num_bytes -= self.batches.pop(request_id).num_bytes

    def hold(self, request_id: int, lease: Lease) -> None:
        """Replace a batch by its lease, which takes over its share."""
        del self.batches[request_id]
        self.leases.append(lease)

    def drop(self, lease: Lease) -> None:
        """Remove a lease of which nothing more is copied, and release it."""
        self.leases.remove(lease)
        self._num_bytes -= lease.num_bytes
        self.give_back(lease.number)

    def drop_all_of(self, transfer: GetTransfer) -> None:
        """`drop` the leases of a get that is about to end."""
        for lease in [lease for lease in self.leases if lease.transfer is transfer]:
            self.drop(lease)

    def give_back(self, number: int) -> None:
        """Queue the release of this lease for the server; 0 is no lease."""
        if number:
            self.to_release.append(number)

    def forget_leftovers(self) -> None:
        """Drop the batches of ended gets."""
        for number in [number for number, one in self.batches.items() if one.transfer.ended]:
            self.forget(number)

    def forget_all(self) -> None:
        """Drop all batches."""
        for number in list(self.batches):
            self.forget(number)

    def clear(self) -> None:
        """Drop everything without releasing it."""
        self.batches.clear()
        self.leases.clear()
        self.to_release.clear()
        self._num_bytes = 0

    def check(self, transfers: Iterable[GetTransfer]) -> None:
        """Assert that every open block of `transfers` is requested once, leased or waiting."""
        held: list[LeaseBatch | Lease] = [*self.batches.values(), *self.leases]
        assert self._num_bytes == sum(one.num_bytes for one in held), self._num_bytes
        assert not any(lease.transfer.ended for lease in self.leases), "a lease of an ended get"
        assert not any(lease.done for lease in self.leases), "a finished lease was kept"
        for transfer in transfers:
            own = [one for one in held if one.transfer is transfer]
            parts = (one.indices if isinstance(one, LeaseBatch) else one.open for one in own)
            transfer.check([index for part in parts for index in part])
