"""The disk tier as the server's store sees it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from remote_server.protocol import KeyState, TierStats
from remote_server.store.disk.adoption import Adoption
from remote_server.store.disk.files import Files, Scratch, Written
from remote_server.store.disk.folder import FoundSegment
from remote_server.store.disk.growth import Growth
from remote_server.store.disk.index import Index
from remote_server.store.disk.leaving import Leaving
from remote_server.store.disk.pool import Job, Pool, Priority
from remote_server.store.disk.recovery import Recovery
from remote_server.store.disk.segments import (
    FIRST_TICK,
    BlockState,
    DiskBlock,
    Segments,
    SlotClass,
    largest_block,
    segment_bytes_for,
)
from remote_server.store.disk.transfers import (
    PIECE_BYTES,
    Piece,
    ReadResult,
    pieces_of,
    read_piece,
    write_piece,
)

log = logging.getLogger(__name__)

# Blocks that may be waiting to be written, in bytes: somebody keeps each of them in memory.
MAX_WRITING_BYTES = 64 << 20

COUNTERS = (
    "evicted", "removed", "segments_made", "segments_taken", "segments_failed", "erase_failed",
    "declined_no_slot", "declined_busy", "declined_recovering",
    "written", "written_bytes", "write_no_space", "write_io_error", "write_cleared",
    "read", "read_bytes", "read_damaged", "read_io_error",
    "recovered", "recovered_damaged", "recovered_older",
)  # fmt: skip
"""Always present, from zero. `recovered` counts blocks that were found and whose bytes are good;
`recovered_older` those whose key a newer block has."""

OnWritten = Callable[[list[Written]], None]
OnRead = Callable[[list[bool]], None]


class DiskTier:
    """Blocks in the slots of segments, under one hard budget that all namespaces share.

    As a `Tier`, but the bytes are elsewhere: `begin_puts` reserves slots and `write` fills and
    publishes them; `pin_all` finds blocks and `read` fetches them. Both return at once and call
    back from `finish_jobs`, which the owner calls when the pool wakes it. Nothing here waits,
    and nothing is ever called back from inside another call. Not thread-safe: one thread.
    """

    def __init__(
        self,
        files: Files,
        found: Sequence[FoundSegment],
        pool: Pool,
        budget: int,
        *,
        segment_bytes: int | None = None,
        max_writing_bytes: int = MAX_WRITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`found` must fit the budget. Ends with `close`; `files` and `pool` are the caller's."""
        self.segments = Segments(budget, segment_bytes or segment_bytes_for(budget))
        self._pool = pool
        self._max_writing_bytes = max_writing_bytes
        self._wall_clock_ns = wall_clock_ns
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._index = Index()
        self._leaving = Leaving(
            self._index, self.segments, pool, self._counters,
            lambda segment: self._growth.dispose_when_idle(segment),
        )  # fmt: skip
        self._growth = Growth(
            files, self.segments, self._leaving, pool, self._counters, clock,
            self._next_generation,
        )  # fmt: skip
        self._writing_bytes = 0
        self._tick = FIRST_TICK
        self._generation = 0
        self._adoption = Adoption(
            self._index, self.segments, self._leaving, self._counters,
            self._growth.dispose_when_idle,
        )  # fmt: skip
        left = [*map(self._adoption.add_segment, found)]
        self.recovery = Recovery(left, pool, self._adoption, min(PIECE_BYTES, budget // 32))
        self._recovery_logged = not found
        self.recovery.start()

    def close(self) -> None:
        """End what clears have begun, make what was written permanent, close every file. The
        pool must have stopped."""
        self.recovery.stop()
        self._growth.close()
        for segment in (*self.segments.all, *self.segments.retired):
            if segment.file is not None:
                try:
                    segment.file.sync()
                except OSError as error:
                    log.warning("disk: what was written last may be lost: %s", error)
                segment.file.close()

    # ── what is there ────────────────────────────────────────────────────────────────────

    @property
    def largest_block_bytes(self) -> int:
        """Blocks above this can never be kept here."""
        return largest_block(self.segments.segment_bytes)

    @property
    def busy(self) -> bool:
        """Something is being read, written, erased or verified."""
        return self._pool.busy

    def lookup(self, namespace: str, key: bytes) -> KeyState:
        return KeyState(self.lookup_all(namespace, (key,))[0])

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The state of each key, a byte each. PENDING: it is being written, or it was found at
        start and its bytes are being hashed now, because it was asked for."""
        if self._index.unverified:
            self._ask_for(namespace, keys)
        return self._index.states(namespace, keys)

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""
        return len(self._index.readable.get(namespace, ()))

    def num_unverified(self) -> int:
        """Blocks found at start whose bytes have not been hashed yet."""
        return self._index.num_unverified

    def used_bytes(self, namespace: str) -> int:
        """What the slots of one namespace's blocks take, unverified ones as well."""
        classes = self.segments.classes.values()
        return sum(c.used_bytes for c in classes if c.namespace == namespace)

    def stats(self) -> TierStats:
        """`free_slabs` are the segments that can still be made."""
        writing = [*self._index.writing()]
        held = (*writing, *self._index.gone)
        return TierStats(
            budget_bytes=self.segments.budget,
            used_bytes=sum(c.used_bytes for c in self.segments.classes.values())
            + sum(block.segment.slot_bytes for block in held),
            blocks=self._index.num_readable,
            pending=len(writing) + self.num_unverified(),
            pinned=sum(segment.num_busy for segment in self.segments.all),
            free_slabs=self.segments.num_to_make,
        )

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def begin_puts(
        self,
        namespace: str,
        keys: Sequence[bytes],
        block_bytes: int,
        lengths: Sequence[int],
        checksums: Sequence[int],
    ) -> list[DiskBlock]:
        """A slot for each of the first keys, as many as there is room for now; others leave for
        it. The rest is counted by its reason.

        The caller ends each with `write` or `fail_put`. Keys that are here already get another
        copy, which replaces the first when it was written: ask `lookup_all` before.
        """
        blocks: list[DiskBlock] = []
        if block_bytes > self.largest_block_bytes:
            self._counters["declined_no_slot"] += len(keys)
            return blocks
        allowed = self._allowed(lengths)
        slot_class = self.segments.slot_class(namespace, block_bytes)
        wanted = zip(keys[:allowed], lengths, checksums, strict=False)
        while (missing := allowed - len(blocks)) and self._has_room(slot_class, missing):
            segment, slots = self.segments.take_slots(slot_class, missing)
            for slot, (key, length, checksum) in zip(slots, wanted, strict=False):
                block = DiskBlock(
                    namespace, key, length, checksum, self._next_generation(), segment, slot,
                    self._tick,
                )  # fmt: skip
                self.segments.place(block)
                self._index.begin(block)
                self._writing_bytes += length
                blocks.append(block)
        self._counters["declined_busy"] += len(keys) - allowed
        if len(blocks) < allowed:
            why = "declined_recovering" if self.recovery.scanning else "declined_no_slot"
            self._counters[why] += allowed - len(blocks)
        if not slot_class.segments:
            del self.segments.classes[namespace, block_bytes]
        return blocks

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        """Fill the slots of `blocks` from `views`, and publish them in this order: the last one
        is the most recently used.

        `views` are the caller's again, and the blocks readable or forgotten, when `on_written`
        is called, once, with what became of each. At least one block.
        """
        results: dict[DiskBlock, Written] = {}

        def finish(piece: Piece, written: Written | None) -> None:
            for block in piece.blocks:
                results[block] = written or Written.IO_ERROR
            if len(results) == len(blocks):
                for block in blocks:
                    results[block] = self._end_write(block, results[block])
                on_written([results[block] for block in blocks])

        for piece in pieces_of(blocks, views):
            self._submit_write(piece, finish)

    def fail_put(self, block: DiskBlock) -> None:
        """Forget `block`, which was not handed to `write`. A previous copy stays."""
        self._end_write(block, None)

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        """The readable block of each key, kept until `read` or `unpin`, and used now: the last
        one is the most recently used."""
        index = self._index.readable.get(namespace, {})
        self._tick += 1
        blocks = [*map(index.get, keys)]
        for block in blocks:
            if block is not None:
                self.segments.use(block, self._tick)
                self.segments.pin(block)
        return blocks

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead
    ) -> None:
        """Fill `views`, writable and as long as their blocks, which must be pinned.

        `views` are the caller's again, and each block's pin is given back, when `on_read` is
        called, once: whether each view holds its block's bytes. Those that do not are misses,
        and such blocks are gone. At least one block. What may be under way is bounded by the
        memory that the caller fills.
        """
        results: dict[int, bool] = {}
        places = {id(view): place for place, view in enumerate(views)}
        assert len(places) == len(blocks), "a view for each block, and no view twice"

        def finish(piece: Piece, found: list[ReadResult] | None) -> None:
            verdicts = found or [ReadResult.IO_ERROR] * len(piece.blocks)
            for block, view, verdict in zip(piece.blocks, piece.views, verdicts, strict=True):
                results[places[id(view)]] = verdict is ReadResult.OK
                self._end_read(block, verdict)
            if len(results) == len(blocks):
                on_read([results[place] for place in range(len(blocks))])

        for piece in pieces_of(blocks, views):
            self._submit_read(piece, finish)

    def unpin(self, block: DiskBlock) -> None:
        """Give back one pin without reading."""
        self._leaving.unpin(block)

    def unpin_all(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            self._leaving.unpin(block)

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now; False when there is nothing readable."""
        block = self._index.readable.get(namespace, {}).get(key)
        if block is not None:
            self._tick += 1
            self.segments.use(block, self._tick)
        return block is not None

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: DiskBlock) -> bool:
        """Take `block` out of the index and erase it; False when it had left already."""
        if block.state is not BlockState.READABLE:
            return False
        self._leaving.let_go(block)
        self._counters["removed"] += 1
        return True

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all; what is being written is dropped too.

        Returns how many blocks left, unverified ones included. It holds at once for this
        process; for the next one when `busy` is over.
        """
        segments = [
            segment
            for segment in self.segments.all
            if namespace in (None, segment.slot_class.namespace)
        ]
        kept = (BlockState.READABLE, BlockState.UNVERIFIED)
        removed = sum(block.state in kept for segment in segments for block in segment.blocks)
        self._growth.clear(segments)
        return removed

    # ── the loop ─────────────────────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        """Call back whoever has something to hear, and go on with what is to do."""
        self._pool.finish_jobs()
        if self._recovery_logged:
            return
        self.recovery.go_on()
        if self.recovery.done:
            self._recovery_logged = True
            log.info(
                "disk: %d blocks recovered; %d were damaged, %d older copies",
                self._counters["recovered"],
                self._counters["recovered_damaged"],
                self._counters["recovered_older"],
            )

    def check(self) -> None:
        """Every slot is free or holds exactly one block, and every block is in one place."""
        blocks = self._index.check()
        self.segments.check(blocks)
        in_policies = sum(len(c.policy) for c in self.segments.classes.values())
        assert in_policies == self._index.num_readable + self._index.num_unverified
        assert self._writing_bytes >= sum(block.length for block in self._index.writing())

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _allowed(self, lengths: Sequence[int]) -> int:
        """How many more blocks may be waiting to be written. One always, or none ever might."""
        room = self._max_writing_bytes - self._writing_bytes
        for place, length in enumerate(lengths):
            room -= length
            if room < 0 and (place or self._writing_bytes):
                return place
        return len(lengths)

    def _has_room(self, slot_class: SlotClass, wanted: int) -> bool:
        return bool(slot_class.open) or self._growth.make_room(slot_class, wanted)

    def _submit_write(self, piece: Piece, finish: Callable[[Piece, Written | None], None]) -> None:
        segment = piece.blocks[0].segment

        def work(scratch: Scratch) -> Written:
            if segment.file is None:
                return segment.failure or Written.IO_ERROR
            return write_piece(segment.file, piece, scratch)

        job = Job(Priority.WRITE, work, partial(finish, piece), piece.num_bytes)
        self._growth.when_made(segment, job)

    def _end_write(self, block: DiskBlock, written: Written | None) -> Written:
        self._writing_bytes -= block.length
        self.segments.unpin(block)
        if block.state is BlockState.GONE:
            self._leaving.release(block)
            written = Written.CLEARED if written is Written.OK else written
        else:
            self._index.end_writing(block)
            if written is Written.OK:
                self._publish(block)
            else:
                self.segments.free_slot(block)
        if written is Written.OK:
            self._counters["written"] += 1
            self._counters["written_bytes"] += block.length
        elif written is not None:
            self._counters[f"write_{written}"] += 1
        return written or Written.IO_ERROR

    def _publish(self, block: DiskBlock) -> None:
        previous = self._index.find(block.namespace, block.key)
        if previous is not None:
            self._leaving.let_go(previous)
        self._index.publish(block)
        self._tick += 1
        self.segments.use(block, self._tick)

    def _submit_read(
        self, piece: Piece, finish: Callable[[Piece, list[ReadResult] | None], None]
    ) -> None:
        file = piece.blocks[0].segment.file
        assert file is not None

        def work(scratch: Scratch) -> list[ReadResult]:
            return read_piece(file, piece, scratch)

        self._pool.submit(Job(Priority.READ, work, partial(finish, piece), piece.num_bytes))

    def _end_read(self, block: DiskBlock, verdict: ReadResult) -> None:
        if verdict is ReadResult.OK:
            self._counters["read"] += 1
            self._counters["read_bytes"] += block.length
        else:
            self._counters[f"read_{verdict}"] += 1
            if block.state is BlockState.READABLE:
                self._leaving.let_go(block)
        self._leaving.unpin(block)

    def _ask_for(self, namespace: str, keys: Sequence[bytes]) -> None:
        unverified = self._index.unverified.get(namespace, {})
        asked = [unverified[key] for key in keys if key in unverified]
        for block in asked:
            self.recovery.ask(block)
        if asked:
            self._pool.wake()

    def _next_generation(self) -> int:
        """Higher than all before, also those of earlier servers if clocks are honest."""
        last = max(self._generation, self._adoption.highest_generation)
        self._generation = max(last + 1, self._wall_clock_ns())
        return self._generation
