"""Fetches of blocks into memory that wait for tiers below, and the sources of hits."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from remote_server.store.slabs import Block

OnFetched = Callable[[list[Block | None]], None]

MAX_BROUGHT = 1 << 16
"""Blocks whose source is remembered until their first hit."""


class Purpose(Enum):
    """What a fetch is for: when its blocks count as hits."""

    GET = auto()  # now
    AHEAD = auto()  # with the get that follows, as blocks of the tier that had them
    OTHER = auto()  # with a get that may follow, as blocks of memory


@dataclass(eq=False)
class Fetch:
    """One call of `TierStack.fetch`: the blocks, and how many are still being read."""

    on_fetched: OnFetched
    blocks: list[Block | None]
    purpose: Purpose
    deadline: float
    num_waiting: int = 1  # until all reads have begun

    def one_is_here(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.on_fetched(self.blocks)


@dataclass(eq=False)
class Reading:
    """A block that is being read into memory from `tier`, and the fetches that wait for it, each
    with the block's place in it."""

    tier: str
    waiters: list[tuple[Fetch, int]] = field(default_factory=list)

    @property
    def hit_comes_later(self) -> bool:
        """Whether a get that follows is to count it as a hit of this tier."""
        purposes = {fetch.purpose for fetch, _ in self.waiters}
        return Purpose.GET not in purposes and (not purposes or Purpose.AHEAD in purposes)


class Hits:
    """Blocks that gets returned, by the tier that they came from. A block that came into memory
    before its get, together with others, counts once as one of its tier, and then of memory."""

    def __init__(self, memory: str) -> None:
        """`memory` is the name of that tier."""
        self.by_tier: Counter[str] = Counter()
        self._memory = memory
        self._brought: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def came(self, tier: str) -> None:
        """A block was read from `tier` for a get."""
        self.by_tier[tier] += 1

    def brought(self, namespace: str, key: bytes, tier: str) -> None:
        """A block is in memory, from `tier`, before its get."""
        self._brought[namespace, key] = tier
        if len(self._brought) > MAX_BROUGHT:
            self._brought.popitem(last=False)

    def in_memory(self, blocks: Iterable[Block | None]) -> None:
        """A get has found `blocks` in memory, but for those that are None."""
        here = [block for block in blocks if block is not None]
        if not self._brought:
            self.by_tier[self._memory] += len(here)
            return
        for block in here:
            tier = self._brought.pop((block.namespace, block.key), self._memory)
            self.by_tier[tier] += 1
