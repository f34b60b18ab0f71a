"""The clock of the object store, as far as this server knows it."""

import math
from collections.abc import Callable


class StoreClock:
    """Ages of packs are those of the store's clock: that of this machine may be wrong, or jump.

    The store's time is known from the dates of its objects, and goes on with this machine's
    monotonic clock. It may be behind the store's, so a pack looks younger than it is, never older.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._ahead_s: float | None = None

    def date(self) -> float:
        """The date of an object that is written now, in seconds since 1970. It is never too old
        when the store has shown no date yet."""
        return math.inf if self._ahead_s is None else self._clock() + self._ahead_s

    def set(self, now: float) -> None:
        """The store's clock has just shown `now`."""
        self._ahead_s = now - self._clock()

    def saw(self, modified: float) -> None:
        """An object has this date: the store's clock is not behind it."""
        if self._ahead_s is None or modified > self.date():
            self.set(modified)

    def age_s(self, modified: float) -> float:
        """The age of an object with this date; 0 when the store has shown no date yet."""
        return 0.0 if self._ahead_s is None else max(0.0, self.date() - modified)
