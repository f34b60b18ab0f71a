"""How old a block may become, and how old one is that came back from a disk."""

import time
from collections.abc import Callable


class TimeToLive:
    """Blocks older than `ttl_s` are absent.

    In memory age is counted by the server's own clock. What is on disk outlives the server, so
    there it is counted by the disk's clock, of which its generations are made. Neither jumps.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        disk_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._disk_clock_ns = disk_clock_ns

    @property
    def last_birth(self) -> float:
        """What was born then, or earlier, is too old."""
        return self._clock() - self._ttl_s

    @property
    def last_generation(self) -> int:
        """The same for what is on disk."""
        return self._disk_clock_ns() - int(self._ttl_s * 1e9)

    def now(self) -> float:
        """When a block was born that is published now."""
        return self._clock()

    def born(self, generation: int) -> float:
        """When a block of the disk was written: it does not become younger by coming back."""
        age_ns = max(0, self._disk_clock_ns() - generation)
        return self._clock() - age_ns / 1e9
