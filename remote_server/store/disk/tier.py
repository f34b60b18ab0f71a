"""The disk tier as the server's store sees it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from remote_server.protocol import KeyState, TierStats
from remote_server.store.disk.adoption import Adoption
from remote_server.store.disk.files import Files
from remote_server.store.disk.finding import FoundSegment, Report
from remote_server.store.disk.growth import Growth
from remote_server.store.disk.index import Index
from remote_server.store.disk.leaving import Leaving
from remote_server.store.disk.pool import Pool
from remote_server.store.disk.reading import OnRead, Reading
from remote_server.store.disk.recovery import Recovery
from remote_server.store.disk.segments import (
    BlockState,
    DiskBlock,
    Segments,
    largest_block,
    segment_bytes_for,
)
from remote_server.store.disk.transfers import PIECE_BYTES
from remote_server.store.disk.writing import OnWritten, Writing

log = logging.getLogger(__name__)

# Blocks that may be waiting to be written, in bytes: somebody keeps each of them in memory.
MAX_WRITING_BYTES = 64 << 20

_NOT_ABSENT = bytes.maketrans(bytes([KeyState.ABSENT]), bytes([KeyState.PENDING]))

COUNTERS = (
    "evicted", "removed", "cleared", "segments_made", "segments_taken", "segments_failed",
    "segments_damaged", "segments_set_aside", "headers_damaged", "erase_failed",
    "declined_no_slot", "declined_busy", "declined_recovering", "declined_small_demand",
    "written", "written_bytes", "write_no_space", "write_io_error", "write_cleared",
    "read", "read_bytes", "read_damaged", "read_io_error",
    "recovered", "recovered_damaged", "recovered_older", "expired",
)  # fmt: skip
"""Always present, from zero. `recovered` counts blocks that were found and whose bytes are good;
`recovered_older` those whose key a newer block has."""


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
        unusable: Report | None = None,
        segment_bytes: int | None = None,
        max_writing_bytes: int = MAX_WRITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
        age_clock_ns: Callable[[], int] = time.time_ns,
        on_recovered: Callable[[], None] = lambda: None,
    ) -> None:
        """`found` must fit the budget; `unusable` are the segments beside them. `age_clock_ns` is
        what generations are made of; it goes on over restarts. `on_recovered` is called once, from
        `finish_jobs`, if anything was `found`.

        Ends with `close`; `files` and `pool` are the caller's.
        """
        self.segments = Segments(budget, segment_bytes or segment_bytes_for(budget), age_clock_ns)
        self._pool = pool
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        unusable = unusable or Report()
        self._counters["segments_damaged"] = len(unusable.deleted)
        self._counters["segments_set_aside"] = len(unusable.aside)
        self._index = Index()
        self._leaving = Leaving(
            self._index, self.segments, pool, self._counters,
            lambda segment: self._growth.dispose_when_idle(segment),
        )  # fmt: skip
        self._growth = Growth(files, self.segments, self._leaving, pool, self._counters, clock)
        self._adoption = Adoption(
            self._index, self.segments, self._leaving, self._counters,
            self._growth.dispose_when_idle,
        )  # fmt: skip
        left = [*map(self._adoption.add_segment, found)]
        self.recovery = Recovery(left, pool, self._adoption, min(PIECE_BYTES, budget // 32))
        self._recovery_logged = not found
        self._on_recovered = on_recovered
        self._writing = Writing(
            self._index, self.segments, self._leaving, self._growth, pool, self._counters,
            self.recovery, max_writing_bytes,
        )  # fmt: skip
        self._reading = Reading(self._index, self.segments, self._leaving, pool, self._counters)
        self._next_to_sweep = 0
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
        """The state of each key, a byte each. PENDING: it is being written; or it was found at
        start and its bytes are being hashed now, because it was asked for; or the headers that
        could name it have not all been read."""
        states = self.known_states(namespace, keys)
        if namespace in self.segments.unsettled:
            return states.translate(_NOT_ABSENT)
        return states

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """`lookup_all`, but ABSENT when it is not known yet: for who puts what is not there."""
        if self._index.unverified:
            self._ask_for(namespace, keys)
        return self._index.states(namespace, keys)

    def holds(self, namespace: str, key: bytes, checksum: int) -> bool:
        """Whether these very bytes are here, verified or not: writing them again gains nothing."""
        block = self._index.find(namespace, key)
        return block is not None and block.checksum == checksum

    def room_for(self, lengths: Sequence[int]) -> int:
        """How many blocks of these `lengths` may be waiting to be written, beside those that
        are: `begin_puts` would decline the others as busy."""
        return self._writing.room_for(lengths)

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""
        return len(self._index.readable.get(namespace, ()))

    def block_bytes_of(self, namespace: str) -> int | None:
        """What a namespace was declared with when its blocks came here, perhaps by an earlier
        server; None when there is nothing of it."""
        return self.namespaces().get(namespace)

    def namespaces(self) -> dict[str, int]:
        """What has segments here, found at start or made since, and its `block_bytes`."""
        return {c.namespace: c.block_bytes for c in self.segments.classes.values() if c.segments}

    def has_segment(self, namespace: str, block_bytes: int) -> bool:
        """Whether it has a file of its own, and thus room that its oldest blocks leave."""
        return (namespace, block_bytes) in self.segments.classes

    def now_ns(self) -> int:
        """The time, as generations have it: what was written at `g` is `now_ns() - g` old."""
        return self.segments.now_ns()

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
        return self._writing.begin(namespace, keys, block_bytes, lengths, checksums)

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        """Fill the slots of `blocks` from `views`, and publish them in this order: the last one
        is the most recently used.

        `views` are the caller's again, and the blocks readable or forgotten, when `on_written`
        is called, once, with what became of each. At least one block.
        """
        self._writing.write(blocks, views, on_written)

    def fail_put(self, block: DiskBlock) -> None:
        """Forget `block`, which was not handed to `write`. A previous copy stays."""
        self._writing.end(block, None)

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        """The readable block of each key, kept until `read` or `unpin`, and used now: the last
        one is the most recently used."""
        return self._reading.pin_all(namespace, keys)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead
    ) -> None:
        """Fill `views`, writable and as long as their blocks, which must be pinned.

        `views` are the caller's again, and each block's pin is given back, when `on_read` is
        called, once: whether each view holds its block's bytes. Those that do not are misses,
        and such blocks are gone. At least one block. What may be under way is bounded by the
        memory that the caller fills.
        """
        self._reading.read(blocks, views, on_read)

    def verify(self, blocks: Sequence[DiskBlock], on_read: OnRead) -> None:
        """`read` to nowhere, at least one block: whether the file still holds the bytes of each."""
        self._reading.verify(blocks, on_read)

    def unpin(self, block: DiskBlock) -> None:
        """Give back one pin without reading."""
        self._leaving.unpin(block)

    def unpin_all(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            self._leaving.unpin(block)

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now; False when there is nothing readable."""
        return self.touch_all(namespace, (key,)) == 1

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        """`touch` of each key: the last one is the most recently used. Returns how many there
        are."""
        return self._reading.touch_all(namespace, keys)

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: DiskBlock) -> bool:
        """Take `block` out of the index and erase it; False when it had left already."""
        if block.state is not BlockState.READABLE:
            return False
        self._leaving.let_go(block)
        self._counters["removed"] += 1
        return True

    def remove_other(self, namespace: str, key: bytes, checksum: int) -> bool:
        """Remove the block of `key`, verified or not, unless it holds these very bytes. Whether
        there was one."""
        block = self._index.find(namespace, key)
        if block is None or block.checksum == checksum:
            return False
        self._leaving.let_go(block)
        self._counters["removed"] += 1
        return True

    def expire(self, namespace: str, keys: Sequence[bytes], last_generation: int) -> None:
        """Remove those of `keys`, verified or not, that were written then or earlier."""
        found = (self._index.find(namespace, key) for key in {*keys})
        self._expire([b for b in found if b is not None and b.generation <= last_generation])

    def expire_some(self, last_generation: int, at_most: int) -> None:
        """Remove up to `at_most` such blocks from one segment, each time another one."""
        segments = [*self.segments.all]
        if not segments:
            return
        segment = segments[self._next_to_sweep % len(segments)]
        kept = (BlockState.READABLE, BlockState.UNVERIFIED)
        old = [
            block
            for block in segment.blocks
            if block.generation <= last_generation and block.state in kept
        ]
        self._next_to_sweep += len(old) <= at_most
        self._expire(old[:at_most])

    def _expire(self, blocks: Sequence[DiskBlock]) -> None:
        for block in blocks:
            self._leaving.let_go(block)
        self._counters["expired"] += len(blocks)

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all; what is being written is dropped too.

        Returns how many blocks left, unverified ones included. It holds at once for this
        process; for the next one from `when_gone` on.
        """
        segments = [
            segment
            for segment in self.segments.all
            if namespace in (None, segment.slot_class.namespace)
        ]
        kept = (BlockState.READABLE, BlockState.UNVERIFIED)
        removed = sum(block.state in kept for segment in segments for block in segment.blocks)
        self._growth.forget_demand(namespace)
        self._growth.clear(segments)
        self._counters["cleared"] += removed
        return removed

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then` when no restart would find anything of what was cleared: now, or from
        `finish_jobs`. With False when the file system refuses to remove or to sync it."""
        self._growth.when_gone(then)

    @property
    def clearing(self) -> bool:
        """Somebody waits for `when_gone`."""
        return self._growth.clearing

    # ── the loop ─────────────────────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        """Call back whoever has something to hear, and go on with what is to do."""
        self._pool.finish_jobs()
        if self._recovery_logged:
            return
        self.recovery.go_on()
        if self.recovery.done:
            self._recovery_logged = True
            self._on_recovered()
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
        assert self._writing.num_bytes >= sum(block.length for block in self._index.writing())

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _ask_for(self, namespace: str, keys: Sequence[bytes]) -> None:
        unverified = self._index.unverified.get(namespace, {})
        asked = [unverified[key] for key in keys if key in unverified]
        for block in asked:
            self.recovery.ask(block)
        if asked:
            self._pool.wake()
