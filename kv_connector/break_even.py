"""Whether a prefix is worth fetching: only if that is sooner than computing it.

`worth_loading` decides from numbers alone. `BreakEven` feeds it what was measured, and lets
some requests through against its verdict, or a link that was slow once would never be measured
again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_connector.speeds import EngineSpeed, LinkSpeed

# While prefixes are declined, one is fetched all the same: every so many of them, and the first
# one after so long. The median then needs five of these to turn around.
PROBE_EVERY = 16
PROBE_AFTER_S = 10.0


def worth_loading(
    num_bytes: int,
    num_tokens: int,
    *,
    bytes_per_s: float | None,
    round_trip_s: float | None,
    tokens_per_s: float | None,
    round_trips: int,
) -> bool:
    """Whether loading `num_bytes` ends before computing `num_tokens` would.

    `round_trips` are still to be made: a lookup and the load's own before the lookup, one after
    it. True when a speed is unknown: what is not fetched cannot be measured.
    """
    if bytes_per_s is None or round_trip_s is None or tokens_per_s is None:
        return True
    if bytes_per_s <= 0:
        return False
    if tokens_per_s <= 0:
        return True
    return round_trips * round_trip_s + num_bytes / bytes_per_s <= num_tokens / tokens_per_s


@dataclass
class BreakEven:
    """The gate of one engine. Only the scheduler thread calls it."""

    clock: Callable[[], float]
    enabled: bool = True
    link: LinkSpeed = field(default_factory=LinkSpeed)
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    _declined: int = 0
    _last_probe_s: float | None = None

    def admits(self, num_bytes: int, num_tokens: int, *, round_trips: int) -> bool:
        """Whether to fetch this prefix: it is worth it, or it is time to measure again."""
        if not self.enabled or worth_loading(
            num_bytes,
            num_tokens,
            bytes_per_s=self.link.bytes_per_s,
            round_trip_s=self.link.round_trip_s,
            tokens_per_s=self.engine.tokens_per_s,
            round_trips=round_trips,
        ):
            return True
        now_s = self.clock()
        if self._last_probe_s is None:
            self._last_probe_s = now_s
        self._declined += 1
        if self._declined < PROBE_EVERY and now_s - self._last_probe_s < PROBE_AFTER_S:
            return False
        self._declined, self._last_probe_s = 0, now_s
        return True
