"""Regions that clients on this host share, leases, and gets that grant one.

A lease pins blocks while its client reads them in place.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode, Leased, LeaseRequest
from remote_server.server.sending.outgoing import OutgoingMessage, checksums_of
from remote_server.server.shm.fills import Fills
from remote_server.server.transfer.get import Get, Gets, GetState
from remote_server.shm.mapping import Arena
from remote_server.shm.region import Region
from remote_server.store.gets import Pinned
from remote_server.store.slabs import Block
from remote_server.turns import Steps, parts

# A reader copies gigabytes within a second. One that was stopped for longer than this loses its
# lease, and detects by the generation words whether its blocks have changed.
LEASE_MS = 10_000

# A client has a few gets under way; each is a lease at most.
MAX_LEASES_PER_REGION = 256

NO_LEASE = 0
"""The lease of a get that found nothing: there is nothing to release."""


OnEnd = Callable[[bool], None]
"""Called when the pins of a message or lease are released; False when its blocks were not sent."""


def no_notice(_: bool) -> None:
    """Ignore the end."""


class Lease(NamedTuple):
    region: int
    blocks: Sequence[Block]
    num_bytes: int
    ends_at: float
    on_end: OnEnd


class Leases:
    """Pins held for clients that read in place, each until `release`, `end_all` or its timeout.

    All leases last equally long, so they end in the order in which they began.
    """

    def __init__(
        self, unpin_all: Callable[[Iterable[Block]], None], clock: Callable[[], float]
    ) -> None:
        self._unpin_all = unpin_all
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        self._of_region: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def bytes_of(self, region: int) -> int:
        """The bytes on lease to `region`."""
        return sum(self._leases[number].num_bytes for number in self._of_region.get(region, ()))

    def full(self, region: int) -> bool:
        """Whether `region` has as many leases as one may have."""
        return len(self._of_region.get(region, ())) >= MAX_LEASES_PER_REGION

    def grant(self, region: int, blocks: Sequence[Block], on_end: OnEnd = no_notice) -> int:
        """Take over the pins of `blocks`, until the lease that is returned ends."""
        if not blocks:
            on_end(True)
            return NO_LEASE
        # Random, so that no client can end another's lease by counting.
        number = secrets.randbits(62) + 1
        num_bytes = sum(block.length for block in blocks)
        ends_at = self._clock() + LEASE_MS / 1000
        self._leases[number] = Lease(region, blocks, num_bytes, ends_at, on_end)
        self._of_region.setdefault(region, set()).add(number)
        return number

    def release(self, number: int) -> bool:
        """End one lease. False when there is no such lease, or it has ended."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return number == NO_LEASE
        numbers = self._of_region[lease.region]
        numbers.remove(number)
        if not numbers:
            del self._of_region[lease.region]
        self._unpin_all(lease.blocks)
        lease.on_end(True)
        return True

    def end_all(self, region: int) -> None:
        """End the leases of `region`, whose client is gone."""
        for number in [*self._of_region.get(region, ())]:
            self.release(number)

    def expire(self) -> int:
        """End the leases whose time is over. Returns their number."""
        expired = 0
        while self._leases:
            number, lease = next(iter(self._leases.items()))
            if lease.ends_at > self._clock():
                break
            self.release(number)
            expired += 1
        return expired


class Regions:
    """The regions that are attached, and all that ends when the client of one leaves."""

    def __init__(self, counters: Counter[str], leases: Leases, fills: Fills, arena: Arena) -> None:
        """`fills` has the puts of regions, each under its region."""
        self.leases = leases
        self.fills = fills
        self.arena = arena
        self._counters = counters
        self._regions: dict[int, Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def attached(self, region: Region) -> None:
        self._regions[region.token] = region
        self._counters["regions_attached"] += 1

    def gone(self, region: Region) -> None:
        """Its client has left: end its reads and puts, and unmap its memory."""
        del self._regions[region.token]
        self.leases.end_all(region.token)
        region.live = False
        self.fills.drop(region)  # it is not read after this
        region.end()
        self._counters["regions_gone"] += 1

    def refused(self) -> None:
        self._counters["regions_refused"] += 1

    def displaced(self) -> None:
        """A connection to the local socket had to go for others before it attached a region."""
        self._counters["regions_displaced"] += 1

    def find(self, token: int) -> Region:
        """Raises `RequestRefused`."""
        region = self._regions.get(token)
        if region is None:
            raise RequestRefused(
                ErrorCode.UNKNOWN_REGION,
                "no client with this region is connected to the local socket: attach it",
            )
        return region

    def release(self, lease: int) -> None:
        if not self.leases.release(lease):
            self._counters["releases_unknown"] += 1

    def expire_leases(self) -> None:
        self._counters["leases_expired"] += self.leases.expire()


class SharedGet(Get):
    """A get whose client copies the blocks itself. They are pinned by a lease until then."""

    __slots__ = ("_region", "_terms")

    def __init__(
        self, gets: Gets, client: bytes, request: protocol.Get, terms: LeaseRequest
    ) -> None:
        super().__init__(gets, client, request)
        self._terms = terms

    def _find(self) -> Steps[None]:
        regions, request = self._gets.regions, self._request
        if request.timed or not request.stream:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, "stream and timed are for payload frames, not for a lease"
            )
        self._region = regions.find(self._terms.region)
        for number in self._terms.release:
            regions.release(number)
        if regions.leases.full(self._region.token):
            raise RequestRefused(
                ErrorCode.TOO_LARGE, f"{MAX_LEASES_PER_REGION} leases are held: release some"
            )
        yield from self._fetch(request.namespace, request.keys)

    def _send(self, found: Pinned) -> Steps[None]:
        gets, region = self._gets, self._region
        store, leases = gets.store, gets.regions.leases
        blocks = found.blocks
        lengths = [block.length for block in blocks]
        checksums: list[int] = []
        if self._terms.checked:
            for part in parts(blocks):
                if checksums:
                    yield
                checksums += checksums_of(part, store.memory)
        if not region.live:  # its client left meanwhile
            gone = "the local connection ended before the blocks were read"
            raise RequestRefused(ErrorCode.UNKNOWN_REGION, gone)
        gets.in_flight.check(leases.bytes_of(region.token), sum(lengths))
        store.counters["shared_bytes_out"] += sum(lengths)
        self._pinned = ()
        self._enter(GetState.SENDING)
        self._goes_out()
        self._all_out = True
        leased = Leased(
            number=leases.grant(region.token, blocks, self._came_back),
            lease_ms=LEASE_MS,
            offsets=[block.offset for block in blocks],
            words=store.memory.word_offsets(blocks),
            generations=[block.generation for block in blocks],
        )
        got = msgspec.structs.replace(
            self._got(found), lengths=lengths, checksums=checksums, lease=leased
        )
        gets.post(self.client, got, OutgoingMessage([*protocol.encode(got)]))
