"""What the driver needs of a store."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from benchmarks.storage_workload.entries import Blocks


class Part(NamedTuple):
    """What one tier did of one read or write."""

    tier: str
    """`gpu`, `memory`, `disk` or `server`."""

    blocks: int
    num_bytes: int
    total_s: float
    """From the first of it to the last."""

    device_s: float
    """Of that, while a call into the device was under way for these blocks. The rest is the host's:
    waiting for a turn, copying, hashing."""


class ReadDone(NamedTuple):
    """`blocks` from the first on were there, and their bytes were right. `parts` may have more:
    what was moved, and is of no use behind a block that had just gone."""

    blocks: int
    parts: tuple[Part, ...]
    waited_s: float = 0.0
    """Before anything was done about it."""


class WriteDone(NamedTuple):
    """What became of each block: stored, there before, or not kept."""

    created: int
    existed: int
    declined: int
    parts: tuple[Part, ...]
    waited_s: float = 0.0


class Behind(NamedTuple):
    """One write that reached the disk after its put was answered."""

    ended_s: float
    part: Part


class Occupancy(NamedTuple):
    """One tier, now."""

    budget_bytes: int
    used_bytes: int
    blocks: int


class Backend(Protocol):
    """A store with its tiers. Times are of the event loop's clock.

    Called from one event loop, any number of reads and writes at a time. Who is cancelled learns
    nothing of what becomes of its blocks. Where the store is a server, all but `occupancy` and
    `take_behind` raise `ServerUnavailable` when it has gone.
    """

    @property
    def tiers(self) -> tuple[str, ...]:
        """From the fastest to the slowest."""

    async def read(self, blocks: Blocks) -> ReadDone:
        """Read the first of `blocks` that are there, up to the first that is not. No key comes
        twice."""

    async def write(self, blocks: Blocks) -> WriteDone:
        """Store `blocks`: those that are there already stay as they are."""

    async def occupancy(self) -> Mapping[str, Occupancy]:
        """By tier."""

    async def counters(self) -> Mapping[str, int]:
        """The store's own; they only grow."""

    async def settle(self) -> None:
        """Return when nothing is on its way to a lower tier any more."""

    def take_behind(self) -> list[Behind]:
        """Writes that have ended since the last call."""
