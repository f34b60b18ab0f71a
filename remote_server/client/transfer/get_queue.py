"""Queue of the callers' gets of one channel: when each has waited for too long."""

from collections.abc import Iterator
from itertools import count
from math import inf

from remote_server.client.transfer.get import GetTransfer


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
        """Append it; its wait begins at `now`."""
        transfer.order = next(self._orders)
        transfer.progress = now
        self._transfers[transfer.order] = transfer
        self.num_bytes += transfer.total_bytes

    def remove(self, transfer: GetTransfer) -> None:
        """Remove it; it is about to end."""
        del self._transfers[transfer.order]
        self.num_bytes -= transfer.total_bytes
        self._pass_on(transfer)

    def progressed(self, transfer: GetTransfer, now: float) -> None:
        """Record that bytes came for it. It may have ended already."""
        transfer.progressed(self._waits_since(transfer), now)
        if transfer.ended:
            self._pass_on(transfer)

    def _waits_since(self, transfer: GetTransfer) -> float:
        """When a byte last came for it or a get before it: time behind those is no wait of its
        own."""
        if not transfer.worth_s:
            return transfer.progress
        before = (one.progress for one in self._transfers.values() if one.order < transfer.order)
        return max(transfer.progress, max(before, default=0.0))

    def wait_anew(self, now: float) -> None:
        """The waits of all begin at `now`."""
        for transfer in self._transfers.values():
            transfer.progress = max(transfer.progress, now)

    def _pass_on(self, transfer: GetTransfer) -> None:
        for other in self._transfers.values():
            if other.order > transfer.order:
                other.progress = max(other.progress, transfer.progress)

    def stall_times(self) -> Iterator[tuple[GetTransfer, float, float]]:
        """Each get, the time since which it waits, and the time at which its patience ends. One
        whose blocks cannot be requested yet waits as long as those before it, which fill the
        window."""
        progress = longest_s = 0.0
        for transfer in self:
            progress = max(progress, transfer.progress)
            longest_s = max(longest_s, transfer.patience_s)
            patience_s = longest_s if transfer.to_ask else transfer.patience_s
            yield transfer, progress, progress + patience_s

    def wake_at(self) -> float:
        """Time at which the next one may be late."""
        times = (min(get.deadline, stalls_at) for get, _, stalls_at in self.stall_times())
        return min(times, default=inf)
