"""The server's disk tier on a real directory, with every device call timed.

The measured object is the tier itself. The timer wraps the reads and writes of files, knows which
slots a call covered, and so reports the device time of each block.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from math import inf
from operator import add
from pathlib import Path

from benchmarks.storage_workload.backends.host.device_times import Calls, Interval, ReadTimes
from remote_server.errors import ConfigError
from remote_server.native.job import Kind
from remote_server.store.disk.directory import TakenFolder
from remote_server.store.disk.files import File, Files, Moved
from remote_server.store.disk.layout import slot_bytes_for
from remote_server.store.disk.segments import (
    OVERHEAD_BYTES,
    DiskBlock,
    largest_block,
    segment_bytes_for,
)
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.io_threads import Pool, ThreadPool
from remote_server.store.pages import PAGE
from remote_server.store.tier import Offered, OnRead, OnWritten, Written
from remote_server.values import format_bytes

# The number of segments of a small budget.
MIN_SEGMENTS = 16


class _WatchedFile:
    """A file whose calls are recorded, on any thread."""

    def __init__(self, file: File, name: str, calls: Calls) -> None:
        self._file = file
        self._name = name
        self._calls = calls
        self.direct = file.direct
        self.sync, self.resize, self.close = file.sync, file.resize, file.close

    def move(
        self,
        kind: Kind,
        addresses: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> Moved:
        began = time.monotonic()
        moved = self._file.move(kind, addresses, offsets, lengths, seeds)
        interval = Interval(began, time.monotonic())
        num_bytes = max(map(add, offsets, lengths)) - min(offsets)
        self._calls.add(kind.name.lower(), self._name, min(offsets), num_bytes, interval)
        return moved


class _WatchedFiles:
    """Opens recorded files. A segment is made under another name and renamed at once."""

    def __init__(self, files: Files, calls: Calls) -> None:
        self._files = files
        self._calls = calls
        self.names, self.rename = files.names, files.rename
        self.remove, self.sync = files.remove, files.sync

    def create(self, name: str, num_bytes: int) -> File:
        file = self._files.create(name, num_bytes)
        return _WatchedFile(file, name.removesuffix(".new"), self._calls)

    def open(self, name: str) -> tuple[File, int]:
        file, num_bytes = self._files.open(name)
        return _WatchedFile(file, name, self._calls), num_bytes


class MeasuredDiskTier(DiskTier):
    """Reports each block's result and its device interval, on the owner's thread."""

    on_write: Callable[[Sequence[DiskBlock]], None]
    """Called with blocks submitted for writing."""

    on_written: Callable[[Sequence[DiskBlock], Sequence[Written]], None]

    on_declined: Callable[[Sequence[bytes]], None]
    """Called with blocks not submitted. The owner sets all three before the first write."""

    def __init__(self, files: Files, pool: Pool, budget: int, calls: Calls) -> None:
        super().__init__(files, [], pool, DiskSettings(budget))
        self.reads = ReadTimes()
        self._calls = calls

    def begin_puts(self, offered: Offered[int], block_bytes: int) -> list[DiskBlock]:
        blocks = super().begin_puts(offered, block_bytes)
        if len(blocks) < len(offered.keys):
            self.on_declined(offered.keys[len(blocks) :])
        return blocks

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        self.on_write(blocks)

        def finish(results: list[Written]) -> None:
            on_written(results)
            self.on_written(blocks, results)

        super().write(blocks, views, finish)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead,
        deadline: float = inf,
    ) -> None:  # fmt: skip
        def finish(results: list[bool]) -> None:
            for block in blocks:
                self.reads.note(block.key, self._calls.of("read", block))
            on_read(results)

        super().read(blocks, views, finish, deadline)


class MeasuredDisk:
    """`budget` bytes in `path`, which is empty. Raises `ConfigError` when that is impossible."""

    def __init__(self, path: Path, budget: int, block_bytes: int, wake: Callable[[], None]) -> None:
        """For one namespace with blocks of at most `block_bytes`. `wake` is called on any thread
        when `tier.finish_jobs` has work."""
        _check_budget(path, budget, block_bytes)
        self.calls = Calls(slot_bytes_for(block_bytes))
        self._folder = TakenFolder(path)
        self.direct = self._folder.files.direct
        self._pool = ThreadPool(wake)
        files = _WatchedFiles(self._folder.files, self.calls)
        self.tier = MeasuredDiskTier(files, self._pool, budget, self.calls)

    def close(self) -> None:
        """Wait for the present jobs, and free the directory."""
        self.tier.recovery.stop()
        self._pool.stop()
        self.tier.close()
        self._folder.release()


def _check_budget(path: Path, budget: int, block_bytes: int) -> None:
    """Checked at start: otherwise the disk would decline every block, and a run measure nothing."""
    if largest_block(segment_bytes_for(budget)) < block_bytes:
        enough = OVERHEAD_BYTES + MIN_SEGMENTS * (PAGE + slot_bytes_for(block_bytes))
        raise ConfigError(
            f"storage_capacity_gb: {format_bytes(budget)} are too few for blocks of "
            f"{format_bytes(block_bytes)}: {format_bytes(enough)} would be enough"
        )
    free = shutil.disk_usage(path).free
    if budget > free:
        raise ConfigError(
            f"storage_capacity_gb: {format_bytes(budget)} asked, but the file system of {path} "
            f"has only {format_bytes(free)} for it"
        )
