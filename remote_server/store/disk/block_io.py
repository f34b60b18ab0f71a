"""Writes and reads of blocks, from slots and pins to the jobs of I/O threads."""

from collections.abc import Callable, Sequence
from functools import partial

from remote_server.protocol import select
from remote_server.store.disk.allocator import SegmentAllocator
from remote_server.store.disk.context import DiskContext
from remote_server.store.disk.recovery import Recovery
from remote_server.store.disk.removal import Removal
from remote_server.store.disk.segments import (
    BlockState,
    DiskBlock,
    SlotClass,
    largest_block,
)
from remote_server.store.disk.transfers import (
    Piece,
    ReadResult,
    pieces_of,
    read_piece,
    runs_of,
    verify_piece,
    write_piece,
)
from remote_server.store.io_threads import Batch, Job, Priority
from remote_server.store.pages import Scratch
from remote_server.store.tier import Offered, OnRead, OnWritten, Written


class Writing:
    """`begin_puts`, `write` and `fail_put` of `DiskTier`."""

    def __init__(
        self,
        context: DiskContext,
        removal: Removal,
        allocator: SegmentAllocator,
        recovery: Recovery,
        max_bytes: int,
    ) -> None:
        self.num_bytes = 0
        """The length of all blocks reserved and not ended."""
        self._index, self._segments = context.index, context.segments
        self._counters = context.counters
        self._removal = removal
        self._allocator = allocator
        self._recovery = recovery
        self._max_bytes = max_bytes

    def begin(self, offered: Offered[int], block_bytes: int) -> list[DiskBlock]:
        namespace, keys, lengths, checksums, chain = offered
        blocks: list[DiskBlock] = []
        if block_bytes > largest_block(self._segments.segment_bytes):
            self._counters["declined_no_slot"] += len(keys)
            return blocks
        allowed = self._room_for(lengths)
        slot_class = self._segments.slot_class(namespace, block_bytes)
        self._allocator.wants(slot_class, keys[:allowed])
        policy = slot_class.policy
        if allowed:
            policy.arrive(namespace, keys[0], may_refuse=True)
        tick = self._segments.next_tick()
        wanted = zip(keys[:allowed], lengths, checksums, strict=False)
        while (missing := allowed - len(blocks)) and self._has_room(slot_class, missing):
            segment, slots = self._segments.take_slots(slot_class, missing)
            here = select(chain, range(len(blocks), len(blocks) + len(slots)))
            segment.chains.set(slots, segment.num_slots, here)
            for slot, (key, length, checksum) in zip(slots, wanted, strict=False):
                generation = self._segments.next_generation()
                block = DiskBlock(namespace, key, length, checksum, generation, segment, slot, tick)
                self._segments.place(block)
                self._index.begin(block)
                self.num_bytes += length
                blocks.append(block)
        why = "unlikely" if policy.refuses else self._why_no_room(slot_class)
        policy.arrived()
        policy.reserve(())  # what was refused is known only now
        self._counters["declined_busy"] += len(keys) - allowed
        if len(blocks) < allowed:
            self._counters[f"declined_{why}"] += allowed - len(blocks)
        if not slot_class.segments:
            del self._segments.classes[namespace, block_bytes]
        return blocks

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        results: dict[DiskBlock, Written] = {}

        def finish(piece: Piece, written: list[Written] | None) -> None:
            failed = [Written.IO_ERROR] * len(piece.blocks)
            results.update(zip(piece.blocks, written or failed, strict=True))
            if len(results) == len(blocks):
                for block in blocks:
                    results[block] = self.end(block, results[block])
                on_written([results[block] for block in blocks])

        pieces = [*pieces_of(blocks, views)]
        batch = Batch(len(pieces))
        for piece in pieces:
            self._submit(piece, finish, batch)

    def end(self, block: DiskBlock, written: Written | None) -> Written:
        """`written` is None for a block that was never handed to `write`."""
        self.num_bytes -= block.length
        self._segments.unpin(block)
        if block.state is BlockState.GONE:
            self._removal.release(block)
            written = Written.CLEARED if written is Written.OK else written
        else:
            self._index.end_writing(block)
            if written is Written.OK:
                self._publish(block)
            else:
                self._segments.free_slot(block)
        if written is Written.OK:
            self._counters["written"] += 1
            self._counters["written_bytes"] += block.length
        elif written is not None:
            self._counters[f"write_{written}"] += 1
        return written or Written.IO_ERROR

    def room_for(self, lengths: Sequence[int]) -> int:
        """One block is always allowed when no other waits: otherwise a large one would never be.
        None while recovery reads slot headers: a full directory has no room until its end."""
        if self._recovery.scanning:
            return 0
        return self._room_for(lengths)

    def _room_for(self, lengths: Sequence[int]) -> int:
        room = self._max_bytes - self.num_bytes
        for place, length in enumerate(lengths):
            room -= length
            if room < 0 and (place or self.num_bytes):
                return place
        return len(lengths)

    def _has_room(self, slot_class: SlotClass, wanted: int) -> bool:
        return bool(slot_class.open) or self._allocator.make_room(slot_class, wanted)

    def _why_no_room(self, slot_class: SlotClass) -> str:
        if self._recovery.scanning:
            return "recovering"
        waits = not slot_class.segments and self._allocator.lacks_demand(slot_class)
        return "small_demand" if waits else "no_slot"

    def _submit(
        self, piece: Piece, finish: Callable[[Piece, list[Written] | None], None], batch: Batch
    ) -> None:
        segment = piece.blocks[0].segment

        def work(scratch: Scratch) -> list[Written]:
            if segment.file is None:
                return [segment.failure or Written.IO_ERROR] * len(piece.blocks)
            return write_piece(segment.file, piece, scratch)

        job = Job(Priority.WRITE, work, partial(finish, piece), batch)
        self._allocator.when_made(segment, job)

    def _publish(self, block: DiskBlock) -> None:
        previous = self._index.find(block.namespace, block.key)
        if previous is not None:
            self._removal.discard(previous)
        self._index.publish(block)
        self._segments.set_tick(block, self._segments.next_tick())


class Reading:
    """`pin_all`, `touch_all`, `read` and `verify` of `DiskTier`."""

    def __init__(self, context: DiskContext, removal: Removal) -> None:
        self._index, self._segments = context.index, context.segments
        self._pool, self._counters = context.pool, context.counters
        self._removal = removal

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        index = self._index.readable.get(namespace, {})
        tick = self._segments.next_tick()
        blocks = [*map(index.get, keys)]
        found = [block for block in blocks if block is not None]
        self._segments.use_all(found, tick)
        for block in found:
            self._segments.pin(block)
        return blocks

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        index = self._index.readable.get(namespace, {})
        blocks = [block for block in map(index.get, keys) if block is not None]
        self._segments.use_all(blocks, self._segments.next_tick())
        return len(blocks)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead
    ) -> None:
        results: dict[int, bool] = {}
        places = {id(view): place for place, view in enumerate(views)}
        assert len(places) == len(blocks), "a view for each block, and no view twice"

        def finish(piece: Piece, found: list[ReadResult] | None) -> None:
            verdicts = found or [ReadResult.IO_ERROR] * len(piece.blocks)
            for block, view, verdict in zip(piece.blocks, piece.views, verdicts, strict=True):
                results[places[id(view)]] = verdict is ReadResult.OK
                self._end(block, verdict)
            if len(results) == len(blocks):
                on_read([results[place] for place in range(len(blocks))])

        pieces = [*pieces_of(blocks, views)]
        batch = Batch(len(pieces))
        for piece in pieces:
            file = piece.blocks[0].segment.file
            assert file is not None
            work = partial(read_piece, file, piece)
            self._pool.submit(Job(Priority.READ, work, partial(finish, piece), batch))

    def verify(self, blocks: Sequence[DiskBlock], on_read: OnRead) -> None:
        good: dict[DiskBlock, bool] = {}

        def finish(run: list[DiskBlock], found: list[ReadResult] | None) -> None:
            verdicts = found or [ReadResult.IO_ERROR] * len(run)
            for block, verdict in zip(run, verdicts, strict=True):
                good[block] = verdict is ReadResult.OK
                self._judge(block, verdict)
            if len(good) == len(blocks):
                on_read([good[block] for block in blocks])

        runs = [*runs_of(blocks)]
        batch = Batch(len(runs))
        for run in runs:
            file = run[0].segment.file
            assert file is not None
            work = partial(verify_piece, file, run)
            self._pool.submit(Job(Priority.READ, work, partial(finish, run), batch))

    def _end(self, block: DiskBlock, verdict: ReadResult) -> None:
        if verdict is ReadResult.OK:
            self._counters["read"] += 1
            self._counters["read_bytes"] += block.length
        self._judge(block, verdict)

    def _judge(self, block: DiskBlock, verdict: ReadResult) -> None:
        """Releases the pin."""
        if verdict is not ReadResult.OK:
            self._counters[f"read_{verdict}"] += 1
            if block.state is BlockState.READABLE:
                self._removal.discard(block)
        self._removal.unpin(block)
