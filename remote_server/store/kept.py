"""Pins of operators: blocks that stay in memory until they are unpinned."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from remote_server.store.slabs import Block, Slab


class KeptNow(NamedTuple):
    """The result of pinning or unpinning blocks for an operator."""

    kept: int  # blocks that are pinned now, or were unpinned
    num_bytes: int  # of their slots
    declined: int  # readable blocks beyond the limits


class Kept:
    """Readable blocks that an operator has pinned, by namespace and key, within limits.

    Blocks with such pins may be in at most half of the slabs, so that the other half still follows
    use. Slabs are counted because one pinned block ties its slab to its block size: a few in each
    slab would starve every other size. The pins of a namespace take at most half of its quota.
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
        """False when that would exceed a limit; then nothing has changed."""
        taken = (len(self._blocks.get(block.namespace, ())) + 1) * block.slab.slot_bytes
        if 0 < self._namespace_bytes < 2 * taken:
            return False
        if block.slab not in self._slabs and len(self._slabs) >= self._max_slabs:
            return False
        self._blocks.setdefault(block.namespace, {})[block.key] = block
        self._slabs[block.slab] += 1
        return True

    def remove(self, block: Block) -> None:
        """`block` must be pinned here."""
        blocks = self._blocks[block.namespace]
        del blocks[block.key]
        if not blocks:
            del self._blocks[block.namespace]
        self._slabs[block.slab] -= 1
        if not self._slabs[block.slab]:
            del self._slabs[block.slab]

    def check(self) -> None:
        """Assert that sums agree and limits hold."""
        assert Counter(block.slab for block in self) == self._slabs
        assert len(self._slabs) <= self._max_slabs
        if self._namespace_bytes:
            for blocks in self._blocks.values():
                taken = sum(block.slab.slot_bytes for block in blocks.values())
                assert 2 * taken <= self._namespace_bytes
