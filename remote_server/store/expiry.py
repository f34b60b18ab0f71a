"""What is too old leaves when it is asked for, and otherwise little by little."""

from collections import Counter
from collections.abc import Callable, Sequence

from remote_server.store.age import TimeToLive
from remote_server.store.disk.tier import DiskTier
from remote_server.store.tier import Tier

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
