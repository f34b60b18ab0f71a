"""Settings and results of a replay: levels and policies, and hits by level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.statistics import percentile

STORE, WIRE = "store", "wire"
REPLAYS = (STORE, WIRE)
"""`store`: the server's levels as sets of keys, with its policies. `wire`: a real server process,
the connector's tier and its client; every block that is found arrives and is compared."""


@dataclass(frozen=True)
class Setting:
    """The kind of a replay, its levels and policies. Sizes are blocks of the trace."""

    replay: str
    pool_policy: str
    policy: str
    """The policy of the server's levels."""

    pool: int
    memory: int
    disk: int
    bucket: str = ""
    """What is written to a bucket below, as its `--bucket-admit`; empty: there is none."""

    @property
    def places(self) -> int:
        """On all levels together."""
        return self.pool + self.memory + self.disk


@dataclass
class Found:
    """Counts of the requests replayed so far."""

    requests: int = 0
    blocks: int = 0
    from_pool: int = 0
    from_server: int = 0
    unstored: int = 0
    """Blocks that found no row: every row of the pool was pinned."""

    late_s: list[float] = field(default_factory=list)
    """The delay of each request after its time; empty when none had a time."""

    @property
    def hits(self) -> int:
        return self.from_pool + self.from_server


@dataclass
class Point:
    """The result of one replay. Shares are of the requested blocks."""

    setting: Setting
    requests: int
    blocks: int
    from_pool: int
    from_memory: int
    from_disk: int
    seconds: float
    late_ms: Mapping[str, float] = field(default_factory=dict)
    """Median, p99 and maximum of the requests' delay; empty without a given speed."""

    remarks: Mapping[str, int] = field(default_factory=dict)
    """Blocks not found or not kept for another reason than eviction, by reason."""

    bucket: "BucketUse | None" = None

    @property
    def from_bucket(self) -> int:
        return 0 if self.bucket is None else self.bucket.blocks

    @property
    def hits(self) -> int:
        return self.from_pool + self.from_memory + self.from_disk + self.from_bucket

    @property
    def hit_rate(self) -> float:
        """In percent."""
        return self.percent(self.hits)

    def percent(self, blocks: int) -> float:
        """`blocks` as a percentage of the requested ones."""
        return 100 * blocks / self.blocks if self.blocks else 0.0


@dataclass(frozen=True)
class BucketUse:
    """What a replay took from a bucket and put there."""

    blocks: int
    """Hits."""

    lost: Mapping[str, int]
    """Blocks that unlimited memory finds, by the reason why they were not found."""

    requests: Mapping[str, int]
    """`put` and `get` of packs, `header`, and `sweep`, by what the store bills."""

    written_bytes: int
    read_bytes: int
    kept_bytes: int
    """At the end."""


def point_of(
    setting: Setting, found: Found, from_disk: int, seconds: float, remarks: Mapping[str, int],
    bucket: BucketUse | None = None,
) -> Point:  # fmt: skip
    """`from_disk` of the server's blocks were not in its memory but on its disk."""
    kept = {name: count for name, count in remarks.items() if count}
    if found.unstored:
        kept["no row in the pool"] = found.unstored
    from_memory = found.from_server - from_disk - (0 if bucket is None else bucket.blocks)
    return Point(
        setting, found.requests, found.blocks, found.from_pool, from_memory, from_disk, seconds,
        lateness(found.late_s), kept, bucket,
    )  # fmt: skip


def lateness(late_s: Sequence[float]) -> dict[str, float]:
    """In ms; empty when no request had a start time."""
    if not late_s:
        return {}
    return {
        "median": percentile(late_s, 50) * 1e3,
        "p99": percentile(late_s, 99) * 1e3,
        "worst": max(late_s) * 1e3,
    }
