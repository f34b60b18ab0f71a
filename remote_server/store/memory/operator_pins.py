"""Pins of operators: blocks that stay in memory until they are unpinned."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from remote_server.store.memory.slabs import Block, Slab


class PinCount(NamedTuple):
    """The result of pinning or unpinning blocks for an operator."""

    kept: int  # blocks that are pinned now, or were unpinned
    num_bytes: int  # of their slots
    declined: int  # readable blocks beyond the limits


class OperatorPins:
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
        self.num_declined = 0
        """Pins beyond the limits, since the start."""

    def __len__(self) -> int:
        return self._slabs.total()

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._blocks.values():
            yield from blocks.values()

    def __contains__(self, block: Block) -> bool:
        return self._blocks.get(block.namespace, {}).get(block.key) is block

    def keys(self, namespace: str) -> list[bytes]:
        return [*self._blocks.get(namespace, ())]

    def pin(self, blocks: Iterable[Block]) -> PinCount:
        """Pin those of the readable `blocks` that are not pinned here, within the limits."""
        kept = num_bytes = declined = 0
        for block in blocks:
            if block in self or self._add(block):
                kept += 1
                num_bytes += block.slab.slot_bytes
            else:
                declined += 1
        self.num_declined += declined
        return PinCount(kept, num_bytes, declined)

    def _add(self, block: Block) -> bool:
        """False when that would exceed a limit; then nothing has changed."""
        taken = (len(self._blocks.get(block.namespace, ())) + 1) * block.slab.slot_bytes
        if 0 < self._namespace_bytes < 2 * taken:
            return False
        if block.slab not in self._slabs and len(self._slabs) >= self._max_slabs:
            return False
        self._blocks.setdefault(block.namespace, {})[block.key] = block
        self._slabs[block.slab] += 1
        block.slab.num_pinned += block.pins == 0
        block.pins += 1
        return True

    def unpin(self, blocks: Iterable[Block]) -> tuple[list[Block], PinCount]:
        """Remove those of `blocks` that are pinned here. Returns them: the caller unpins each."""
        pinned = [block for block in blocks if block in self]
        for block in pinned:
            self.remove(block)
        return pinned, PinCount(len(pinned), sum(b.slab.slot_bytes for b in pinned), 0)

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
