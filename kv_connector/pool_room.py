"""Room in the CPU pool for loads: how many rows the prompts that wait for the engine may fill.

vLLM reserves a row for every hit at once, and evicts rows that were loaded for one waiting prompt
to load those of the next. With more prompts waiting than the pool can hold, all of them would be
loaded again and again. So a prompt is loaded only when there is room for all of it, and its room
is free again when the engine has scheduled it. No clock, no socket; the scheduler thread alone
calls it.
"""

from dataclasses import dataclass
from enum import Enum, auto

# Looks without progress before a request gives up. An admitted prompt frees its room only after
# its rows were copied to the engine, which takes a few steps.
LOOKS_WITHOUT_PROGRESS = 8


class Room(Enum):
    """The answer to a request that wants rows."""

    GRANTED = auto()
    WAIT = auto()
    NEVER = auto()  # other prompts hold their rows and make no progress


@dataclass(slots=True)
class _Waiter:
    """A request that waits for rows, and the time in which none has become free."""

    releases: int
    step: int
    now_s: float
    looks: int = 0
    waited_s: float = 0.0


class PoolRoom:
    """Rows promised to requests, first come, first served.

    While a request waits, later ones of the same step wait too: a long prompt would otherwise wait
    for ever behind short ones.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._held: dict[str, int] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._releases = 0
        self._full_in_step = -1

    @property
    def num_held(self) -> int:
        """Rows promised and not released."""
        return sum(self._held.values())

    def take(self, request_id: str, rows: int, *, most_rows: int, now_s: float, step: int) -> Room:
        """Room for `rows` rows of this request in all, those it holds already included, while
        all requests together hold at most `most_rows`. A request alone always has room."""
        held = self._held.get(request_id, 0)
        # A request that holds rows gets more: two that wait for each other's would wait for ever.
        if not held and (
            self._full_in_step == step or (self._held and self.num_held + rows > most_rows)
        ):
            self._full_in_step = step
            return self._wait(request_id, now_s, step)
        self._held[request_id] = max(held, rows)
        self._waiters.pop(request_id, None)
        return Room.GRANTED

    def release(self, request_id: str) -> None:
        """The request was scheduled, or is no more. Without room it is nothing."""
        self._waiters.pop(request_id, None)
        if self._held.pop(request_id, None) is not None:
            self._releases += 1

    def _wait(self, request_id: str, now_s: float, step: int) -> Room:
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.releases != self._releases:
            self._waiters[request_id] = _Waiter(self._releases, step, now_s)
            return Room.WAIT
        if step == waiter.step + 1:  # else the engine was busy meanwhile, and looked no request up
            waiter.waited_s += now_s - waiter.now_s
            waiter.looks += 1
        waiter.step, waiter.now_s = step, now_s
        stuck = waiter.waited_s > self._patience_s and waiter.looks >= LOOKS_WITHOUT_PROGRESS
        return Room.NEVER if stuck else Room.WAIT
