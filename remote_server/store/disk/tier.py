"""The disk tier as the server's store sees it."""

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from remote_server.config import format_bytes
from remote_server.protocol import KeyState, TierStats
from remote_server.store.disk import housekeeping
from remote_server.store.disk.files import Files, Scratch, Written
from remote_server.store.disk.folder import FoundSegment
from remote_server.store.disk.layout import SegmentHeader
from remote_server.store.disk.pool import Job, Pool, Priority
from remote_server.store.disk.recovery import Books, Found, Recovery
from remote_server.store.disk.segments import (
    FIRST_TICK,
    BlockState,
    DiskBlock,
    Segment,
    Segments,
    SlotClass,
    largest_block,
    segment_bytes_for,
)
from remote_server.store.disk.transfers import (
    Piece,
    ReadResult,
    erase,
    pieces_of,
    read_piece,
    write_piece,
)

log = logging.getLogger(__name__)

# Blocks that may be waiting to be written, in bytes: somebody keeps each of them in memory.
MAX_WRITING_BYTES = 64 << 20

# After a segment could not be made, for example because somebody else filled the disk.
MAKE_AGAIN_S = 10.0

COUNTERS = (
    "evicted", "removed", "segments_made", "segments_taken", "segments_failed", "erase_failed",
    "declined_no_slot", "declined_busy", "declined_recovering",
    "written", "written_bytes", "write_no_space", "write_io_error", "write_cleared",
    "read", "read_bytes", "read_damaged", "read_io_error",
    "recovered", "recovered_damaged", "recovered_older",
)  # fmt: skip
"""Always present, from zero. `recovered` counts blocks that were found and whose bytes are good;
`recovered_older` those whose key a newer block has."""

_NONE: Mapping[bytes, object] = {}
_READABLE = bytes.maketrans(b"\x01", bytes([KeyState.READABLE]))

OnWritten = Callable[[list[Written]], None]
OnRead = Callable[[list[bool]], None]


class DiskTier:
    """Blocks in the slots of segments, under one hard budget that all namespaces share.

    As a `Tier`, but the bytes are elsewhere: `begin_puts` reserves slots and `write` fills and
    publishes them; `pin_all` finds blocks and `read` fetches them. Both return at once and call
    back from `finish_jobs`, which the owner calls when the pool wakes it. Nothing here waits,
    and nothing is ever called back from inside another call. Not thread-safe: one thread.

    A namespace that has no free slot gets, in this order: a new segment; the coldest segment
    of another, if it has none itself or that one has been idle for longer than its own oldest
    block; and its own oldest block's slot.
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
        self._files = files
        self._pool = pool
        self._max_writing_bytes = max_writing_bytes
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._index: dict[str, dict[bytes, DiskBlock]] = {}
        self._unverified: dict[str, dict[bytes, DiskBlock]] = {}
        self._writing: dict[str, dict[bytes, list[DiskBlock]]] = {}
        self._gone: set[DiskBlock] = set()
        self._older: dict[DiskBlock, DiskBlock] = {}  # of an unverified block, in case it is bad
        self._writing_bytes = 0
        self._tick = FIRST_TICK
        self._recovered_tick = 0
        self._generation = 0
        self._make_again = 0.0
        self._made_later: dict[Segment, list[Job[Any]]] = {}
        self._housekeeping: deque[Callable[[], Job[Any]]] = deque()
        self._keeping_house = False
        self.recovery = Recovery([*map(self._add_found, found)], pool, self._books())
        self._recovery_logged = not found
        self.recovery.start()

    def close(self) -> None:
        """Close every file, made permanent as far as it goes. The pool must have stopped."""
        self.recovery.stop()
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
        readable = self._index.get(namespace, _NONE)
        states = bytes(map(readable.__contains__, keys)).translate(_READABLE)
        if writing := self._writing.get(namespace):
            states = _with_pending(states, bytes(map(writing.__contains__, keys)))
        if unverified := self._unverified.get(namespace):
            found = bytes(map(unverified.__contains__, keys))
            if KeyState.PENDING in found:
                for key in keys:
                    if key in unverified:
                        self.recovery.ask(unverified[key])
                self._pool.wake()
                states = _with_pending(states, found)
        return states

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""
        return len(self._index.get(namespace, ()))

    def num_unverified(self) -> int:
        """Blocks found at start whose bytes have not been hashed yet."""
        return sum(map(len, self._unverified.values()))

    def used_bytes(self, namespace: str) -> int:
        """What the slots of one namespace's blocks take, unverified ones as well."""
        classes = self.segments.classes.values()
        return sum(c.used_bytes for c in classes if c.namespace == namespace)

    def stats(self) -> TierStats:
        """`free_slabs` are the segments that can still be made."""
        writing = [*self._being_written()]
        held = (*writing, *self._gone)
        return TierStats(
            budget_bytes=self.segments.budget,
            used_bytes=sum(c.used_bytes for c in self.segments.classes.values())
            + sum(block.segment.slot_bytes for block in held),
            blocks=sum(map(len, self._index.values())),
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
                self._writing.setdefault(namespace, {}).setdefault(key, []).append(block)
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
        index = self._index.get(namespace, {})
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
        if not self.segments.unpin(block):
            return
        if block.state is BlockState.GONE:
            self._erase(block)
        else:
            block.segment.slot_class.policy.unpin(block)

    def unpin_all(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            self.unpin(block)

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now; False when there is nothing readable."""
        block = self._index.get(namespace, {}).get(key)
        if block is not None:
            self._tick += 1
            self.segments.use(block, self._tick)
        return block is not None

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: DiskBlock) -> bool:
        """Take `block` out of the index and erase it; False when it had left already."""
        if block.state is not BlockState.READABLE:
            return False
        self._let_go(block)
        self._counters["removed"] += 1
        return True

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all; what is being written is dropped too.

        Returns how many blocks left, unverified ones included. It holds at once for this
        process; for the next one when `busy` is over.
        """
        removed = 0
        idle = []
        for segment in [*self.segments.all]:
            if namespace in (None, segment.slot_class.namespace):
                removed += sum(b.state is not BlockState.WRITING for b in segment.blocks)
                removed -= sum(b.state is BlockState.GONE for b in segment.blocks)
                self._retire(segment)
                if segment.num_busy == 0:
                    self.segments.forget(segment)
                    idle.append(segment)
                else:
                    self._keep_house(partial(housekeeping.unlink, self._files, segment))
        if idle:
            self._dispose(idle)
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
        readable = [b for blocks in self._index.values() for b in blocks.values()]
        unverified = [b for blocks in self._unverified.values() for b in blocks.values()]
        writing = [*self._being_written()]
        self.segments.check([*readable, *unverified, *writing, *self._gone])
        assert all(b.state is BlockState.READABLE for b in readable)
        assert all(b.state is BlockState.UNVERIFIED for b in unverified)
        assert all(b.state is BlockState.WRITING and b.pins == 1 for b in writing)
        assert all(b.state is BlockState.GONE and b.pins > 0 for b in self._gone)
        assert all(self._index[b.namespace][b.key] is b for b in readable)
        assert not any(b.key in self._index.get(b.namespace, ()) for b in unverified)
        evictable = [*readable, *unverified]
        assert all(b in b.segment.slot_class.policy for b in evictable)
        in_policies = sum(len(c.policy) for c in self.segments.classes.values())
        assert in_policies == len(evictable), f"{in_policies} evictable, {len(evictable)} found"
        assert self._writing_bytes >= sum(b.length for b in writing)

    # ── making room ──────────────────────────────────────────────────────────────────────

    def _allowed(self, lengths: Sequence[int]) -> int:
        """How many more blocks may be waiting to be written. One always, or none ever might."""
        room = self._max_writing_bytes - self._writing_bytes
        for place, length in enumerate(lengths):
            room -= length
            if room < 0 and (place or self._writing_bytes):
                return place
        return len(lengths)

    def _has_room(self, slot_class: SlotClass, wanted: int) -> bool:
        return bool(slot_class.open) or self._make_room(slot_class, wanted)

    def _make_room(self, slot_class: SlotClass, wanted: int) -> bool:
        may_make = self._clock() >= self._make_again
        if may_make and self.segments.num_to_make:
            self._make(slot_class, [])
            return True
        victim = slot_class.policy.victim()
        if may_make and self._take_from_others(slot_class, victim):
            return True
        while victim is not None and wanted:
            self._evict(victim)
            slot_class.evictions_until_check -= 1
            wanted -= 1
            victim = slot_class.policy.victim()
        return bool(slot_class.open)

    def _take_from_others(self, slot_class: SlotClass, victim: DiskBlock | None) -> bool:
        """Replace another class's coldest segment, if it has been idle for longer than `victim`.

        With a victim at hand this looks at all segments only once per segment's worth of
        evictions, so that a put costs the same however many there are.
        """
        if victim is not None and slot_class.evictions_until_check > 0:
            return False
        gone: list[Segment] = []
        while not self.segments.num_to_make:  # more than one only where they are smaller
            other = self.segments.coldest_of_others(slot_class)
            if other is None or (victim is not None and other.mean_tick >= victim.tick):
                break
            for block in [*other.blocks]:  # none is pinned, so all are in the index
                self._evict(block)
            self._retire(other)
            self.segments.forget(other)
            gone.append(other)
        if self.segments.num_to_make:
            self._counters["segments_taken"] += len(gone)
            self._make(slot_class, gone)
            return True
        if gone:
            self._dispose(gone)
        slot_class.evictions_until_check = self.segments.segment_bytes // slot_class.slot_bytes
        return False

    def _evict(self, block: DiskBlock) -> None:
        """Its slot may be written to at once. Until it is, a crash brings the block back."""
        self._take_out(block)
        self.segments.free_slot(block)
        self._counters["evicted"] += 1

    # ── segments come and go ─────────────────────────────────────────────────────────────

    def _make(self, slot_class: SlotClass, gone: list[Segment]) -> None:
        """A new segment in place of those `gone`; its slots can be reserved at once."""
        segment = self.segments.add(slot_class, secrets.randbits(64))
        self._made_later[segment] = []
        header = SegmentHeader(
            slot_class.namespace,
            slot_class.block_bytes,
            segment.num_bytes,
            segment.incarnation,
            self._next_generation(),
        )

        def finish(result: housekeeping.Made | None) -> None:
            made = result or housekeeping.Made(None, Written.IO_ERROR)
            segment.file = made.file
            if made.file is None:
                self._give_up(segment, made.why)
            else:
                self._counters["segments_made"] += 1
            for job in self._made_later.pop(segment):
                self._pool.submit(job)

        self._keep_house(
            lambda: housekeeping.make(self._files, segment.number, header, gone, finish)
        )

    def _give_up(self, segment: Segment, why: Written) -> None:
        """It could not be made. What was to be written there fails; its slots are nobody's."""
        log.warning(
            "disk: no new segment of %s: %s; trying again in %g s",
            format_bytes(segment.num_bytes), why, MAKE_AGAIN_S,
        )  # fmt: skip
        self._counters["segments_failed"] += 1
        self._make_again = self._clock() + MAKE_AGAIN_S
        segment.failure = why
        if not segment.retired:
            self._retire(segment)
            self._dispose_when_idle(segment)

    def _retire(self, segment: Segment) -> None:
        """Take it out of its class, and its blocks out of the index."""
        for block in [*segment.blocks]:
            if block.state is BlockState.WRITING:
                self._forget_writing(block)
                self._set_gone(block)
            elif block.state is not BlockState.GONE:
                self._take_out(block)
                if block.pins:
                    self._set_gone(block)
                else:
                    self.segments.free_slot(block)
        self.segments.retire(segment)

    def _dispose_when_idle(self, segment: Segment) -> None:
        if segment.retired and segment.num_busy == 0 and segment in self.segments.retired:
            self.segments.forget(segment)
            self._dispose([segment])

    def _dispose(self, segments: list[Segment]) -> None:
        self._keep_house(lambda: housekeeping.dispose(self._files, segments))

    def _keep_house(self, make_job: Callable[[], Job[Any]]) -> None:
        """One at a time, in order: so files never exceed the budget, and a segment's making
        ends before its end begins."""
        self._housekeeping.append(make_job)
        self._go_on_with_housekeeping()

    def _go_on_with_housekeeping(self) -> None:
        if self._keeping_house or not self._housekeeping:
            return
        job = self._housekeeping.popleft()()
        finish = job.finish

        def finish_and_go_on(result: Any) -> None:
            self._keeping_house = False
            finish(result)
            self._go_on_with_housekeeping()

        job.finish = finish_and_go_on
        self._keeping_house = True
        self._pool.submit(job)

    # ── blocks come and go ───────────────────────────────────────────────────────────────

    def _submit_write(self, piece: Piece, finish: Callable[[Piece, Written | None], None]) -> None:
        segment = piece.blocks[0].segment

        def work(scratch: Scratch) -> Written:
            if segment.file is None:
                return segment.failure or Written.IO_ERROR
            return write_piece(segment.file, piece, scratch)

        job = Job(Priority.WRITE, work, lambda result: finish(piece, result), piece.num_bytes)
        if segment in self._made_later:
            self._made_later[segment].append(job)
        else:
            self._pool.submit(job)

    def _end_write(self, block: DiskBlock, written: Written | None) -> Written:
        self._writing_bytes -= block.length
        self.segments.unpin(block)
        if block.state is BlockState.GONE:
            self._release(block)
            written = Written.CLEARED if written is Written.OK else written
        else:
            self._forget_writing(block)
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
        self._tick += 1
        for index in (self._index, self._unverified):
            previous = index.get(block.namespace, {}).get(block.key)
            if previous is not None:
                self._let_go(previous)
        self._index.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        block.segment.slot_class.policy.add(block)
        self.segments.use(block, self._tick)

    def _submit_read(
        self, piece: Piece, finish: Callable[[Piece, list[ReadResult] | None], None]
    ) -> None:
        file = piece.blocks[0].segment.file
        assert file is not None

        def work(scratch: Scratch) -> list[ReadResult]:
            return read_piece(file, piece, scratch)

        done = lambda results: finish(piece, results)  # noqa: E731
        self._pool.submit(Job(Priority.READ, work, done, piece.num_bytes))

    def _end_read(self, block: DiskBlock, verdict: ReadResult) -> None:
        if verdict is ReadResult.OK:
            self._counters["read"] += 1
            self._counters["read_bytes"] += block.length
        else:
            self._counters[f"read_{verdict}"] += 1
            if block.state is BlockState.READABLE:
                self._let_go(block)
        self.unpin(block)

    def _let_go(self, block: DiskBlock) -> None:
        """Out of the index for good: it is erased before its slot is free."""
        self._take_out(block)
        self._set_gone(block)
        if block.pins == 0:
            self._erase(block)

    def _take_out(self, block: DiskBlock) -> None:
        index = self._index if block.state is BlockState.READABLE else self._unverified
        of_namespace = index[block.namespace]
        del of_namespace[block.key]
        if not of_namespace:
            del index[block.namespace]
        block.segment.slot_class.policy.remove(block)
        block.state = BlockState.GONE
        if (older := self._older.pop(block, None)) is not None:
            self._give_up_older(older)

    def _set_gone(self, block: DiskBlock) -> None:
        block.state = BlockState.GONE
        self._gone.add(block)

    def _erase(self, block: DiskBlock) -> None:
        file = block.segment.file
        if block.segment.retired or file is None:
            self._release(block)
            return
        self.segments.pin(block)

        def finish(erased: bool | None) -> None:
            self._counters["erase_failed"] += not erased
            self.segments.unpin(block)
            self._release(block)

        self._pool.submit(Job(Priority.WRITE, lambda scratch: erase(file, block, scratch), finish))

    def _release(self, block: DiskBlock) -> None:
        """Nobody uses a block that is gone: its slot is free."""
        self._gone.discard(block)
        self.segments.free_slot(block)
        self._dispose_when_idle(block.segment)

    def _forget_writing(self, block: DiskBlock) -> None:
        writing = self._writing[block.namespace]
        same_key = writing[block.key]
        same_key.remove(block)
        if not same_key:
            del writing[block.key]
        if not writing:
            del self._writing[block.namespace]

    def _being_written(self) -> Iterator[DiskBlock]:
        for writing in self._writing.values():
            for same_key in writing.values():
                yield from same_key

    def _next_generation(self) -> int:
        """Higher than all before, also those of earlier servers if clocks are honest."""
        self._generation = max(self._generation + 1, self._wall_clock_ns())
        return self._generation

    # ── recovery ─────────────────────────────────────────────────────────────────────────

    def _books(self) -> Books:
        return Books(
            free=self._free_found, adopt=self._adopt, done=self._all_adopted,
            pin=self.segments.pin, judge=self._judge,
        )  # fmt: skip

    def _add_found(self, found: FoundSegment) -> Segment:
        header = found.header
        slot_class = self.segments.slot_class(header.namespace, header.block_bytes)
        self._generation = max(self._generation, header.generation)
        return self.segments.add_found(
            found.number, header.segment_bytes, header.incarnation, slot_class, found.file
        )

    def _free_found(self, segment: Segment, slots: list[int]) -> None:
        segment.unapplied.difference_update(slots)
        self.segments.add_free(segment, reversed(slots))

    def _adopt(self, segment: Segment, found: Found) -> DiskBlock | None:
        segment.unapplied.discard(found.slot)
        self._recovered_tick += 1
        self._generation = max(self._generation, found.generation)
        header, namespace = found.header, segment.slot_class.namespace
        block = DiskBlock(
            namespace, header.key, header.length, header.checksum, header.generation, segment,
            found.slot, self._recovered_tick, 0, BlockState.UNVERIFIED,
        )  # fmt: skip
        self.segments.place(block)
        if segment.retired:
            block.state = BlockState.GONE
            self.segments.free_slot(block)
            return None
        if header.key in self._index.get(namespace, ()):
            self._counters["recovered_older"] += 1
            self._set_gone(block)
            self._erase(block)
            return None
        previous = self._unverified.get(namespace, {}).pop(header.key, None)
        if previous is not None:  # they come in the order written
            self._counters["recovered_older"] += 1
            self._keep_older(block, previous)
        self._unverified.setdefault(namespace, {})[header.key] = block
        segment.slot_class.policy.add(block)
        return block

    def _keep_older(self, block: DiskBlock, previous: DiskBlock) -> None:
        """A kill while `block` was replacing `previous` may have left the header of the one and
        all of the other: which it is, its bytes will tell."""
        previous.segment.slot_class.policy.remove(previous)
        self.segments.pin(previous)
        self._set_gone(previous)
        self._older[block] = previous

    def _give_up_older(self, older: DiskBlock) -> None:
        self.unpin(older)
        if (oldest := self._older.pop(older, None)) is not None:
            self._give_up_older(oldest)

    def _take_older(self, older: DiskBlock) -> None:
        self._gone.remove(older)
        older.state = BlockState.UNVERIFIED
        self._unverified.setdefault(older.namespace, {})[older.key] = older
        older.segment.slot_class.policy.add(older)
        self.unpin(older)
        self.recovery.ask(older)

    def _all_adopted(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.num_busy -= 1
            self._dispose_when_idle(segment)
        # They were added to the policies before what was recovered, and are younger.
        fresh = [b for blocks in self._index.values() for b in blocks.values()]
        for block in sorted((b for b in fresh if b.tick >= FIRST_TICK), key=lambda b: b.tick):
            block.segment.slot_class.policy.use(block)
        log.info(
            "disk: %d blocks found, %s; checking their bytes in the background",
            self.num_unverified(),
            format_bytes(sum(c.used_bytes for c in self.segments.classes.values())),
        )

    def _judge(self, block: DiskBlock, result: ReadResult) -> None:
        if block.state is BlockState.UNVERIFIED:
            if result is ReadResult.OK:
                self._counters["recovered"] += 1
                self._take_from_unverified(block)
            else:
                self._counters["recovered_damaged"] += 1
                older = self._older.pop(block, None)
                self._let_go(block)
                if older is not None:
                    self._take_older(older)
        self.unpin(block)

    def _take_from_unverified(self, block: DiskBlock) -> None:
        of_namespace = self._unverified[block.namespace]
        del of_namespace[block.key]
        if not of_namespace:
            del self._unverified[block.namespace]
        self._index.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        if (older := self._older.pop(block, None)) is not None:
            self._give_up_older(older)


def _with_pending(states: bytes, pending: bytes) -> bytes:
    return bytes(map(max, states, pending)) if KeyState.PENDING in pending else states
