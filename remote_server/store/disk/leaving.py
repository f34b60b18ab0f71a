"""How a block leaves, and when its slot is free: evicted at once, anything else after erasing."""

from collections import Counter
from collections.abc import Callable

from remote_server.store.disk.index import Index
from remote_server.store.disk.pool import Job, Pool, Priority
from remote_server.store.disk.segments import BlockState, DiskBlock, Segment, Segments
from remote_server.store.disk.transfers import erase


class Leaving:
    """Evicting, letting go, and the pins that delay both.

    What is evicted was right and may be found again by the next server until its slot has been
    overwritten. What is let go, because it was removed, replaced or damaged, may not: it keeps
    its slot until its header was overwritten, and that waits for its readers.
    """

    def __init__(
        self,
        index: Index,
        segments: Segments,
        pool: Pool,
        counters: Counter[str],
        on_free: Callable[[Segment], None],
    ) -> None:
        """`on_free` is told of each segment in which a block that was gone freed its slot."""
        self._index = index
        self._segments = segments
        self._pool = pool
        self._counters = counters
        self._on_free = on_free
        self._older: dict[DiskBlock, DiskBlock] = {}

    def evict(self, block: DiskBlock) -> None:
        """Its slot may be written to at once. It must not be pinned."""
        self._take_out(block)
        self._segments.free_slot(block)
        self._counters["evicted"] += 1

    def let_go(self, block: DiskBlock) -> None:
        """Out of the index now, and erased when its last pin goes."""
        self._take_out(block)
        self._index.set_gone(block)
        if block.pins == 0:
            self._erase(block)

    def erase(self, block: DiskBlock) -> None:
        """A block that is in no place of the index, and pinned by nobody, must not get there."""
        self._index.set_gone(block)
        self._erase(block)

    def retire(self, segment: Segment) -> None:
        """All its blocks leave, and it is out of its class. Those in use keep their slots; its
        file goes with the last of them."""
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
        """Give back one pin of a block that was published or adopted."""
        if not self._segments.unpin(block):
            return
        if block.state is BlockState.GONE:
            self._erase(block)
        else:
            block.segment.slot_class.policy.unpin(block)

    def release(self, block: DiskBlock) -> None:
        """A block that was gone is used by nobody any more: its slot is free."""
        self._index.gone.discard(block)
        self._segments.free_slot(block)
        self._on_free(block.segment)

    # ── copies of one key, while it is not known which is good ───────────────────────────

    def keep_older(self, newer: DiskBlock, older: DiskBlock) -> None:
        """A kill while `newer` was replacing `older` may have left the header of the one and all
        of the other: which, its bytes will tell. Until then `older` keeps its slot."""
        self._index.take_out(older)
        self._segments.pin(older)
        self._index.set_gone(older)
        self._older[newer] = older

    def give_up_older(self, newer: DiskBlock) -> None:
        """`newer` is good, or gone as well."""
        while (older := self._older.pop(newer, None)) is not None:
            self.unpin(older)
            newer = older

    def replace_by_older(self, newer: DiskBlock) -> DiskBlock | None:
        """`newer` is bad: let it go. The copy before it, unverified again, or None."""
        older = self._older.pop(newer, None)
        self.let_go(newer)
        if older is not None:
            self._index.gone.remove(older)
            self._index.adopt(older)
            self.unpin(older)
        return older

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _take_out(self, block: DiskBlock) -> None:
        self._index.take_out(block)
        self.give_up_older(block)

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
