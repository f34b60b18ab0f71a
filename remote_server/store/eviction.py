"""Eviction policies: the order in which blocks of one class are evicted."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Evictable(Protocol):
    """The part of a block that a policy reads. Compared by identity."""

    pins: int


Block = TypeVar("Block", bound=Evictable)


class EvictionPolicy(Protocol[Block]):
    """Orders the readable blocks of one size class.

    A pinned block may be used or unpinned while it is in the policy; `victim` never returns it.
    """

    def add(self, block: Block) -> None:
        """`block` became readable."""

    def use(self, block: Block) -> None:
        """`block` was read or touched."""

    def unpin(self, block: Block) -> None:
        """The last pin of `block` was released: it may be a victim again."""

    def remove(self, block: Block) -> None:
        """`block` was evicted or removed."""

    def victim(self) -> Block | None:
        """The next block to evict, still in the policy; None when every block is pinned."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LRU(Generic[Block]):
    """Evicts the least recently used block first. Every operation is O(1), amortised.

    `victim` sets a pinned block aside when it meets one, rather than step over it each time: a slow
    reader with thousands of old pinned blocks would make each eviction cost thousands of steps. A
    block set aside returns as the most recently used.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()  # oldest first
        self._aside: set[Block] = set()

    def add(self, block: Block) -> None:
        self._order[block] = None

    def use(self, block: Block) -> None:
        if block in self._order:
            self._order.move_to_end(block)

    def unpin(self, block: Block) -> None:
        if block in self._aside:
            self._aside.remove(block)
            self._order[block] = None

    def remove(self, block: Block) -> None:
        self._aside.discard(block)
        self._order.pop(block, None)

    def victim(self) -> Block | None:
        while self._order:
            oldest = next(iter(self._order))
            if oldest.pins == 0:
                return oldest
            del self._order[oldest]
            self._aside.add(oldest)
        return None

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    def __contains__(self, block: object) -> bool:
        return block in self._order or block in self._aside


MakePolicy = Callable[[], EvictionPolicy[Any]]

POLICIES: dict[str, MakePolicy] = {"lru": LRU}
"""By name. A tier makes one for each size class."""
