"""What is asked for or leased over shared memory, over all gets, bounded in bytes.

A get that has ended keeps the share of what it asked for until the answer has come: the server
keeps those blocks for us, whoever wants them. Its leases are released at once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from remote_server.client.get_window import GetTransfer
from remote_server.client.lease import Lease

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
