"""Recovery: blocks found by their headers are adopted, then verified by their bytes.

New blocks are stored meanwhile.
"""

import heapq
import logging
from collections.abc import Callable, Iterator, Sized
from itertools import islice

from remote_server.store.disk.context import DiskContext
from remote_server.store.disk.finding import Found, FoundSegment, Scanned, scan
from remote_server.store.disk.removal import Removal
from remote_server.store.disk.segments import FIRST_TICK, BlockState, DiskBlock, Segment
from remote_server.store.disk.transfers import PIECE_BYTES, ReadResult, runs_of, verify_piece
from remote_server.store.io_threads import Job, Pool, Priority
from remote_server.store.pages import Scratch
from remote_server.values import format_bytes

log = logging.getLogger(__name__)

# Blocks that are adopted before requests get their turn again: about 5 ms.
BLOCKS_PER_TURN = 1000

# Verifying jobs under way: enough to keep the device busy, and for blocks that no client has
# requested, few enough for reads to go first. Their blocks are pinned, so the tier makes the jobs
# of a small directory small as well: they never hold more than a third of it.
_WANTED_JOBS, _CHORE_JOBS = 8, 2


class DiskRecoveryIndex:
    """The index and the slots of the tier, as recovery fills them. Runs on the loop."""

    def __init__(
        self, context: DiskContext, removal: Removal, on_free: Callable[[Segment], None]
    ) -> None:
        """`on_free` is called with each segment that recovery is done with."""
        self._index, self._segments = context.index, context.segments
        self._counters = context.counters
        self._removal = removal
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
        """These slots of a found segment hold no block; `num_damaged` headers are damaged."""
        self._counters["headers_damaged"] += num_damaged
        segment.unapplied.difference_update(slots)
        self._segments.add_free(segment, reversed(slots))
        self._settle(segment)

    def adopt(self, segment: Segment, found: Found) -> DiskBlock | None:
        """Add a block, unverified and unpinned; None when a newer one has its key."""
        segment.unapplied.discard(found.slot)
        self._tick += 1
        self._segments.saw_generation(found.generation)
        header, namespace = found.header, segment.slot_class.namespace
        block = DiskBlock(
            namespace, header.key, header.length, header.checksum, header.generation, segment,
            found.slot, self._tick, 0, BlockState.UNVERIFIED,
        )  # fmt: skip
        segment.chains.set((found.slot,), segment.num_slots, (header.chain,))
        if header.parent:
            segment.chains.set_parent(found.slot, segment.num_slots, header.parent)
        self._segments.place(block)
        if segment.retired:
            self._segments.free_slot(block)
            return None
        self._settle(segment)
        previous = self._index.find(namespace, header.key)
        if previous is not None:
            self._counters["recovered_older"] += 1
            if previous.state is BlockState.READABLE:  # written since the start
                self._removal.erase(block)
                return None
            self._removal.hold_older(block, previous)  # blocks arrive in the order written
        self._index.adopt(block)
        return block

    def _settle(self, segment: Segment) -> None:
        if not segment.unapplied:
            self._segments.settle(segment)

    def done(self, segments: list[Segment]) -> None:
        """All blocks of these segments are adopted: from now on they are like any other."""
        for segment in segments:
            segment.num_busy -= 1
            self._on_free(segment)
        # They were added to their policies before the recovered blocks, and are younger.
        readable = [b for by_key in self._index.readable.values() for b in by_key.values()]
        fresh = [block for block in readable if block.tick >= FIRST_TICK]
        for block in sorted(fresh, key=lambda block: block.tick):
            block.segment.slot_class.policy.use_all((block,))
        used = sum(slot_class.used_bytes for slot_class in self._segments.classes.values())
        log.info(
            "disk: %d blocks found, %s; checking their bytes in the background",
            self._index.num_unverified, format_bytes(used),
        )  # fmt: skip

    def pin(self, block: DiskBlock) -> None:
        self._segments.pin(block)

    def judge(self, block: DiskBlock, result: ReadResult) -> DiskBlock | None:
        """Apply the verdict on a pinned block, and release the pin. Returns an older copy of a bad
        block, to be verified in its place."""
        older = None
        if block.state is BlockState.UNVERIFIED:
            if result is ReadResult.OK:
                self._counters["recovered"] += 1
                self._index.verified(block)
                self._removal.release_older(block)
            else:
                self._counters["recovered_damaged"] += 1
                older = self._removal.replace_by_older(block)
        self._removal.unpin(block)
        return older


class Recovery:
    """Runs on the loop: `start`, then `go_on` whenever jobs are finished, until `done`."""

    def __init__(
        self,
        segments: list[Segment],
        pool: Pool,
        index: DiskRecoveryIndex,
        verify_bytes: int = PIECE_BYTES,
    ) -> None:
        self.scanning = len(segments)
        """Segments whose headers are not read yet, or whose blocks are not adopted yet."""
        self._segments = segments
        self._pool = pool
        self._index = index
        self._verify_bytes = verify_bytes
        self._found: list[list[tuple[int, int, Found]]] = []  # one sorted list a segment
        self._by_number = {segment.number: segment for segment in segments}
        self._merged: Iterator[tuple[int, int, Found]] | None = None
        self._unverified: list[DiskBlock] = []  # the newest is last
        self._wanted: dict[DiskBlock, None] = {}
        self._jobs = dict.fromkeys(Priority, 0)
        self._stopped = False

    @property
    def done(self) -> bool:
        """Whether every block found is readable by now, or gone."""
        return not (self.scanning or self._unverified or self._wanted or any(self._jobs.values()))

    def start(self) -> None:
        for segment in self._segments:
            self._scan(segment)

    def verify_soon(self, block: DiskBlock) -> None:
        """Verify `block` before the others: a client has requested it."""
        self._wanted[block] = None

    def go_on(self) -> None:
        """One turn's worth of work."""
        if self._merged is not None:
            self._adopt_some()
        if not self.scanning:  # earlier, a newer copy might still be found
            self._verify(Priority.READ, _WANTED_JOBS)
            self._verify(Priority.CHORE, _CHORE_JOBS)

    def stop(self) -> None:
        self._stopped = True

    # ── headers ──────────────────────────────────────────────────────────────────────────

    def _scan(self, segment: Segment) -> None:
        slot_class, file = segment.slot_class, segment.file
        assert file is not None

        def work(scratch: Scratch) -> Scanned:
            return scan(
                file, segment.num_slots, slot_class.block_bytes, slot_class.slot_bytes,
                segment.incarnation, scratch, lambda: self._stopped,
            )  # fmt: skip

        def finish(scanned: Scanned | None) -> None:
            found, num_damaged = scanned or Scanned([], 0)
            self._found.append([(f.generation, segment.number, f) for f in found])
            used = {f.slot for f in found}
            free = [slot for slot in range(segment.num_slots) if slot not in used]
            self._index.free(segment, free, num_damaged)
            if len(self._found) == len(self._segments):
                self._merged = heapq.merge(*self._found)

        self._pool.submit(Job(Priority.READ, work, finish))

    def _adopt_some(self) -> None:
        assert self._merged is not None
        turn = [*islice(self._merged, BLOCKS_PER_TURN)]
        for _, number, found in turn:
            block = self._index.adopt(self._by_number[number], found)
            if block is not None:
                self._unverified.append(block)
        if len(turn) == BLOCKS_PER_TURN:
            self._pool.wake()
            return
        self._merged = None
        self._found.clear()
        self.scanning = 0
        self._index.done(self._segments)

    # ── bytes ────────────────────────────────────────────────────────────────────────────

    def _verify(self, priority: Priority, at_most: int) -> None:
        while self._jobs[priority] < at_most:
            if priority is Priority.READ:
                blocks = self._next(self._take_wanted, self._wanted)
            else:
                blocks = self._next(self._unverified.pop, self._unverified)
            if not blocks:
                return
            for block in blocks:
                self._index.pin(block)
            for run in runs_of(blocks):
                self._submit(priority, run)

    def _submit(self, priority: Priority, blocks: list[DiskBlock]) -> None:
        file = blocks[0].segment.file
        assert file is not None

        def finish(results: list[ReadResult] | None) -> None:
            self._jobs[priority] -= 1
            for block, result in zip(
                blocks, results or [ReadResult.IO_ERROR] * len(blocks), strict=True
            ):
                older = self._index.judge(block, result)
                if older is not None:
                    self.verify_soon(older)

        self._jobs[priority] += 1
        self._pool.submit(
            Job(priority, lambda scratch: verify_piece(file, blocks, scratch), finish)
        )

    def _next(self, take: Callable[[], DiskBlock], left: Sized) -> list[DiskBlock]:
        blocks: list[DiskBlock] = []
        room = self._verify_bytes
        while left and room > 0:
            block = take()
            if _is_waiting(block):
                blocks.append(block)
                room -= block.length
        return blocks

    def _take_wanted(self) -> DiskBlock:
        block = next(iter(self._wanted))
        del self._wanted[block]
        return block


def _is_waiting(block: DiskBlock) -> bool:
    """It is not verified, evicted, replaced or cleared, and no job is verifying it."""
    return block.state is BlockState.UNVERIFIED and block.pins == 0
