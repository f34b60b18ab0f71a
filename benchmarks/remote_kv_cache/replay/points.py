"""One replay's question and its answer: levels and policies, and what was found where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.statistics import percentile

STORE, WIRE = "store", "wire"
REPLAYS = (STORE, WIRE)
"""`store`: the server's levels as sets of keys, with its policies. `wire`: a real server process,
the connector's tier and its client, and every block that is found has come and is compared."""


@dataclass(frozen=True)
class Setting:
    """What is replayed against what. Sizes are blocks of the trace."""

    replay: str
    pool_policy: str
    policy: str
    """Of the server's levels."""

    pool: int
    memory: int
    disk: int

    @property
    def places(self) -> int:
        """On all levels together."""
        return self.pool + self.memory + self.disk


@dataclass
class Found:
    """What the requests replayed so far found."""

    requests: int = 0
    blocks: int = 0
    from_pool: int = 0
    from_server: int = 0
    unstored: int = 0
    """Blocks that found no row: every row of the pool was pinned."""

    late_s: list[float] = field(default_factory=list)
    """How long after its time each request was begun; empty when none had a time."""

    @property
    def hits(self) -> int:
        return self.from_pool + self.from_server


@dataclass
class Point:
    """What one replay found. Shares are of the blocks asked for."""

    setting: Setting
    requests: int
    blocks: int
    from_pool: int
    from_memory: int
    from_disk: int
    seconds: float
    late_ms: Mapping[str, float] = field(default_factory=dict)
    """Median, p99 and worst of how late requests were begun; empty at no given speed."""

    remarks: Mapping[str, int] = field(default_factory=dict)
    """What kept blocks from being found or kept other than their being evicted, by reason."""

    @property
    def hits(self) -> int:
        return self.from_pool + self.from_memory + self.from_disk

    @property
    def hit_rate(self) -> float:
        """In percent."""
        return self.percent(self.hits)

    def percent(self, blocks: int) -> float:
        """`blocks` of those asked for."""
        return 100 * blocks / self.blocks if self.blocks else 0.0


def point_of(
    setting: Setting, found: Found, from_disk: int, seconds: float, remarks: Mapping[str, int]
) -> Point:
    """`from_disk` of what the server gave was not in its memory."""
    kept = {name: count for name, count in remarks.items() if count}
    if found.unstored:
        kept["no row in the pool"] = found.unstored
    return Point(
        setting, found.requests, found.blocks, found.from_pool, found.from_server - from_disk,
        from_disk, seconds, lateness(found.late_s), kept,
    )  # fmt: skip


def lateness(late_s: Sequence[float]) -> dict[str, float]:
    """In ms; empty when nothing had a time to begin at."""
    if not late_s:
        return {}
    return {
        "median": percentile(late_s, 50) * 1e3,
        "p99": percentile(late_s, 99) * 1e3,
        "worst": max(late_s) * 1e3,
    }
