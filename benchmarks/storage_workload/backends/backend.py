"""The driver's interface to a store."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from benchmarks.storage_workload.traffic.entries import Blocks


class Part(NamedTuple):
    """One tier's part of one read or write."""

    tier: str
    """`gpu`, `memory`, `disk` or `server`."""

    blocks: int
    num_bytes: int
    total_s: float
    """Seconds from the beginning of its first block to the end of its last."""

    device_s: float
    """The part of it during which a device call was in flight for these blocks. The rest is the
    host's: waiting for a turn, copying, hashing."""


class ReadDone(NamedTuple):
    """The first `blocks` blocks were present, with the right bytes. `parts` may cover more: blocks
    moved behind one that had just been evicted, and of no use."""

    blocks: int
    parts: tuple[Part, ...]
    waited_s: float = 0.0
    """Seconds before the store began with it."""


class WriteDone(NamedTuple):
    """The result of each block: stored, present before, or not kept."""

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
    """The contents of one tier now."""

    budget_bytes: int
    used_bytes: int
    blocks: int


class Backend(Protocol):
    """A store with its tiers. Times are of the event loop's clock.

    Called from one event loop, any number of reads and writes at a time. A cancelled caller does
    not learn the result of its blocks. Where the store is a server, all methods but `occupancy`
    and `take_behind` raise `ServerUnavailable` when it has gone.
    """

    @property
    def tiers(self) -> tuple[str, ...]:
        """From the fastest to the slowest."""

    async def read(self, blocks: Blocks) -> ReadDone:
        """Read the first present blocks of `blocks`, up to the first absent one. Keys are
        unique."""

    async def write(self, blocks: Blocks) -> WriteDone:
        """Store `blocks`; those already present are unchanged."""

    async def occupancy(self) -> Mapping[str, Occupancy]:
        """By tier."""

    async def counters(self) -> Mapping[str, int]:
        """The store's own counters; they only grow."""

    async def settle(self) -> None:
        """Return when no block is in transfer to a lower tier."""

    def take_behind(self) -> list[Behind]:
        """Writes behind that have ended since the last call."""
