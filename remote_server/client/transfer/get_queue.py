"""The callers' gets of one channel: when each has waited for too long, and the keys that each names
before it requests them, for a server that reads far ahead."""

from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from remote_server.protocol import MAX_AHEAD_KEYS

if TYPE_CHECKING:
    from remote_server.client.transfer.get import GetTransfer


class GetQueue:
    """The callers' gets by age."""

    def __init__(self) -> None:
        self._transfers: dict[int, GetTransfer] = {}
        self._orders = count(1)
        self.num_bytes = 0

    def __iter__(self) -> "Iterator[GetTransfer]":
        return iter(list(self._transfers.values()))

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: "GetTransfer", now: float) -> None:
        """Append it; its wait begins at `now`."""
        transfer.order = next(self._orders)
        transfer.progress = now
        self._transfers[transfer.order] = transfer
        self.num_bytes += transfer.total_bytes

    def remove(self, transfer: "GetTransfer") -> None:
        """Remove it; it is about to end."""
        del self._transfers[transfer.order]
        self.num_bytes -= transfer.total_bytes
        self._pass_on(transfer)

    def progressed(self, transfer: "GetTransfer", now: float) -> None:
        """Record that bytes came for it. It may have ended already."""
        transfer.progressed(self._waits_since(transfer), now)
        if transfer.ended:
            self._pass_on(transfer)

    def _waits_since(self, transfer: "GetTransfer") -> float:
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

    def _pass_on(self, transfer: "GetTransfer") -> None:
        for other in self._transfers.values():
            if other.order > transfer.order:
                other.progress = max(other.progress, transfer.progress)

    def stall_times(self) -> "Iterator[tuple[GetTransfer, float, float]]":
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


class Ahead(NamedTuple):
    """What one request names ahead of it, and the sizes of these blocks."""

    keys: list[bytes]
    sizes: list[int]


class NamedAhead:
    """The blocks of one get that the server knows of and that were not requested yet: always the
    next ones. Each is named once."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()

    def next(self, number: int, blocks: Iterator[tuple[bytes, int]], most_bytes: int) -> Ahead:
        """What a request of the next `number` blocks can name, so that the server knows of
        `most_bytes` behind them. `blocks` are the keys and sizes of all that remain."""
        room = most_bytes - sum(islice(self._sizes, number, None))
        ahead = Ahead([], [])
        for key, size in islice(blocks, max(number, len(self._sizes)), None):
            room -= size
            if room < 0 or len(ahead.keys) == MAX_AHEAD_KEYS:
                break
            ahead.keys.append(key)
            ahead.sizes.append(size)
        return ahead

    def sent(self, number: int, ahead: Ahead) -> None:
        """The request of the next `number` blocks was sent, and named `ahead`."""
        for _ in range(min(number, len(self._sizes))):
            self._sizes.popleft()
        self._sizes += ahead.sizes
