"""Time to live: the greatest age of a block, and the removal of older ones."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from remote_server.store.disk.tier import DiskTier
from remote_server.store.tier import Tier


class Ttl:
    """Blocks older than `ttl_s` are absent.

    Ages in memory follow the server's own clock. Blocks on disk outlive the server, so their ages
    follow the disk's clock, which makes their generations. Neither clock jumps.
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
    def cutoff(self) -> float:
        """A block created then, or earlier, is too old."""
        return self._clock() - self._ttl_s

    @property
    def cutoff_generation(self) -> int:
        """The same for a block on disk."""
        return self._disk_clock_ns() - int(self._ttl_s * 1e9)

    def now(self) -> float:
        """The creation time of a block that is published now."""
        return self._clock()

    def created_at(self, generation: int) -> float:
        """The creation time of a block on disk: it keeps its age when it is read into memory."""
        age_ns = max(0, self._disk_clock_ns() - generation)
        return self._clock() - age_ns / 1e9


# Blocks that are too old are removed when they are requested; the others at this pace, which costs
# less than a millisecond each time.
SWEEP_S = 0.1
MAX_SWEPT = 512


class Expiry:
    """Removes blocks older than `ttl` from both tiers; without `ttl`, none."""

    def __init__(
        self,
        tier: Tier,
        disk: DiskTier | None,
        ttl: Ttl | None,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._ttl = ttl
        self._counters = counters
        self._clock = clock
        self._sweep_at = clock()

    def expire(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Remove those of `keys` that are too old, before the request is answered."""
        if self._ttl is None:
            return
        self._counters["expired"] += self._tier.expire(namespace, keys, self._ttl.cutoff)
        if self._disk is not None:
            self._disk.expire(namespace, keys, self._ttl.cutoff_generation)

    def expire_some(self) -> None:
        """Remove some of the blocks that are too old and not requested, every `SWEEP_S`."""
        if self._ttl is None or self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + SWEEP_S
        self._counters["expired"] += self._tier.expire_some(self._ttl.cutoff, MAX_SWEPT)
        if self._disk is not None:
            self._disk.expire_some(self._ttl.cutoff_generation, MAX_SWEPT)
