"""Times of uses: a tier counts uses, and this converts its counts to times, for the age of what it
evicts."""

from bisect import bisect_right
from collections.abc import Callable

RESOLUTION_S = 0.1
"""Uses within this time count as one moment."""

MOST_MOMENTS = 4096
"""Beyond that, those are dropped that are nearer to the next one than `OF_AGE` of their age. A year
leaves some two thousand."""

OF_AGE = 1 / 128


class UseTimes:
    """The moments of a tier's uses, whose numbers only grow. One thread."""

    def __init__(self, clock: Callable[[], float], first: int) -> None:
        """`first` is the number of the uses before now."""
        self._clock = clock
        self._numbers = [first]
        self._times = [clock()]
        self._evicted: int | None = None

    def used(self, number: int) -> None:
        """Use `number` is now."""
        now = self._clock()
        if now < self._times[-1] + RESOLUTION_S:
            return
        self._numbers.append(number)
        self._times.append(now)
        if len(self._numbers) > MOST_MOMENTS:
            self._thin(now)

    def evicted(self, number: int) -> None:
        """A block whose last use was `number` is evicted now. Costs next to nothing: a tier may
        evict thousands at once."""
        self._evicted = number

    @property
    def evicted_age_s(self) -> float:
        """How long ago the block that was evicted last had been used; -1 before the first. It grows
        until the next eviction: without that, a tier that once evicted young blocks would seem to
        have no room for ever, and would never be given the blocks that show otherwise."""
        return -1.0 if self._evicted is None else self._clock() - self._time_of(self._evicted)

    def _thin(self, now: float) -> None:
        kept: list[tuple[int, float]] = []
        later = float("inf")
        for number, time in zip(reversed(self._numbers), reversed(self._times), strict=True):
            if later - time >= max(RESOLUTION_S, OF_AGE * (now - time)):
                kept.append((number, time))
                later = time
        self._numbers = [number for number, _ in reversed(kept)]
        self._times = [time for _, time in reversed(kept)]

    def _time_of(self, number: int) -> float:
        return self._times[max(0, bisect_right(self._numbers, number) - 1)]
