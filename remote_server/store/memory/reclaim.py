"""Slot reclaim: the block or slab to evict when a size class is full."""

from collections.abc import Callable, Iterable
from itertools import islice

from remote_server.store.memory.slabs import Block, SizeClass, Slab, Slabs


class SlotReclaim:
    """Makes free slots from blocks that are not pinned.

    A size class without a free slot gets, in this order: a free slab; another class's coldest slab,
    emptied and cut anew, if it has no slab itself or if that slab has been idle for longer than its
    own oldest block; its own oldest block's slot; and, when its own blocks are all pinned, another
    class's coldest slab after all. So memory follows use: a namespace that arrives second takes
    idle slabs from the first, and neither can starve the other.
    """

    def __init__(self, slabs: Slabs, evict: Callable[[Block], None]) -> None:
        """`evict` removes a readable block that is not pinned from the index and frees its slot."""
        self._slabs = slabs
        self._evict_block = evict
        self.slabs_recut = 0
        """Slabs that were taken from another size class."""

    def has_slot(self, size_class: SizeClass, wanted: int) -> bool:
        """Give `size_class` a free slot; False when every slot is in use, or its policy refuses.

        Evicts `wanted` blocks at once where it can: blocks that were put together are neighbours,
        and make room for a run of new neighbours.
        """
        if size_class.open:
            return True
        if not self._slabs.free:
            victim = size_class.policy.victim()
            if victim is None and size_class.policy.refuses:
                return False
            slab = self._slab_to_take(size_class, victim)
            if slab is not None:
                for block in [*slab.blocks]:  # none is pinned, so all are readable
                    self._evict_block(block)
                self.slabs_recut += 1
            elif victim is not None:
                self._evict_own(size_class, victim, wanted)
            else:
                return False
        if not size_class.open:
            self._slabs.cut(size_class)
        return True

    def room_in_quota(
        self, blocks: Iterable[Block], num_taken: int, quota: int, wanted: int
    ) -> int:
        """How many of `wanted` slots a namespace may have beside `num_taken`, with `quota` in all,
        after the eviction of the first of its `blocks` that are not pinned."""
        wanted = min(wanted, quota)
        too_many = num_taken + wanted - quota
        if too_many <= 0:
            return wanted
        leaving = [*islice((block for block in blocks if not block.pins), too_many)]
        for block in leaving:
            self._evict_block(block)
        return max(0, wanted - too_many + len(leaving))

    def _slab_to_take(self, size_class: SizeClass, victim: Block | None) -> Slab | None:
        """Another class's slab that is better used here.

        The search passes over all slabs. It is repeated at once when the last search found a slab,
        and otherwise after a slab's worth of own evictions.
        """
        if victim is None:
            return self._slabs.coldest_of_others(size_class)
        if size_class.evictions_until_check > 0:
            return None
        slab = self._slabs.coldest_of_others(size_class)
        if slab is not None:
            oldest = size_class.policy.oldest() or victim
            if slab.mean_tick < oldest.tick:
                return slab
        size_class.evictions_until_check = self._slabs.slab_bytes // size_class.slot_bytes
        return None

    def _evict_own(self, size_class: SizeClass, victim: Block | None, wanted: int) -> None:
        """Up to `wanted` of the oldest blocks, or until the next search in other classes."""
        while victim is not None:
            self._evict_block(victim)
            size_class.evictions_until_check -= 1
            wanted -= 1
            if wanted == 0 or size_class.evictions_until_check <= 0:
                return
            victim = size_class.policy.victim()
