"""Admission to a tier below memory: which blocks are written there, and how many bytes a second."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum, auto

# Keys are remembered as hashes, 100 bytes each. A collision admits a block too early, no more.
MAX_REMEMBERED = 1 << 17

# Seconds of the rate that may be written at once, also after a start with a full directory.
MIN_BURST_S = 60

_UNKNOWN = object()


class Admit(StrEnum):
    """Which blocks are written to disk, within the write rate."""

    ALL = auto()  # every new one, soon after its put: a killed server has its blocks
    TWICE = auto()  # those whose key is put or got a second time


class WriteBudget:
    """A token bucket of bytes: `rate` on average, and at once as much as fills the directory."""

    def __init__(
        self, rate: int, burst: int, start: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rate` in bytes per second; 0 is without limit. `burst` is the most that can be saved,
        and `start` the bytes available now; both are at least `MIN_BURST_S` of the rate."""
        self._rate = rate
        self._burst = max(burst, rate * MIN_BURST_S)
        self._left = float(min(self._burst, max(start, rate * MIN_BURST_S)))
        self._clock = clock
        self._filled_at = clock()

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes`, or nothing: False when they may not be written now."""
        if not self._rate:
            return True
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def left(self) -> int | None:
        """What may be written now; None without a limit."""
        if not self._rate:
            return None
        since = self._clock() - self._filled_at
        return int(min(self._burst, self._left + since * self._rate))

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were taken and then not written."""
        self._left = min(self._burst, self._left + num_bytes)


class Admission:
    """Decides for each block, and remembers the keys of declined blocks: the next put or get of
    such a key offers the block again. Beyond `MAX_REMEMBERED` the oldest key is dropped."""

    def __init__(self, admit: Admit = Admit.ALL, budget: WriteBudget | None = None) -> None:
        """Without `budget` there is no limit."""
        self._admit = admit
        self._budget = budget
        self._turned_away: dict[int, object] = {}  # in order; the values are None

    @property
    def remembers(self) -> bool:
        """Whether `is_due_again` can be true of any key."""
        return bool(self._turned_away)

    def is_due_again(self, namespace: str, key: bytes) -> bool:
        """Whether its block was declined. The key is dropped then, so that the block is offered
        once."""
        return self._turned_away.pop(hash((namespace, key)), _UNKNOWN) is None

    def is_seen_enough(self, namespace: str, key: bytes) -> bool:
        """Whether a block that is put may be written. The key of a declined one is remembered."""
        if self._admit is Admit.ALL or self.is_due_again(namespace, key):
            return True
        self._remember(namespace, key)
        return False

    def may_write(self, namespace: str, key: bytes, num_bytes: int) -> bool:
        """Take `num_bytes` from the budget. The key of a declined block is remembered as well."""
        if self._budget is None or self._budget.take(num_bytes):
            return True
        self._remember(namespace, key)
        return False

    def not_written(self, num_bytes: int) -> None:
        """Return the bytes of blocks that `may_write` allowed and the disk declined."""
        if self._budget is not None:
            self._budget.give_back(num_bytes)

    def declined(self, namespace: str, keys: Iterable[bytes]) -> None:
        """The tier declined the blocks of `keys`, which are remembered."""
        for key in keys:
            self._remember(namespace, key)

    def _remember(self, namespace: str, key: bytes) -> None:
        self._turned_away[hash((namespace, key))] = None
        if len(self._turned_away) > MAX_REMEMBERED:
            del self._turned_away[next(iter(self._turned_away))]
