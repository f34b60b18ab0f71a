"""The recovery index: recovered blocks are added to the index, and kept or removed by their
verdict."""

import logging
from collections import Counter
from collections.abc import Callable

from remote_server.sizes import format_bytes
from remote_server.store.disk.finding import FoundSegment
from remote_server.store.disk.index import Index, Leaving
from remote_server.store.disk.recovery import Found
from remote_server.store.disk.segments import (
    FIRST_TICK,
    BlockState,
    DiskBlock,
    Segment,
    Segments,
)
from remote_server.store.disk.transfers import ReadResult

log = logging.getLogger(__name__)


class Adoption:
    """The `Books` of recovery. Runs on the loop."""

    def __init__(
        self,
        index: Index,
        segments: Segments,
        leaving: Leaving,
        counters: Counter[str],
        on_free: Callable[[Segment], None],
    ) -> None:
        """`on_free` is called with each segment that recovery is done with."""
        self._index = index
        self._segments = segments
        self._leaving = leaving
        self._counters = counters
        self._on_free = on_free
        self._tick = 0

    def add_segment(self, found: FoundSegment) -> Segment:
        header = found.header
        slot_class = self._segments.slot_class(header.namespace, header.block_bytes)
        self._segments.saw_generation(header.generation)
        return self._segments.add_found(
            found.number, header.segment_bytes, header.incarnation, slot_class, found.file
        )

    def free(self, segment: Segment, slots: list[int], num_damaged: int) -> None:
        self._counters["headers_damaged"] += num_damaged
        segment.unapplied.difference_update(slots)
        self._segments.add_free(segment, reversed(slots))
        self._settle(segment)

    def adopt(self, segment: Segment, found: Found) -> DiskBlock | None:
        segment.unapplied.discard(found.slot)
        self._tick += 1
        self._segments.saw_generation(found.generation)
        header, namespace = found.header, segment.slot_class.namespace
        block = DiskBlock(
            namespace, header.key, header.length, header.checksum, header.generation, segment,
            found.slot, self._tick, 0, BlockState.UNVERIFIED,
        )  # fmt: skip
        self._segments.place(block)
        if segment.retired:
            self._segments.free_slot(block)
            return None
        self._settle(segment)
        previous = self._index.find(namespace, header.key)
        if previous is not None:
            self._counters["recovered_older"] += 1
            if previous.state is BlockState.READABLE:  # written since the start
                self._leaving.erase(block)
                return None
            self._leaving.keep_older(block, previous)  # blocks arrive in the order written
        self._index.adopt(block)
        return block

    def _settle(self, segment: Segment) -> None:
        if not segment.unapplied:
            self._segments.settle(segment)

    def done(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.num_busy -= 1
            self._on_free(segment)
        # They were added to their policies before the recovered blocks, and are younger.
        readable = [b for by_key in self._index.readable.values() for b in by_key.values()]
        fresh = [block for block in readable if block.tick >= FIRST_TICK]
        for block in sorted(fresh, key=lambda block: block.tick):
            block.segment.slot_class.policy.use(block)
        used = sum(slot_class.used_bytes for slot_class in self._segments.classes.values())
        log.info(
            "disk: %d blocks found, %s; checking their bytes in the background",
            self._index.num_unverified, format_bytes(used),
        )  # fmt: skip

    def pin(self, block: DiskBlock) -> None:
        self._segments.pin(block)

    def judge(self, block: DiskBlock, result: ReadResult) -> DiskBlock | None:
        """Releases the pin. Returns an older copy of a bad block, to be verified in its place."""
        older = None
        if block.state is BlockState.UNVERIFIED:
            if result is ReadResult.OK:
                self._counters["recovered"] += 1
                self._index.verified(block)
                self._leaving.give_up_older(block)
            else:
                self._counters["recovered_damaged"] += 1
                older = self._leaving.replace_by_older(block)
        self._leaving.unpin(block)
        return older
