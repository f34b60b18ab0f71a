"""Time to live: the greatest age of a block, and the removal of older ones."""

from collections import Counter
from collections.abc import Callable, Sequence

from remote_server.store.tier_stack import TierStack

# Blocks that are too old are removed when they are requested; the others at this pace, which costs
# less than a millisecond each time.
SWEEP_S = 0.1
MAX_SWEPT = 512


class Expiry:
    """Removes blocks as old as `ttl_s` or older from all tiers; with 0, none.

    Ages in memory follow the server's own clock. Blocks below memory may outlive the server, so
    their tiers have clocks of their own. None of these clocks jumps.
    """

    def __init__(
        self,
        tier_stack: TierStack,
        ttl_s: float,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._tier_stack = tier_stack
        self._ttl_s = ttl_s
        self._counters = counters
        self._clock = clock
        self._sweep_at = clock()

    def expire(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Remove those of `keys` that are too old, before the request is answered."""
        if self._ttl_s:
            removed = self._tier_stack.expire(namespace, keys, self._ttl_s)
            self._counters["expired"] += removed

    def expire_some(self) -> None:
        """Remove some of the blocks that are too old and not requested, every `SWEEP_S`."""
        if self._ttl_s and self._clock() >= self._sweep_at:
            self._sweep_at = self._clock() + SWEEP_S
            self._counters["expired"] += self._tier_stack.expire_some(self._ttl_s, MAX_SWEPT)
