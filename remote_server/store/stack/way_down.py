"""The ways from memory down to the tiers below it: their interface, and what all of them use."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from remote_server import protocol
from remote_server.protocol import Stretch
from remote_server.store.chains import Group
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.tier import Offered, Tier
from remote_server.turns import Steps

# Keys whose recency is applied together. One takes 0.25 to 1 µs, so this many stop the loop for a
# millisecond at most.
MAX_RECENT_KEYS = 1024


OnFetched = Callable[[list[Block | None]], None]
Fetch = Callable[[str, Sequence[bytes], OnFetched], object]
"""Reads blocks of the tiers between into memory, pinned."""


class Below(Protocol):
    """A tier below memory, and the choice of what is written there."""

    @property
    def tier(self) -> Tier[Any]: ...

    def way(
        self, memory: MemoryTier, block_bytes_of: Callable[[str], int], fetch: Fetch
    ) -> "WayDown":
        """The way down to it. `block_bytes_of` returns the block size of a namespace, or raises
        `KeyError`."""


class WayDown(ABC):
    """The way from memory down to one tier: what is written there, and when. One thread.

    A way down derives from this, and leaves out what means nothing to it.
    """

    def __init__(self, memory: MemoryTier, tier: Tier[Any], counters: Sequence[str]) -> None:
        self.memory = memory
        self.tier = tier
        self.counters: Counter[str] = Counter(dict.fromkeys(counters, 0))
        self.recency = RecencyBuffer(tier)

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Blocks that wait until the tier has time for them."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a block waits for the tier or is being written."""

    def expect(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]
    ) -> Steps[Sequence[Group]]:
        """A lookup of `keys`, with these chain fields, follows. Returns the packs among them for
        `looked_up`."""
        yield from ()
        return ()

    def looked_up(self, namespace: str, groups: Sequence[Group], states: bytes) -> Steps[None]:
        """The lookup found `states`, one for each of its keys. It is no use of a block."""
        yield from ()

    def missed(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], states: bytes
    ) -> Steps[None]:
        """A lookup of `keys`, with these chain fields, found `states`."""
        yield from ()

    def reserved(self, namespace: str, blocks: Sequence[Block], chain: Sequence[Stretch]) -> None:
        """A put has room for `blocks`, the first of those that `chain` describes."""
        return None

    @abstractmethod
    def published(self, blocks: Sequence[Block]) -> None:
        """`blocks` have just become readable in memory."""

    def asked_again(self, namespace: str, keys: Sequence[bytes]) -> None:
        """`keys` were put again, or got."""
        return None

    @abstractmethod
    def write_some(self) -> None:
        """Hand as many blocks to the tier as it has time for."""

    def write_again(self) -> None:
        """Hand blocks that waited for room to the tier again, when it may have some."""
        return None

    @abstractmethod
    def clear(self, namespace: str | None) -> None:
        """Drop the blocks that wait."""

    def offer(self, blocks: Sequence[Block]) -> Offered[int]:
        """`blocks`, of one namespace, as they are offered to the tier."""
        return Offered(
            blocks[0].namespace,
            [block.key for block in blocks],
            [block.length for block in blocks],
            [checksum_of(self.memory, block) for block in blocks],
            [block.chain for block in blocks],
        )

    def declined(self, count: int, reason: str) -> None:
        """Count blocks that were not written."""
        self.counters[reason] += count
        self.counters["demote_declined"] += count


def checksum_of(memory: MemoryTier, block: Block) -> int:
    """The checksum of a block in `memory`, made now where its put had none."""
    if block.checksum is None:
        view = memory.view(block)
        block.checksum = protocol.checksum(block.namespace, block.key, view)
    return block.checksum


class RecencyBuffer:
    """Keys that were served since the tier's recency was last updated.

    A get uses a block in every tier, whichever serves it: a block that memory serves often must
    still be in the tier when memory evicts it. Gets append keys here, and the buffer is applied
    before the tier evicts or reads. A block that many gets share is one use of its copy there.
    """

    def __init__(self, tier: Tier[Any]) -> None:
        self._tier = tier
        self._keys: dict[str, list[bytes]] = {}  # in the order served
        self._num_keys = 0

    def add(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Append keys that were served, the last one as the most recently used. The tier need not
        have them."""
        self._keys.setdefault(namespace, []).extend(keys)
        self._num_keys += len(keys)
        if self._num_keys >= MAX_RECENT_KEYS:
            self.flush()

    def flush(self) -> None:
        """Apply the buffer. To be called before any call of the tier that depends on recency."""
        if not self._num_keys:
            return
        served, self._keys, self._num_keys = self._keys, {}, 0
        for namespace, keys in served.items():
            last_first = dict.fromkeys(reversed(keys))  # of a key's uses only the last one counts
            self._tier.touch_all(namespace, [*reversed(last_first)])
