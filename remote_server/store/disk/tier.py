"""The disk tier, as the server's store calls it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from remote_server.protocol import KeyState, TierStats
from remote_server.store.disk.allocator import SegmentAllocator
from remote_server.store.disk.block_io import Reading, Writing
from remote_server.store.disk.context import DiskContext
from remote_server.store.disk.files import Files
from remote_server.store.disk.finding import FoundSegment, Report
from remote_server.store.disk.index import Index
from remote_server.store.disk.layout import segment_name, slot_bytes_for
from remote_server.store.disk.recovery import DiskRecoveryIndex, Recovery
from remote_server.store.disk.removal import Removal
from remote_server.store.disk.segments import (
    BlockState,
    DiskBlock,
    Segments,
    segment_bytes_for,
)
from remote_server.store.disk.transfers import PIECE_BYTES
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.policy import policy_maker
from remote_server.store.io_threads import Pool
from remote_server.store.pages import PAGE, padded
from remote_server.store.presence import Journal
from remote_server.store.tier import Offered, OnRead, OnWritten, Together

log = logging.getLogger(__name__)

# Bytes of blocks that may wait to be written: the caller holds each of them in memory.
MAX_WRITING_BYTES = 64 << 20

_KEPT = (BlockState.READABLE, BlockState.UNVERIFIED)

_NOT_ABSENT = bytes.maketrans(bytes([KeyState.ABSENT]), bytes([KeyState.PENDING]))

COUNTERS = (
    "evicted", "removed", "cleared", "segments_made", "segments_taken", "segments_failed",
    "segments_damaged", "segments_set_aside", "headers_damaged", "erase_failed",
    "declined_no_slot", "declined_busy", "declined_recovering", "declined_small_demand",
    "declined_unlikely",
    "written", "written_bytes", "write_no_space", "write_io_error", "write_cleared",
    "read", "read_bytes", "read_damaged", "read_io_error",
    "recovered", "recovered_damaged", "recovered_older", "expired",
)  # fmt: skip
"""Always present, from zero. `recovered` counts blocks found at start whose bytes are good;
`recovered_older` counts those whose key a newer block has."""


class DiskSettings(NamedTuple):
    """The room of a disk tier, and the order of eviction in it."""

    budget: int
    segment_bytes: int = 0
    """0: by the budget."""
    max_writing_bytes: int = MAX_WRITING_BYTES
    learner: Learner | None = None
    """None: LRU."""


class DiskTier:
    """A `Tier` of blocks in the slots of segments, under one hard budget of all namespaces.
    Docstrings of calls add to those of `Tier`.

    The owner calls `finish_jobs` when the pool wakes it; callbacks run there, and inside no other
    call. Not thread-safe: one thread.
    """

    name = "disk"
    window_bytes = 32 << 20
    """Two pieces for each thread: one is read while the next one waits, so that no thread waits for
    a turn of the loop."""
    is_remote = False

    def __init__(
        self,
        files: Files,
        found: Sequence[FoundSegment],
        pool: Pool,
        settings: DiskSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        age_clock_ns: Callable[[], int] = time.time_ns,
        on_recovered: Callable[[], None] = lambda: None,
    ) -> None:
        """`found` must fit the budget. `age_clock_ns` makes generations, and continues over
        restarts. `on_recovered` is called once, from `finish_jobs`, if any was `found`.

        The parts are made in the order in which a block meets them: it has a place, which it leaves
        in the end; it is found at start; it is written and read. Ends with `close`; `files` and
        `pool` are the caller's.
        """
        budget = settings.budget
        self._pool = pool
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._index = Index()
        self.segments = Segments(
            budget, settings.segment_bytes or segment_bytes_for(budget), age_clock_ns,
            policy_maker(settings.learner, self._index.find_any), clock,
        )  # fmt: skip
        context = DiskContext(files, pool, self._index, self.segments, self._counters, clock)
        self._removal = Removal(context, lambda one: self._allocator.dispose_when_idle(one))
        self._allocator = SegmentAllocator(context, self._removal)
        recovery_index = DiskRecoveryIndex(
            context, self._removal, self._allocator.dispose_when_idle
        )
        left = [*map(recovery_index.add_segment, found)]
        self.recovery = Recovery(left, pool, recovery_index, min(PIECE_BYTES, budget // 32))
        self._writing = Writing(
            context, self._removal, self._allocator, self.recovery, settings.max_writing_bytes
        )
        self._reading = Reading(context, self._removal)
        self._recovery_logged = not found
        self._on_recovered = on_recovered
        self._next_to_sweep = 0
        self.recovery.start()

    def count_unusable(self, report: Report) -> None:
        """Count the segments that were found beside those of the tier."""
        self._counters["segments_damaged"] += len(report.deleted)
        self._counters["segments_set_aside"] += len(report.aside)

    def close(self) -> None:
        """Remove cleared segments, sync what was written, and close every file. The pool must have
        stopped."""
        self.recovery.stop()
        self._allocator.close()
        for segment in (*self.segments.all, *self.segments.retired):
            if segment.file is not None:
                try:
                    segment.file.sync()
                except OSError as error:
                    log.warning("disk: the last writes may be lost: %s", error)
                segment.file.close()

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        return self._pool.busy

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The state of each key, one byte each. PENDING: the block is being written; or it was
        found at start and this lookup has moved it to the front of verification; or slot headers
        that could hold the key are not read yet."""
        states = self.known_states(namespace, keys)
        if namespace in self.segments.unsettled:
            return states.translate(_NOT_ABSENT)
        return states

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        if self._index.unverified:
            self._verify_soon(namespace, keys)
        return self._index.states(namespace, keys)

    def holds(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._index.find(namespace, key)
        return block is not None and block.checksum == checksum

    def report_to(self, journal: Journal) -> None:
        self._index.journal = journal

    def has(self, namespace: str, key: bytes) -> bool:
        return key in self._index.readable.get(namespace, ())

    def peek(self, namespace: str, key: bytes) -> DiskBlock | None:
        return self._index.find(namespace, key)

    def room_for(self, lengths: Sequence[int]) -> int:
        return self._writing.room_for(lengths)

    def readable_keys(self, namespace: str) -> list[bytes]:
        return [*self._index.readable.get(namespace, ())]

    def num_blocks(self, namespace: str) -> int:
        return len(self._index.readable.get(namespace, ()))

    def namespaces(self) -> dict[str, int]:
        return {c.namespace: c.block_bytes for c in self.segments.classes.values() if c.segments}

    def has_room_of_its_own(self, namespace: str, block_bytes: int) -> bool:
        return (namespace, block_bytes) in self.segments.classes

    def take_retry(self) -> bool:
        """True once after each pause that followed a segment which could not be made."""
        return self._allocator.take_retry()

    def where(self, block: DiskBlock) -> str:
        """Its file and its slot."""
        return f"{segment_name(block.segment.number)}, slot {block.slot}"

    def age_s(self, block: DiskBlock) -> float:
        """The clock continues over restarts."""
        return max(0, self.segments.now_ns() - block.generation) / 1e9

    def stored_bytes(self, length: int) -> int:
        """The size of a block with its header, in whole pages."""
        return PAGE + padded(length)

    def num_unverified(self) -> int:
        """Blocks found at start whose bytes have not been hashed yet."""
        return self._index.num_unverified

    def used_bytes(self, namespace: str) -> int:
        """The size of the slots of one namespace's blocks, unverified ones included."""
        classes = self.segments.classes.values()
        return sum(c.used_bytes for c in classes if c.namespace == namespace)

    def stats(self) -> TierStats:
        """`free_slabs` are the segments that can still be made."""
        writing = [*self._index.writing()]
        held = (*writing, *self._index.gone)
        used = sum(c.used_bytes for c in self.segments.classes.values())
        return TierStats(
            budget_bytes=self.segments.budget,
            used_bytes=used + sum(block.segment.slot_bytes for block in held),
            blocks=self._index.num_readable,
            pending=len(writing) + self.num_unverified(),
            pinned=sum(segment.num_busy for segment in self.segments.all),
            free_slabs=self.segments.num_to_make,
            evicted_age_s=self.segments.use_times.evicted_age_s,
        )

    def num_places(self, block_bytes: int) -> int:
        return self.segments.budget // slot_bytes_for(block_bytes)

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def begin_puts(self, offered: Offered[int], block_bytes: int) -> list[DiskBlock]:
        """A key that is on disk already gets another copy, which replaces the first when it is
        written: check `lookup_all` before."""
        return self._writing.begin(offered, block_bytes)

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        self._writing.write(blocks, views, on_written)

    def fail_put(self, block: DiskBlock) -> None:
        self._writing.end(block, None)

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        return self._reading.pin_all(namespace, keys)

    def together(self, blocks: Sequence[DiskBlock]) -> Sequence[Together[DiskBlock]]:
        """All at one time, and nothing else: each block is read by itself, or with neighbours that
        are wanted too."""
        return (Together(blocks),)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead,
        deadline: float = inf,
    ) -> None:  # fmt: skip
        """The caller's memory bounds the reads under way. None takes long enough to regard
        `deadline`."""
        self._reading.read(blocks, views, on_read)

    def verify(self, blocks: Sequence[DiskBlock], on_read: OnRead) -> None:
        self._reading.verify(blocks, on_read)

    def unpin_all(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            self._removal.unpin(block)

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self._reading.touch_all(namespace, keys)

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: DiskBlock) -> bool:
        """It is erased when its last reader is done."""
        if block.state is not BlockState.READABLE:
            return False
        self._removal.discard(block)
        self._counters["removed"] += 1
        return True

    def remove_other(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._index.find(namespace, key)
        if block is None or block.checksum == checksum:
            return False
        self._removal.discard(block)
        self._counters["removed"] += 1
        return True

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> None:
        cutoff_generation = self.segments.cutoff(max_age_s)
        found = (self._index.find(namespace, key) for key in {*keys})
        self._expire([b for b in found if b is not None and b.generation <= cutoff_generation])

    def expire_some(self, max_age_s: float, at_most: int) -> None:
        """Each call takes one segment, in turn."""
        cutoff_generation = self.segments.cutoff(max_age_s)
        if not (segments := [*self.segments.all]):
            return
        segment = segments[self._next_to_sweep % len(segments)]
        old = [
            block
            for block in segment.blocks
            if block.generation <= cutoff_generation and block.state in _KEPT
        ]
        self._next_to_sweep += len(old) <= at_most
        self._expire(old[:at_most])

    def _expire(self, blocks: Sequence[DiskBlock]) -> None:
        for block in blocks:
            self._removal.discard(block)
        self._counters["expired"] += len(blocks)

    def clear(self, namespace: str | None) -> int:
        """Blocks that are not verified count too."""
        segments = [
            segment
            for segment in self.segments.all
            if namespace in (None, segment.slot_class.namespace)
        ]
        removed = sum(block.state in _KEPT for segment in segments for block in segment.blocks)
        self._allocator.forget_demand(namespace)
        self._allocator.clear(segments)
        self._counters["cleared"] += removed
        return removed

    def when_gone(self, then: Callable[[bool], None]) -> None:
        self._allocator.when_gone(then)

    @property
    def removing(self) -> bool:
        return self._allocator.clearing or self._removal.under_way

    # ── the loop ─────────────────────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        """Run the callbacks of finished jobs, and continue recovery."""
        self._pool.finish_jobs()
        if self._recovery_logged:
            return
        self.recovery.go_on()
        if self.recovery.done:
            self._recovery_logged = True
            self._on_recovered()
            names = ("recovered", "recovered_damaged", "recovered_older")
            log.info(
                "disk: %d blocks recovered; %d were damaged, %d older copies",
                *(self._counters[name] for name in names),
            )

    def check(self) -> None:
        """Every slot is free or holds exactly one block, and every block is in one place."""
        blocks = self._index.check()
        self.segments.check(blocks)
        in_policies = sum(len(c.policy) for c in self.segments.classes.values())
        assert in_policies == self._index.num_readable + self.num_unverified()
        assert self._writing.num_bytes >= sum(block.length for block in self._index.writing())

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _verify_soon(self, namespace: str, keys: Sequence[bytes]) -> None:
        unverified = self._index.unverified.get(namespace, {})
        for block in (wanted := [unverified[key] for key in keys if key in unverified]):
            self.recovery.verify_soon(block)
        if wanted:
            self._pool.wake()
