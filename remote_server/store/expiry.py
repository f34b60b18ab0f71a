"""Time to live: how old a block may become, and its removal after that."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from remote_server.store.disk.tier import DiskTier
from remote_server.store.tier import Tier


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


# Blocks that grew too old leave when they are asked for; the others at this pace, which costs less
# than a millisecond each time.
SWEEP_S = 0.1
MAX_SWEPT = 512


class Expiry:
    """Removes from both tiers what is older than `ttl`; without one, nothing."""

    def __init__(
        self,
        tier: Tier,
        disk: DiskTier | None,
        ttl: TimeToLive | None,
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
        """Remove those of `keys` that are too old, before anything is said about them."""
        if self._ttl is None:
            return
        self._counters["expired"] += self._tier.expire(namespace, keys, self._ttl.last_birth)
        if self._disk is not None:
            self._disk.expire(namespace, keys, self._ttl.last_generation)

    def expire_some(self) -> None:
        """Now and then some of what is too old and nobody asks for."""
        if self._ttl is None or self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + SWEEP_S
        self._counters["expired"] += self._tier.expire_some(self._ttl.last_birth, MAX_SWEPT)
        if self._disk is not None:
            self._disk.expire_some(self._ttl.last_generation, MAX_SWEPT)
