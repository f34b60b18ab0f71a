"""Who leaves when room is needed. One policy a class; a policy knows nothing of bytes."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy must know of a block. Compared by identity."""

    pins: int


Block = TypeVar("Block", bound=Evictable)


class EvictionPolicy(Protocol[Block]):
    """Orders the readable blocks of one size class.

    A pinned block may be used or unpinned while it is in the policy; `victim` never names it.
    """

    def add(self, block: Block) -> None:
        """`block` became readable."""

    def use(self, block: Block) -> None:
        """`block` was read or touched."""

    def unpin(self, block: Block) -> None:
        """The last pin of `block` went: it may be a victim again."""

    def remove(self, block: Block) -> None:
        """`block` left, evicted or otherwise."""

    def victim(self) -> Block | None:
        """Who should leave next, left in place; None when every block is pinned."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LRU(Generic[Block]):
    """The block that was used longest ago leaves first. Every operation is O(1), amortised.

    Pinned blocks keep their place until `victim` meets them. It sets them aside rather than
    step over them again each time, or a slow reader holding thousands of old blocks would make
    each eviction cost thousands of steps. One set aside comes back as the most recently used.
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
