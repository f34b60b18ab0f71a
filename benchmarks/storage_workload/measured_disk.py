"""The server's disk tier on a real directory, with a watch beside each call into the device.

What is measured is the tier itself. The watch sits where files are read and written, knows which
slots a call covered, and so says of any block how long the device had it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from remote_server.store.disk.files import File, Files, View, Written
from remote_server.store.disk.folder import (
    FoundSegment,
    TakenFolder,
    find_segments,
    segment_name,
)
from remote_server.store.disk.layout import PAGE, slot_bytes_for
from remote_server.store.disk.pool import Pool, ThreadPool
from remote_server.store.disk.reading import OnRead
from remote_server.store.disk.segments import DiskBlock
from remote_server.store.disk.tier import DiskTier
from remote_server.store.disk.writing import OnWritten


class Interval(NamedTuple):
    """When a call into the device was under way."""

    began: float
    ended: float


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of them was under way: what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        if ended > reached:
            total += ended - max(began, reached)
            reached = ended
    return total


class Calls:
    """The last call that read, and the last that wrote, each slot of each segment."""

    def __init__(self, slot_bytes: int) -> None:
        """All slots are of this size: there is one namespace."""
        self.num_bytes = {"read": 0, "write": 0}
        self.num_calls = {"read": 0, "write": 0}
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str, int], Interval] = {}

    def add(self, kind: str, name: str, offset: int, num_bytes: int, interval: Interval) -> None:
        """On any thread."""
        first, last = offset - PAGE, offset + num_bytes - 1 - PAGE
        slots = range(max(0, first // self._slot_bytes), last // self._slot_bytes + 1)
        with self._lock:
            self.num_bytes[kind] += num_bytes
            self.num_calls[kind] += 1
            for slot in slots:
                self._last[kind, name, slot] = interval

    def of(self, kind: str, block: DiskBlock) -> Interval:
        """The one that has just moved `block`. One that took no time where none did, as when a
        segment could not be made."""
        name = segment_name(block.segment.number)
        with self._lock:
            return self._last.get((kind, name, block.slot), Interval(0.0, 0.0))


class _WatchedFile:
    """Calls of several threads are added without a lock: each adds to places of its own."""

    def __init__(self, file: File, name: str, calls: Calls) -> None:
        self._file = file
        self._name = name
        self._calls = calls
        self.direct = file.direct

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        began = time.monotonic()
        self._file.read(views, offset)
        self._add("read", offset, views, began)

    def write(self, views: Sequence[View], offset: int) -> None:
        began = time.monotonic()
        self._file.write(views, offset)
        self._add("write", offset, views, began)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _add(self, kind: str, offset: int, views: Sequence[View], began: float) -> None:
        num_bytes = sum(memoryview(view).nbytes for view in views)
        interval = Interval(began, time.monotonic())
        self._calls.add(kind, self._name, offset, num_bytes, interval)


class _WatchedFiles:
    """Hands out watched files. A segment is made under another name and renamed at once."""

    def __init__(self, files: Files, calls: Calls) -> None:
        self._files = files
        self._calls = calls

    def names(self) -> list[str]:
        return self._files.names()

    def create(self, name: str, num_bytes: int) -> File:
        file = self._files.create(name, num_bytes)
        return _WatchedFile(file, name.removesuffix(".new"), self._calls)

    def open(self, name: str) -> tuple[File, int]:
        file, num_bytes = self._files.open(name)
        return _WatchedFile(file, name, self._calls), num_bytes

    def rename(self, old: str, new: str) -> None:
        self._files.rename(old, new)

    def remove(self, name: str) -> None:
        self._files.remove(name)

    def sync(self) -> None:
        self._files.sync()


class MeasuredDiskTier(DiskTier):
    """Tells of each write and each read when it began and ended, on the thread that owns it."""

    calls: Calls
    on_write: Callable[[Sequence[DiskBlock]], None]
    """Handed over; they will be written soon."""

    on_written: Callable[[Sequence[DiskBlock], Sequence[Written]], None]

    def __init__(
        self, files: Files, found: Sequence[FoundSegment], pool: Pool, budget: int
    ) -> None:
        super().__init__(files, found, pool, budget)
        self.read_during: dict[bytes, Interval] = {}
        """By key, of what was read and that nobody has taken out yet."""

    def write(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        self.on_write(blocks)

        def finish(results: list[Written]) -> None:
            on_written(results)
            self.on_written(blocks, results)

        super().write(blocks, views, finish)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead
    ) -> None:
        def finish(results: list[bool]) -> None:
            for block in blocks:
                self.read_during[block.key] = self.calls.of("read", block)
            on_read(results)

        super().read(blocks, views, finish)


class MeasuredDisk:
    """`budget` bytes in `path`, which is empty. Raises `ConfigError` when it cannot be."""

    def __init__(self, path: Path, budget: int, block_bytes: int, wake: Callable[[], None]) -> None:
        """For one namespace, whose blocks have at most `block_bytes`."""
        self.calls = Calls(slot_bytes_for(block_bytes))
        self._folder = TakenFolder(path)
        try:
            self.direct = self._folder.files.direct
            files = _WatchedFiles(self._folder.files, self.calls)
            found = find_segments(files, str(path))
        except BaseException:
            self._folder.release()
            raise
        self._pool = ThreadPool(wake)
        self.tier = MeasuredDiskTier(files, found, self._pool, budget)
        self.tier.calls = self.calls

    def close(self) -> None:
        """Let the jobs at hand end, and free the directory."""
        self.tier.recovery.stop()
        self._pool.stop()
        self.tier.close()
        self._folder.release()
