"""Leases: each pins blocks while its client reads them in place."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from remote_server.store.memory.slabs import Block

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
