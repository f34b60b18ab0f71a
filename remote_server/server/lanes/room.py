"""Memory for puts on lanes before their bytes have come: a bounded part, and a line of those that
wait for it."""

from collections import deque
from collections.abc import Callable

from remote_server.server.lanes.lanes import Lane

# Of a tenant's memory. Bytes that were announced may never come, and until the lane counts as
# stalled no other block can have their slots.
SHARE = 8

# Of the puts that have waited, in one turn of the loop: a millisecond.
BEGUN_PER_TURN = 16


class LaneRoom:
    """The bytes of one tenant for which slots are reserved while they are on their way. One thread.

    What a lane brings has an order, that of its messages. So behind one that waits for room all
    that come later on its lane wait, and of the lanes each has its turn. A put that waits has no
    slots, and its keys are not known to the store.

    A put that has the room to itself always has enough.
    """

    def __init__(self, budget: int) -> None:
        """`budget` is the tenant's memory in bytes."""
        self.most = budget // SHARE
        self.taken = 0
        self._lanes: deque[Lane] = deque()
        """Those whose first waiting put has no turn yet, each once."""

    @property
    def is_waited_for(self) -> bool:
        """`begin_some` may have work."""
        return bool(self._lanes)

    def has_room(self, lane: Lane, num_bytes: int) -> bool:
        """Whether a put of so much that has just arrived on `lane` may begin. Where others wait it
        may not, or a large one among them would never have its turn."""
        return not (lane.has_waiting or self._lanes) and self._fits(num_bytes)

    def wait(self, lane: Lane, num_bytes: int, begin: Callable[[], None]) -> None:
        """Call `begin` when `lane` has its turn and there is room, in a later turn of the loop, or
        when the lane ends. It begins the put, which calls `settled` when it has its slots or is
        refused."""
        if not lane.has_waiting:
            self._lanes.append(lane)
        lane.waiting.append((num_bytes, begin))

    def settled(self, lane: Lane) -> None:
        """A put of `lane` that has begun has its slots, or is refused: the next one may follow."""
        if lane.is_settling:
            lane.is_settling = False
            if lane.waiting:
                self._lanes.append(lane)

    def take(self, num_bytes: int) -> None:
        """Slots for so much are about to be reserved."""
        self.taken += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """The reverse of `take`: the bytes have come, or do not come."""
        self.taken -= num_bytes

    def begin_some(self) -> bool:
        """Begin some of those that have room now. True when there may be more of them."""
        return all(self._begin_one() for _ in range(BEGUN_PER_TURN))

    def _fits(self, num_bytes: int) -> bool:
        return not self.taken or self.taken + num_bytes <= self.most

    def _begin_one(self) -> bool:
        while self._lanes and not self._lanes[0].waiting:
            self._lanes.popleft()  # it has ended
        if not self._lanes or not self._fits(self._lanes[0].waiting[0][0]):
            return False
        lane = self._lanes.popleft()
        _, begin = lane.waiting.popleft()
        lane.is_settling = True
        begin()
        return True
