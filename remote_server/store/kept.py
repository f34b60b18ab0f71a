"""Which blocks an operator keeps in memory: eviction leaves them alone until they are let go."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from remote_server.store.slabs import Block, Slab


class KeptNow(NamedTuple):
    """What became of the blocks that somebody wanted kept, or let go."""

    kept: int  # those that are kept now, or were let go
    num_bytes: int  # what their slots take
    declined: int  # readable, and beyond what may be kept


class Kept:
    """Readable blocks by namespace and key, and how much of the arena they hold.

    At most half of the memory, so that the other half still follows use. That is counted in
    slabs: one with a single kept block can never go to another block size, so a few blocks in
    each would starve whoever comes with another. And at most half of a namespace's quota.
    """

    def __init__(self, num_slabs: int, namespace_bytes: int) -> None:
        """`namespace_bytes` is a namespace's quota, 0 for none."""
        self._max_slabs = num_slabs // 2
        self._namespace_bytes = namespace_bytes
        self._blocks: dict[str, dict[bytes, Block]] = {}
        self._slabs: Counter[Slab] = Counter()

    def __len__(self) -> int:
        return self._slabs.total()

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._blocks.values():
            yield from blocks.values()

    def __contains__(self, block: Block) -> bool:
        return self._blocks.get(block.namespace, {}).get(block.key) is block

    def keys(self, namespace: str) -> list[bytes]:
        return [*self._blocks.get(namespace, ())]

    def add(self, block: Block) -> bool:
        """False when that would be too much, and then nothing has changed."""
        taken = (len(self._blocks.get(block.namespace, ())) + 1) * block.slab.slot_bytes
        if 0 < self._namespace_bytes < 2 * taken:
            return False
        if block.slab not in self._slabs and len(self._slabs) >= self._max_slabs:
            return False
        self._blocks.setdefault(block.namespace, {})[block.key] = block
        self._slabs[block.slab] += 1
        return True

    def remove(self, block: Block) -> None:
        """It must be kept."""
        blocks = self._blocks[block.namespace]
        del blocks[block.key]
        if not blocks:
            del self._blocks[block.namespace]
        self._slabs[block.slab] -= 1
        if not self._slabs[block.slab]:
            del self._slabs[block.slab]

    def check(self) -> None:
        """Assert that sums fit what is kept, and that it is no more than may be."""
        assert Counter(block.slab for block in self) == self._slabs
        assert len(self._slabs) <= self._max_slabs
        if self._namespace_bytes:
            for blocks in self._blocks.values():
                taken = sum(block.slab.slot_bytes for block in blocks.values())
                assert 2 * taken <= self._namespace_bytes
