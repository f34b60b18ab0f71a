"""The order of eviction: the interface of a policy, and LRU."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar


class Evictable(Protocol):
    """The part of a block that a policy reads. Compared by identity."""

    pins: int


Block = TypeVar("Block", bound=Evictable)


class EvictionPolicy(Protocol[Block]):
    """Orders the readable blocks of one size class.

    A pinned block may be used or unpinned while it is in the policy; `victim` never returns it.
    """

    refuses: bool
    """Whether the last `victim` was None because the blocks of `arrive` rank below all others."""

    def arrive(self, namespace: str, key: bytes, *, may_refuse: bool) -> None:
        """A put, or a part of one, wants room for `key` and keys behind it, until `arrived`."""

    def arrived(self) -> None:
        """The put has its room."""

    def reserve(self, blocks: Sequence[Block]) -> None:
        """`blocks` are being written, in the order of their put. They are pinned."""

    def abandon(self, block: Block) -> None:
        """`block` was reserved perhaps, and did not become readable."""

    def add(self, block: Block) -> None:
        """`block` became readable."""

    def use_all(self, blocks: Sequence[Block]) -> None:
        """`blocks` were read or touched, the last of a prompt first."""

    def unpin(self, block: Block) -> None:
        """The last pin of `block` was released: it may be a victim again."""

    def remove(self, block: Block) -> None:
        """`block` was evicted or removed."""

    def victim(self) -> Block | None:
        """The next block to evict, still in the policy; None when every block is pinned, or it
        `refuses`."""

    def oldest(self) -> Block | None:
        """The least recently used block that is not pinned."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class PlainPolicy(Generic[Block]):
    """The parts of a policy that knows nothing of prompts, and refuses nothing."""

    refuses = False

    def arrive(self, namespace: str, key: bytes, *, may_refuse: bool) -> None:
        pass

    def arrived(self) -> None:
        pass

    def reserve(self, blocks: Sequence[Block]) -> None:
        pass

    def abandon(self, block: Block) -> None:
        pass

    def use(self, block: Block) -> None:
        """`block` was read or touched."""
        raise NotImplementedError

    def use_all(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.use(block)

    def victim(self) -> Block | None:
        raise NotImplementedError

    def oldest(self) -> Block | None:
        return self.victim()


class LRU(PlainPolicy[Block]):
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
"""A tier makes one policy for each size class."""
