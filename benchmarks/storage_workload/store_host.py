"""The server's store in this process: memory above disk, on the one thread that it wants.

The event loop hands over reads and writes and is told when they are done. Each is cut into pieces;
between two pieces the thread finishes what the disk has done and gives others their turn, as the
server does. A write fills the slots that the store reserved and hashes what is there; a read
copies each block into a row, as a client would have it, and hashes it there.

Without a memory tier (`memory` of 0) a little memory is left for what is on its way: a write is
answered when its blocks are on disk, and no block stays above longer than somebody needs it.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.storage_workload.backend import Behind, Occupancy, Part, ReadDone, WriteDone
from benchmarks.storage_workload.entries import Blocks
from benchmarks.storage_workload.measured_disk import Interval, MeasuredDisk, covered
from benchmarks.storage_workload.payload import Payload
from remote_server import protocol
from remote_server.config import MiB, check_memory_fits
from remote_server.errors import ConfigError
from remote_server.protocol import KeyState, PutOutcome
from remote_server.store.arena import Arena
from remote_server.store.disk.files import Written
from remote_server.store.disk.segments import DiskBlock
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block, memory_for_block
from remote_server.store.store import NamespaceInfo, Pinned, Store

NAMESPACE = "storage-workload"

# What one read or write may hold of memory at a time, and what it does before others have a turn.
WINDOW_BYTES = 32 * MiB
TURN_BYTES = 8 * MiB

# Rows that reads land in. Larger than the CPU's caches, so that a copy costs what it costs.
ROWS_BYTES = 64 * MiB

# Of memory, what reads and writes may hold at a time: the rest can always be evicted for them.
SHARE_HELD = 2

STAGING_BYTES = 256 * MiB

Turn = Generator[bool, None, None]
"""One read or write: yields whether it can go on at once."""

T = TypeVar("T")


class Put:
    """One write: what became of its blocks, and what of them is on disk."""

    def __init__(self) -> None:
        self.outcomes: Counter[int] = Counter()
        self.filled_bytes = 0
        self.left: set[bytes] = set()
        """Keys that are not on disk yet."""

        self.is_whole = False
        """All of its blocks have been handed over."""

        self.disk_blocks = 0
        self.disk_bytes = 0
        self.began: float | None = None
        """When the first of them was handed to the disk."""

        self.ended = 0.0
        self.during: list[Interval] = []

    def on_disk(self) -> Part:
        total_s = self.ended - self.began if self.began is not None else 0.0
        return Part("disk", self.disk_blocks, self.disk_bytes, total_s, covered(self.during))


class StoreHost:
    """A `Backend`. `with` starts the thread and ends it; the store is gone after that."""

    def __init__(
        self, block_bytes: int, memory: int, disk: int, folder: Path | None, payload: Payload
    ) -> None:
        """`memory` and `disk` in bytes, 0 for none; `folder` is for the disk, empty, and stays
        the caller's. Raises `ConfigError`."""
        if not memory and not disk:
            raise ConfigError("cpu_mem_gb: 0 without a disk leaves nowhere to store anything")
        self.has_memory = memory > 0
        self.block_bytes = block_bytes
        self.memory = memory or max(STAGING_BYTES, 2 * memory_for_block(block_bytes))
        if self.memory < memory_for_block(block_bytes):
            raise ConfigError(
                f"cpu_mem_gb: {self.memory} bytes are too few for blocks of {block_bytes}: "
                f"{memory_for_block(block_bytes)} would be enough"
            )
        check_memory_fits(self.memory, setting="cpu_mem_gb")
        self._payload = payload
        self._wake_up = threading.Event()
        self._arena = Arena(self.memory)
        self.disk: MeasuredDisk | None = None
        try:
            if disk and folder is not None:
                self.disk = MeasuredDisk(folder, disk, block_bytes, self._wake_up.set)
        except BaseException:
            self._arena.close()
            raise
        tier = self.disk.tier if self.disk is not None else None
        if tier is not None:
            tier.on_write = self._handed_over
            tier.on_written = self._written
        self._tier = MemoryTier(self._arena)
        self.store = Store(self._tier, disk=tier)
        self.store.declare(NAMESPACE, NamespaceInfo(block_bytes=block_bytes))
        self._rows = np.zeros((max(2, ROWS_BYTES // block_bytes), block_bytes), np.uint8)
        self._next_row = 0
        self._window = max(1, min(WINDOW_BYTES, self.memory // 8) // block_bytes)
        self._held = 0
        self._may_hold = max(self._window * block_bytes, self.memory // SHARE_HELD)
        self.own: Counter[str] = Counter(corrupt=0, staged_out=0)
        self._to_disk: dict[bytes, Put] = {}
        self._behind: deque[Behind] = deque()
        self._inbox: deque[Turn] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def __enter__(self) -> "StoreHost":
        self._arena.populate()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._wake_up.set()
        self._thread.join()
        if self.disk is not None:
            self.disk.close()
        self._arena.close()

    # ── the event loop's side ────────────────────────────────────────────────────────────

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("memory",) if self.disk is None else ("memory", "disk")

    async def read(self, blocks: Blocks) -> ReadDone:
        return await self._submit(lambda end: self._read(blocks, end))

    async def write(self, blocks: Blocks) -> WriteDone:
        return await self._submit(lambda end: self._write(blocks, end))

    async def occupancy(self) -> Mapping[str, Occupancy]:
        return await self.call(
            lambda: {
                name: Occupancy(stats.budget_bytes, stats.used_bytes, stats.blocks)
                for name, stats in self.store.tier_stats().items()
            }
        )

    async def counters(self) -> Mapping[str, int]:
        return await self.call(lambda: {**self.store.all_counters(), **self.own})

    async def settle(self) -> None:
        waterfall = self.store.waterfall
        while waterfall is not None and await self.call(lambda: waterfall.busy):
            await asyncio.sleep(0.01)
        await self.call(self._give_up_late)

    async def call(self, ask: Callable[[], T]) -> T:
        """The answer of `ask`, which runs on the store's thread."""

        def turn(end: Callable[[T], None]) -> Turn:
            end(ask())
            yield False

        return await self._submit(turn)

    def take_behind(self) -> list[Behind]:
        return [self._behind.popleft() for _ in range(len(self._behind))]

    async def _submit(self, make: Callable[[Callable[[T], None]], Turn]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(result: T) -> None:
            loop.call_soon_threadsafe(_set, future, result)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(_fail, future, error)

        self._inbox.append(_guarded(make(end), fail))
        self._wake_up.set()
        return await future

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        ready: deque[Turn] = deque()
        parked: deque[Turn] = deque()
        while not self._stopping:
            if not ready:
                self._wake_up.wait()
            if self._wake_up.is_set():
                self._wake_up.clear()
                if self.store.waterfall is not None:
                    self.store.waterfall.finish_jobs()
                while parked:
                    ready.append(parked.popleft())
            while self._inbox:
                ready.append(self._inbox.popleft())
            for _ in range(len(ready)):
                turn = ready.popleft()
                try:
                    can_go_on = next(turn)
                except StopIteration:
                    self._wake_up.set()  # what it held is free for those that are parked
                else:
                    (ready if can_go_on else parked).append(turn)

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def _write(self, blocks: Blocks, end: Callable[[WriteDone], None]) -> Turn:
        submitted = _now()
        yield True
        began = _now()
        put = Put()
        for first in range(0, len(blocks.keys), self._window):
            window = blocks.part(first, first + self._window)
            yield from self._hold(window.num_bytes)
            try:
                yield from self._write_window(window, put)
            finally:
                self._held -= window.num_bytes
        total_s = _now() - began
        put.is_whole = True
        self._tell_if_done(put)
        created, declined = (
            put.outcomes[outcome] for outcome in (PutOutcome.CREATED, PutOutcome.DECLINED)
        )
        existed = put.outcomes[PutOutcome.EXISTED] + put.outcomes[PutOutcome.DUPLICATE]
        parts: list[Part] = []
        if created and self.has_memory:
            parts.append(Part("memory", created, put.filled_bytes, total_s, 0.0))
        elif created:
            parts.append(put.on_disk()._replace(total_s=total_s))
            declined += created - put.disk_blocks
            created = put.disk_blocks
        end(WriteDone(created, existed, declined, tuple(parts), began - submitted))

    def _write_window(self, window: Blocks, put: Put) -> Turn:
        reserved = self.store.begin_put(
            NAMESPACE, window.keys, window.lengths, [None] * len(window.keys),
            force=False, draining=False,
        )  # fmt: skip
        filled = 0
        for block in reserved.blocks:
            view = self._tier.view(block)
            self._payload.fill(view, block.key)
            block.checksum = protocol.checksum(NAMESPACE, block.key, view)
            put.filled_bytes += block.length
            filled += block.length
            if filled >= TURN_BYTES:
                filled = 0
                yield True
        keys = [block.key for block in reserved.blocks]
        if self.disk is not None:
            self._expect_on_disk(keys, put)
        self.store.end_put(reserved, [True] * len(keys))
        put.outcomes.update(reserved.outcomes)
        if not self.has_memory:
            yield from self._until_on_disk(keys, put)

    def _expect_on_disk(self, keys: list[bytes], put: Put) -> None:
        """What an earlier put still waits for, and is put again, will not come for that one."""
        for key in keys:
            before = self._to_disk.get(key)
            if before is not None:
                before.left.discard(key)
                self._tell_if_done(before)
        put.left.update(keys)
        self._to_disk.update(dict.fromkeys(keys, put))

    def _until_on_disk(self, keys: list[bytes], put: Put) -> Turn:
        """Or declined there. Kept in memory until then, and no longer."""
        waterfall = self.store.waterfall
        assert waterfall is not None
        pinned = [block for block in self._tier.pin_all(NAMESPACE, keys) if block is not None]
        while not put.left.isdisjoint(keys) and waterfall.busy:
            yield False
        for key in put.left.intersection(keys):
            put.left.remove(key)
            del self._to_disk[key]
        self._tier.unpin_all(pinned)
        self._let_go(keys)

    def _handed_over(self, blocks: Sequence[DiskBlock]) -> None:
        began = _now()
        for block in blocks:
            put = self._to_disk.get(block.key)
            if put is not None and put.began is None:
                put.began = began

    def _written(self, blocks: Sequence[DiskBlock], results: Sequence[Written]) -> None:
        assert self.disk is not None
        ended = _now()
        for block, result in zip(blocks, results, strict=True):
            put = self._to_disk.pop(block.key, None)
            if put is None:
                continue
            put.left.discard(block.key)
            if result is Written.OK:
                put.disk_blocks += 1
                put.disk_bytes += block.length
                put.during.append(self.disk.calls.of("write", block))
                put.ended = ended
            self._tell_if_done(put)

    def _tell_if_done(self, put: Put) -> None:
        if put.is_whole and not put.left and self.has_memory:
            self._tell_behind(put)

    def _tell_behind(self, put: Put) -> None:
        if put.disk_blocks:
            self._behind.append(Behind(put.ended, put.on_disk()))

    def _give_up_late(self) -> None:
        """Nothing is on its way any more: what is not on disk never will be."""
        late = set(self._to_disk.values())
        self._to_disk.clear()
        for put in late:
            self._tell_behind(put)

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def _read(self, blocks: Blocks, end: Callable[[ReadDone], None]) -> Turn:
        submitted = _now()
        yield True
        began = _now()
        prefix = self.store.lookup(NAMESPACE, blocks.keys).prefix
        spans = {"memory": _Span(), "disk": _Span()}
        good = 0
        for first in range(0, prefix, self._window):
            window = blocks.part(first, min(prefix, first + self._window))
            yield from self._hold(window.num_bytes)
            try:
                read = yield from self._read_window(window, spans)
            finally:
                self._held -= window.num_bytes
            good += read
            if read < len(window.keys):
                break
        parts = []
        for tier, span in spans.items():
            if span.blocks:
                # What came from memory alone took the whole time; beside a disk, its copies.
                alone = tier == "memory" and not spans["disk"].blocks
                total_s = _now() - began if alone else span.total_s
                parts.append(Part(tier, span.blocks, span.num_bytes, total_s, covered(span.during)))
        end(ReadDone(good, tuple(parts), began - submitted))

    def _read_window(
        self, window: Blocks, spans: Mapping[str, "_Span"]
    ) -> Generator[bool, None, int]:
        here = self._tier.lookup_all(NAMESPACE, window.keys)
        began = _now()
        found: list[Pinned] = []
        self.store.fetch(NAMESPACE, window.keys, found.append)
        while not found:
            yield False
        pinned = found[0]
        during = self.disk.tier.read_during if self.disk is not None else {}
        fetched = _now()
        from_disk = [here[index] != KeyState.READABLE for index in pinned.indices]
        if any(from_disk):
            spans["disk"].total_s += fetched - began
        good = copied = 0
        complete = True
        for place, (index, block) in enumerate(zip(pinned.indices, pinned.blocks, strict=True)):
            started = _now()
            tier = "disk" if from_disk[place] else "memory"
            span = spans[tier]
            if interval := during.pop(block.key, None):
                span.during.append(interval)
            complete &= index == good and self._copy(block)
            good += complete
            span.blocks += 1
            span.num_bytes += block.length
            self._tier.unpin(block)
            span.total_s += _now() - started
            copied += block.length
            if copied >= TURN_BYTES:
                copied = 0
                yield True
        if not self.has_memory:
            self._let_go([block.key for block in pinned.blocks])
        return good

    def _copy(self, block: Block) -> bool:
        """Into the next row, as a client has it. Whether the bytes there are the block's."""
        row = self._rows[self._next_row, : block.length]
        self._next_row = (self._next_row + 1) % len(self._rows)
        np.copyto(row, np.frombuffer(self._tier.view(block), np.uint8))
        if protocol.checksum(NAMESPACE, block.key, row.data) == block.checksum:
            return True
        self.own["corrupt"] += 1
        return False

    # ── memory ───────────────────────────────────────────────────────────────────────────

    def _hold(self, num_bytes: int) -> Turn:
        """Wait until so much of memory may be held at a time."""
        while self._held and self._held + num_bytes > self._may_hold:
            yield False
        self._held += num_bytes

    def _let_go(self, keys: Iterable[bytes]) -> None:
        """There is no memory tier: what is on disk, and nobody uses now, leaves."""
        keys = [*keys]
        assert self.disk is not None
        on_disk = self.disk.tier.lookup_all(NAMESPACE, keys)
        for block, state in zip(self._tier.pin_all(NAMESPACE, keys), on_disk, strict=True):
            if block is not None:
                self._tier.unpin(block)
                if state == KeyState.READABLE:
                    self.own["staged_out"] += self._tier.remove(block)


class _Span:
    """What one tier did of one read."""

    def __init__(self) -> None:
        self.blocks = 0
        self.num_bytes = 0
        self.total_s = 0.0
        self.during: list[Interval] = []


def _now() -> float:
    """The clock of the event loop."""
    return time.monotonic()


def _guarded(turn: Turn, fail: Callable[[BaseException], None]) -> Turn:
    """`turn`; what it raises is its caller's, and not the end of the thread."""
    try:
        yield from turn
    except Exception as error:
        fail(error)


def _set(future: "asyncio.Future[T]", result: T) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # its waiter was cancelled
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_exception(error)
