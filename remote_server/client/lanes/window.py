"""Window of gets over lanes: the blocks that were requested and have not come."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from remote_server.client.lanes.user import Lane
from remote_server.client.results import GetOutcome
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_channel import Batch
from remote_server.errors import RemoteProtocolError
from remote_server.protocol import Blocks

MOST_MESSAGES = 256
"""In flight. A server lets 1,024 of a connection wait, of which puts have 512."""


@dataclass(slots=True, eq=False)
class LaneBatch(Batch):
    """One Get message. On the wire a block is its position in `indices`."""

    number: int
    lane: Lane
    sizes: list[int]
    open: set[int]
    """Positions that have not come yet."""
    announced: set[int] = field(default_factory=set)
    """Positions that a message has named, whose bytes come on the lane."""

    def not_found(self, found: list[int]) -> set[int]:
        """The open positions that a summary leaves out. Raises `RemoteProtocolError` for one that
        names others than were requested."""
        positions = set(found)
        if len(positions) != len(found) or not positions <= set(range(len(self.indices))):
            raise RemoteProtocolError("a get's summary names blocks that were not requested")
        return self.open - positions - self.announced


@dataclass(slots=True, eq=False)
class Landing:
    """The blocks of one message on their way."""

    batch: LaneBatch
    reply: Blocks
    expected: list[bool]
    """Of each block, whether its batch awaited it."""
    came: float
    """Time at which the message was read; only of a timed get."""
    bytes_seen: int = 0
    """At the last look."""


class LaneWindow:
    """The batches in flight, bounded in bytes and messages."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.batches: dict[int, LaneBatch] = {}
        self.num_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """The window has space for that much more. An empty window has space for anything."""
        if len(self.batches) >= MOST_MESSAGES:
            return False
        return not self.batches or self.num_bytes + num_bytes <= self.most_bytes

    def add(self, number: int, lane: Lane, transfer: GetTransfer, indices: list[int]) -> None:
        """Record a batch as requested."""
        sizes = [transfer.rows[index].nbytes for index in indices]
        positions = set(range(len(indices)))
        self.batches[number] = LaneBatch(transfer, indices, number, lane, sizes, positions)
        num_bytes = sum(sizes)
        self.num_bytes += num_bytes
        lane.in_bytes += num_bytes

    def close(self, batch: LaneBatch, position: int, outcome: GetOutcome) -> None:
        """Record one block's outcome and release its share of the window. Nothing touches its row
        any more."""
        batch.open.remove(position)
        self._release(batch, batch.sizes[position])
        if not batch.transfer.ended:
            batch.transfer.settle(batch.indices[position], outcome)
        if not batch.open:
            del self.batches[batch.number]

    def close_unannounced(self, batch: LaneBatch, outcome: GetOutcome) -> None:
        """`close` every block that no message has named."""
        for position in batch.open - batch.announced:
            self.close(batch, position, outcome)

    def drop(self, batch: LaneBatch) -> list[int]:
        """Drop a batch: its blocks will not come. Returns the indices of the open ones."""
        del self.batches[batch.number]
        self._release(batch, sum(batch.sizes[one] for one in batch.open))
        return [batch.indices[position] for position in sorted(batch.open)]

    def _release(self, batch: LaneBatch, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        batch.lane.in_bytes -= num_bytes

    def check(self, transfers: Iterable[GetTransfer]) -> None:
        """Assert that the window equals the open batches, and that each get's blocks add up."""
        sizes = [batch.sizes[i] for batch in self.batches.values() for i in batch.open]
        assert self.num_bytes == sum(sizes), sizes
        assert all(batch.open for batch in self.batches.values()), "a finished batch was kept"
        for lane in {batch.lane for batch in self.batches.values()}:
            own = [batch for batch in self.batches.values() if batch.lane is lane]
            assert lane.in_bytes == sum(batch.sizes[i] for batch in own for i in batch.open)
        for transfer in transfers:
            of_it = [batch for batch in self.batches.values() if batch.transfer is transfer]
            transfer.check([batch.indices[i] for batch in of_it for i in batch.open])
