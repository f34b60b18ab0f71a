"""Tables of the memory tier's blocks by key: pending writes, and pins of operators."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from remote_server.store.slabs import Block, Slab

_NONE: Mapping[bytes, list[Block]] = {}


class PendingWrites:
    """Pending writes. A key can have several: a forced put does not wait for the one before."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[bytes, list[Block]]] = {}

    def __iter__(self) -> Iterator[Block]:
        for by_key in self._blocks.values():
            for same_key in by_key.values():
                yield from same_key

    def of(self, namespace: str) -> Mapping[bytes, list[Block]]:
        """By key. The caller must not keep it."""
        return self._blocks.get(namespace, _NONE)

    def add(self, namespace: str, blocks: Sequence[Block]) -> None:
        if blocks:
            by_key = self._blocks.setdefault(namespace, {})
            for block in blocks:
                by_key.setdefault(block.key, []).append(block)

    def remove(self, block: Block) -> None:
        """`block` was published, or failed."""
        by_key = self._blocks[block.namespace]
        same_key = by_key[block.key]
        if len(same_key) > 1:
            same_key.remove(block)
            return
        del by_key[block.key]
        if not by_key:
            del self._blocks[block.namespace]

    def publish(self, block: Block) -> Sequence[Block]:
        """Remove `block`, which is published. Returns the older pending blocks of its key, which
        are removed as well: `block` has replaced them already."""
        same_key = self._blocks[block.namespace][block.key]
        older: Sequence[Block] = ()
        if len(same_key) > 1:
            older = same_key[: same_key.index(block)]
            for one in older:
                self.remove(one)
        self.remove(block)
        return older

    def take(self, namespace: str | None) -> list[Block]:
        """Remove all of one namespace, or of all."""
        names = [*self._blocks] if namespace is None else [namespace]
        taken = [self._blocks.pop(name, {}) for name in names]
        return [block for by_key in taken for same_key in by_key.values() for block in same_key]


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
