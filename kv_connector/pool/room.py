"""Rows of the pool that waiting prompts may fill with blocks of the server."""

from dataclasses import dataclass
from enum import Enum, auto

from kv_connector.pool.rows import PoolRows

# Of these rows, those that slow loads may hold: the server's bucket answers in tenths of a second,
# a slow link takes seconds, and prompts that wait for them would keep out those that load at once.
SLOW_SHARE = 0.5

# Lookups without progress before a request gives up. An admitted prompt releases its room only
# after its rows were copied to the engine, which takes a few steps.
LOOKUPS_WITHOUT_PROGRESS = 8


class Room(Enum):
    """Result of a request for rows."""

    GRANTED = auto()
    WAIT = auto()
    NEVER = auto()  # other prompts hold their rows and make no progress


@dataclass(slots=True)
class _Waiter:
    """A request that waits for rows, and the time without a release of any."""

    releases: int
    step: int
    now_s: float
    lookup_steps: int = 0
    waited_s: float = 0.0


class PoolRoom:
    """Rows reserved for loads of requests, first come, first served.

    While a request waits, later ones of the same step wait too. Otherwise short prompts could
    starve a long one. Slow loads have a share of the rows, and only each other wait for them.
    """

    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self._held: dict[str, int] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._releases = 0
        self._full_in_step = self._slow_full_in_step = -1
        self._slow: set[str] = set()
        """Of the requests that hold rows, those whose loads are slow."""
        self._resumed: set[str] = set()
        """Preempted requests. vLLM does not report when they are scheduled again, so they reserve
        no room."""

    @property
    def num_held(self) -> int:
        """Rows reserved and not released."""
        return sum(self._held.values())

    @property
    def most_rows(self) -> int:
        """Most rows that several requests hold together."""
        return self._rows.rows_for_loads

    def take(
        self, request_id: str, rows: int, *, now_s: float, step: int, wait_s: float,
        is_slow: bool = False,
    ) -> Room:  # fmt: skip
        """Reserve `rows` rows in all for this request, including those it holds, which waits at
        most `wait_s` while none becomes free. `is_slow`: its load holds them for long. A request
        alone always gets room."""
        if request_id in self._resumed:
            return Room.GRANTED
        held = self._held.get(request_id, 0)
        # A request that holds rows gets more: two that wait for each other would deadlock.
        if not held and self._is_full(rows, step, is_slow):
            if is_slow:
                self._slow_full_in_step = step
            else:
                self._full_in_step = step
            return self._wait(request_id, now_s, step, wait_s)
        self._held[request_id] = max(held, rows)
        if is_slow:
            self._slow.add(request_id)
        self._waiters.pop(request_id, None)
        return Room.GRANTED

    def _is_full(self, rows: int, step: int, is_slow: bool) -> bool:
        if self._full_in_step == step or (self._held and self.num_held + rows > self.most_rows):
            return True
        if not is_slow:
            return False
        slow = sum(self._held[request_id] for request_id in self._slow)
        return self._slow_full_in_step == step or (
            slow > 0 and slow + rows > SLOW_SHARE * self.most_rows
        )

    def release(self, request_id: str) -> None:
        """The request was scheduled: release its room, if it has any."""
        self._slow.discard(request_id)
        self._waiters.pop(request_id, None)
        if self._held.pop(request_id, None) is not None:
            self._releases += 1

    def preempted(self, request_id: str) -> None:
        """The engine will look the request up again."""
        self.release(request_id)
        self._resumed.add(request_id)

    def finished(self, request_id: str) -> None:
        self.release(request_id)
        self._resumed.discard(request_id)

    def _wait(self, request_id: str, now_s: float, step: int, wait_s: float) -> Room:
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.releases != self._releases:
            self._waiters[request_id] = _Waiter(self._releases, step, now_s)
            return Room.WAIT
        if step == waiter.step + 1:  # else the engine was busy meanwhile and made no lookups
            waiter.waited_s += now_s - waiter.now_s
            waiter.lookup_steps += 1
        waiter.step, waiter.now_s = step, now_s
        stuck = waiter.waited_s > wait_s and waiter.lookup_steps >= LOOKUPS_WITHOUT_PROGRESS
        return Room.NEVER if stuck else Room.WAIT
