"""Gets that have not ended, oldest first, and how long each has waited for a byte.

Gets share one wire in the order they were submitted. So a get is not stalled while blocks come
for one before it, and a get that ends passes what it knew of the wire on to those behind it.
"""

from collections.abc import Iterator
from itertools import count
from math import inf

from remote_server.client.get_window import GetTransfer


class GetQueue:
    """The callers' gets by age."""

    def __init__(self) -> None:
        self._transfers: dict[int, GetTransfer] = {}
        self._orders = count(1)
        self.num_bytes = 0

    def __iter__(self) -> Iterator[GetTransfer]:
        return iter(list(self._transfers.values()))

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: GetTransfer, now: float) -> None:
        """It waits from `now` on, behind all others."""
        transfer.order = next(self._orders)
        transfer.progress = now
        self._transfers[transfer.order] = transfer
        self.num_bytes += transfer.total_bytes

    def remove(self, transfer: GetTransfer) -> None:
        """It is about to end."""
        del self._transfers[transfer.order]
        self.num_bytes -= transfer.total_bytes
        self._pass_on(transfer)

    def progressed(self, transfer: GetTransfer, now: float) -> None:
        """Something came for it, whether or not it is still here."""
        transfer.progress = now
        if transfer.ended:
            self._pass_on(transfer)

    def _pass_on(self, transfer: GetTransfer) -> None:
        for other in self._transfers.values():
            if other.order > transfer.order:
                other.progress = max(other.progress, transfer.progress)

    def _stall_times(self) -> Iterator[tuple[GetTransfer, float]]:
        progress = 0.0
        for transfer in self:
            progress = max(progress, transfer.progress)
            yield transfer, progress + transfer.stall_s

    def late(self, now: float) -> Iterator[tuple[GetTransfer, bool]]:
        """The gets that have waited long enough, and whether it is because nothing comes."""
        for transfer, stalls_at in self._stall_times():
            if stalls_at <= now or transfer.deadline <= now:
                yield transfer, stalls_at <= now

    def wake_at(self) -> float:
        """When the next one may be late."""
        times = (min(get.deadline, stalls_at) for get, stalls_at in self._stall_times())
        return min(times, default=inf)

    def check(self) -> None:
        """Nobody who ended is here, and the bytes add up."""
        assert not any(transfer.ended for transfer in self), "a get outlived its end"
        assert self.num_bytes == sum(transfer.total_bytes for transfer in self)
