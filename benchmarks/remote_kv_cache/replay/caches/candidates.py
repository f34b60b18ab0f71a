"""Eviction policies for comparison on a trace: the store's own, and candidates for it.

Each has the store's interface, `EvictionPolicy` of `remote_server.store.eviction.lru`, so one that
proves better can move there unchanged.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from remote_server.store.eviction.lru import LRU, EvictionPolicy, PlainPolicy


class Named(Protocol):
    """A block with a name that outlives it: a policy may remember evicted blocks."""

    pins: int

    @property
    def key(self) -> Hashable: ...


Block = TypeVar("Block", bound=Named)


class FIFO(LRU[Block], Generic[Block]):
    """Evicts in order of arrival, whatever the use. The base line of the others."""

    def use(self, block: Block) -> None:
        pass


class S3FIFO(PlainPolicy[Block], Generic[Block]):
    """Three queues: new blocks pass a small one, and only those used there reach the main one.

    A tenth of the blocks may be in the small queue. A block evicted from it unused is remembered,
    as many as are in the main queue, and enters the main queue when it comes again. In both queues
    a use is only counted, up to three; in the main queue each count is another round before
    eviction.
    """

    SMALL_SHARE = 0.1
    MOST_COUNTED = 3

    def __init__(self) -> None:
        self._small: OrderedDict[Block, int] = OrderedDict()  # oldest first, to its count of uses
        self._main: OrderedDict[Block, int] = OrderedDict()
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        self._leaving: Block | None = None

    def add(self, block: Block) -> None:
        if block.key in self._gone:
            del self._gone[block.key]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def use(self, block: Block) -> None:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(queue[block] + 1, self.MOST_COUNTED)

    def unpin(self, block: Block) -> None:
        pass

    def remove(self, block: Block) -> None:
        if self._small.pop(block, None) is None:
            self._main.pop(block, None)
        elif block is self._leaving:
            self._gone[block.key] = None
            while len(self._gone) > max(1, len(self._main)):
                self._gone.popitem(last=False)
        self._leaving = None

    def victim(self) -> Block | None:
        turns = 0
        while turns <= (self.MOST_COUNTED + 2) * len(self):
            turns += 1
            from_small = len(self._small) > self.SMALL_SHARE * len(self) or not self._main
            queue = self._small if from_small else self._main
            if not queue:
                return None
            block, count = next(iter(queue.items()))
            if block.pins:
                queue.move_to_end(block)
            elif not count:
                self._leaving = block
                return block
            elif from_small:
                del self._small[block]
                self._main[block] = 0
            else:
                self._main[block] = count - 1
                self._main.move_to_end(block)
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, block: object) -> bool:
        return block in self._small or block in self._main


IN_STORE: dict[str, Callable[[], EvictionPolicy[Any]]] = {"lru": LRU}
"""The policies of a real server."""

POLICIES: dict[str, Callable[[], EvictionPolicy[Any]]] = IN_STORE | {
    "s3-fifo": S3FIFO,
    "fifo": FIFO,
}

LEARNED = "learned"
"""The policy of `learned_model`, whose levels share what they learn."""
