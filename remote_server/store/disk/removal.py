"""The removal of blocks: an evicted block frees its slot at once, any other after it is erased."""

from collections.abc import Callable

from remote_server.store.disk.context import DiskContext
from remote_server.store.disk.segments import BlockState, DiskBlock, Segment
from remote_server.store.disk.transfers import erase
from remote_server.store.io_threads import Job, Priority


class Removal:
    """Eviction, removal, and the pins that delay both.

    An evicted block was correct, and the next server may find it again until its slot is
    overwritten. A block that is removed, replaced or damaged must not be found again: it keeps its
    slot until its header is overwritten, which waits for its readers.
    """

    def __init__(self, context: DiskContext, on_free: Callable[[Segment], None]) -> None:
        """`on_free` is called with each segment in which a gone block has freed its slot."""
        self._index, self._segments = context.index, context.segments
        self._pool, self._counters = context.pool, context.counters
        self._on_free = on_free
        self._older: dict[DiskBlock, DiskBlock] = {}

    @property
    def under_way(self) -> bool:
        """Whether a restart would find a block that was removed, replaced or damaged."""
        # All of `_older` are gone, too: a restart finds the newer copy, which counts.
        return len(self._index.gone) > len(self._older)

    def evict(self, block: DiskBlock) -> None:
        """Its slot may be written to at once. It must not be pinned."""
        self._segments.use_times.evicted(block.tick)
        self._take_out(block)
        self._segments.free_slot(block)
        self._counters["evicted"] += 1

    def discard(self, block: DiskBlock) -> None:
        """Out of the index now, and erased when its last pin is released."""
        self._take_out(block)
        self._index.set_gone(block)
        if block.pins == 0:
            self._erase(block)

    def erase(self, block: DiskBlock) -> None:
        """Erase a block that is in no place of the index and not pinned."""
        self._index.set_gone(block)
        self._erase(block)

    def retire(self, segment: Segment) -> None:
        """Remove all its blocks, and take it out of its class. Blocks in use keep their slots; the
        file is removed with the last of them."""
        for block in [*segment.blocks]:
            if block.state is BlockState.WRITING:
                self._index.end_writing(block)
                self._index.set_gone(block)
            elif block.state is not BlockState.GONE:
                self._take_out(block)
                if block.pins:
                    self._index.set_gone(block)
                else:
                    self._segments.free_slot(block)
        self._segments.retire(segment)

    def unpin(self, block: DiskBlock) -> None:
        """Release one pin of a block that was published or adopted."""
        if not self._segments.unpin(block):
            return
        if block.state is BlockState.GONE:
            self._erase(block)
        else:
            block.segment.slot_class.policy.unpin(block)

    def release(self, block: DiskBlock) -> None:
        """Free the slot of a gone block without users."""
        self._index.gone.discard(block)
        self._segments.free_slot(block)
        self._on_free(block.segment)

    # ── copies of one key, until the newer one is verified ───────────────────────────────

    def hold_older(self, newer: DiskBlock, older: DiskBlock) -> None:
        """Hold the slot of `older` until `newer` is verified: a kill during the replacement may
        have left the header of `newer` with damaged bytes."""
        self._index.take_out(older)
        self._segments.pin(older)
        self._index.set_gone(older)
        self._older[newer] = older

    def release_older(self, newer: DiskBlock) -> None:
        """`newer` is good, or gone as well: release its older copies."""
        while (older := self._older.pop(newer, None)) is not None:
            self.unpin(older)
            newer = older

    def replace_by_older(self, newer: DiskBlock) -> DiskBlock | None:
        """Remove `newer`, which is bad. Returns the copy before it, unverified again, or None."""
        older = self._older.pop(newer, None)
        self.discard(newer)
        if older is not None:
            self._index.gone.remove(older)
            self._index.adopt(older)
            self.unpin(older)
        return older

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _take_out(self, block: DiskBlock) -> None:
        self._index.take_out(block)
        self.release_older(block)

    def _erase(self, block: DiskBlock) -> None:
        file = block.segment.file
        if block.segment.retired or file is None:
            self.release(block)
            return
        self._segments.pin(block)

        def finish(erased: bool | None) -> None:
            self._counters["erase_failed"] += not erased
            self._segments.unpin(block)
            self.release(block)

        self._pool.submit(Job(Priority.WRITE, lambda scratch: erase(file, block, scratch), finish))
