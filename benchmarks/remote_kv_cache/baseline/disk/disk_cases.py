"""Blocks to a disk and back, by the disk tier and by its alternatives.

Each way is an object with `write` and `read`, which move all blocks, and `make_cold`, which drops
all blocks from the page cache. `write` returns after the bytes are handed to the device: the tier
and the raw loop bypass the page cache, the others end with a sync. None flushes the device's own
cache.
"""

import mmap
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.harness.files import drop_from_cache, require_all
from benchmarks.harness.runner import Skipped
from remote_server import protocol
from remote_server.native.job import Job, Kind
from remote_server.native.mover import run
from remote_server.store.disk.files import Folder
from remote_server.store.disk.layout import PAGE, slot_bytes_for
from remote_server.store.disk.pool import NUM_THREADS, ThreadPool
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.disk.tier import DiskTier
from remote_server.store.tier import Written
from remote_server.values import MiB

Blocks = npt.NDArray[np.uint8]

# Bytes of blocks requested at once, as in a client's window.
WINDOW_BYTES = 32 * MiB

NAMESPACE = "benchmark"


class DiskWay(Protocol):
    """One way to keep blocks on disk. `blocks` is one array of (blocks, bytes), page-aligned."""

    def write(self, blocks: Blocks) -> None: ...

    def make_cold(self) -> None: ...

    def read(self, blocks: Blocks) -> None: ...

    def close(self) -> None: ...


def aligned(num_blocks: int, block_bytes: int) -> Blocks:
    """Page-aligned memory, every page touched."""
    flat = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8)
    flat.fill(1)
    return flat.reshape(num_blocks, block_bytes)


class RawLoop:
    """Positioned reads and writes of whole blocks in one preallocated file: the upper bound."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int, threads: int) -> None:
        if not Folder(folder).direct:
            raise Skipped(f"the file system of {folder} does not offer O_DIRECT")
        self._path = folder / self.file_name(threads)
        self._num_bytes = num_blocks * block_bytes
        self._fd = self._new_file()
        self._threads = ThreadPoolExecutor(threads) if threads > 1 else None

    @staticmethod
    def file_name(threads: int) -> str:
        return f"raw-{threads}"

    def renew(self) -> None:
        """Replace the file by a new one of the same name. A file system writes the first bytes of a
        place at down to half the speed of the next ones."""
        os.close(self._fd)
        self._path.unlink()
        self._fd = self._new_file()

    def _new_file(self) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, self._num_bytes)
        return fd

    def write(self, blocks: Blocks) -> None:
        self._each(partial(self._write_one, blocks), len(blocks))

    def make_cold(self) -> None:
        """Does nothing: the file is never in the page cache."""

    def read(self, blocks: Blocks) -> None:
        self._each(partial(self._read_one, blocks), len(blocks))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        os.close(self._fd)

    def _each(self, move: partial[None], count: int) -> None:
        if self._threads is not None:
            list(self._threads.map(move, range(count)))
            return
        for number in range(count):
            move(number)

    def _write_one(self, blocks: Blocks, number: int) -> None:
        require_all(os.pwrite(self._fd, blocks[number], number * blocks.shape[1]), blocks.shape[1])

    def _read_one(self, blocks: Blocks, number: int) -> None:
        require_all(
            os.preadv(self._fd, [blocks[number]], number * blocks.shape[1]), blocks.shape[1]
        )


class CopyingLoop(RawLoop):
    """The raw loop with the copy and the hash of each block that no server on the same host goes
    without: a client's rows are not where its blocks are kept."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int, threads: int) -> None:
        super().__init__(folder, num_blocks, block_bytes, threads)
        self._kept = aligned(num_blocks, block_bytes)

    @staticmethod
    def file_name(threads: int) -> str:
        return f"copying-{threads}"

    def _write_one(self, blocks: Blocks, number: int) -> None:
        _copy_and_hash(self._kept[number], blocks[number])
        super()._write_one(self._kept, number)

    def _read_one(self, blocks: Blocks, number: int) -> None:
        super()._read_one(self._kept, number)
        _copy_and_hash(blocks[number], self._kept[number])


def _copy_and_hash(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    run(Job(
        Kind.COPY, [target.ctypes.data], [source.ctypes.data], [target.nbytes], seeds=[0],
        stream=True,
    ))  # fmt: skip


class Tier:
    """The disk tier, driven as by a server. It is full: each round evicts the last one's blocks."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        slots = -(-num_blocks // 4)
        segment_bytes = PAGE + slots * slot_bytes_for(block_bytes)
        self._event = threading.Event()
        self._files = Folder(folder)
        self._pool = ThreadPool(self._event.set)
        budget = OVERHEAD_BYTES + 4 * segment_bytes
        self._tier = DiskTier(self._files, [], self._pool, budget, segment_bytes=segment_bytes)
        self._round = 0

    def write(self, blocks: Blocks) -> None:
        self._round += 1
        keys, done, begun = self._keys(len(blocks)), 0, 0
        sums: list[int] = []
        block_bytes = blocks.shape[1]
        window = max(1, WINDOW_BYTES // block_bytes // 2)

        def on_written(results: list[Written]) -> None:
            nonlocal done
            done += len(results)
            if set(results) != {Written.OK}:
                raise RuntimeError(f"not all blocks were written: {results}")

        while done < len(blocks):
            while begun < len(blocks):
                part = slice(begun, begun + window)
                # As in a server, which hashes a block while those before it are written.
                hashed = slice(len(sums), part.stop)
                here = [memoryview(block) for block in blocks[hashed]]
                sums += protocol.checksums(NAMESPACE, keys[hashed], here)
                lengths = [block_bytes] * len(keys[part])
                begins = self._tier.begin_puts(
                    NAMESPACE, keys[part], block_bytes, lengths, sums[part]
                )
                if not begins:
                    break
                views = [memoryview(blocks[begun + place]) for place in range(len(begins))]
                self._tier.write(begins, views, on_written)
                begun += len(begins)
            self._wait()

    def make_cold(self) -> None:
        """With O_DIRECT no block is in the page cache. Without it there is no cold read."""
        if not self._files.direct:
            raise Skipped("the file system does not offer O_DIRECT")

    def read(self, blocks: Blocks) -> None:
        keys, done, begun = self._keys(len(blocks)), 0, 0
        window = max(1, WINDOW_BYTES // blocks.shape[1] // 2)

        def on_read(results: list[bool]) -> None:
            nonlocal done
            done += len(results)
            if not all(results):
                raise RuntimeError("not all blocks could be read")

        while done < len(blocks):
            while begun < len(blocks) and begun - done < 2 * window:
                found = [
                    block
                    for block in self._tier.pin_all(NAMESPACE, keys[begun : begun + window])
                    if block is not None
                ]
                if not found:
                    raise RuntimeError("blocks are missing")
                views = [memoryview(blocks[begun + place]) for place in range(len(found))]
                self._tier.read(found, views, on_read)
                begun += len(found)
            self._wait()

    def close(self) -> None:
        self._pool.stop()
        self._tier.close()

    def _keys(self, count: int) -> list[bytes]:
        return [b"%d-%d" % (self._round, number) for number in range(count)]

    def _wait(self) -> None:
        self._event.wait()
        self._event.clear()
        self._tier.finish_jobs()


class FilePerBlock:
    """The simplest design, one file a block; through the page cache."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._paths = [folder / f"{number}.block" for number in range(num_blocks)]

    def write(self, blocks: Blocks) -> None:
        for path, block in zip(self._paths, blocks, strict=True):
            with open(path, "wb", buffering=0) as file:
                file.write(memoryview(block))
                os.fdatasync(file.fileno())

    def make_cold(self) -> None:
        for path in self._paths:
            drop_from_cache(path)

    def read(self, blocks: Blocks) -> None:
        for path, block in zip(self._paths, blocks, strict=True):
            with open(path, "rb", buffering=0) as file:
                require_all(file.readinto(memoryview(block)), blocks.shape[1])

    def close(self) -> None:
        """Does nothing: the folder is removed as a whole."""


class MappedFile:
    """One large file, mapped; the kernel decides when to read and write."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._path = folder / "mapped"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._shape = num_blocks, block_bytes
        os.posix_fallocate(self._fd, 0, num_blocks * block_bytes)
        self._map()

    def _map(self) -> None:
        self._mapped = mmap.mmap(self._fd, 0)
        self._rows = np.frombuffer(self._mapped, np.uint8).reshape(self._shape)

    def write(self, blocks: Blocks) -> None:
        for row, block in zip(self._rows, blocks, strict=True):
            np.copyto(row, block)
        self._mapped.flush()

    def make_cold(self) -> None:
        del self._rows  # mapped pages are not dropped
        self._mapped.close()
        drop_from_cache(self._path)
        self._map()

    def read(self, blocks: Blocks) -> None:
        for row, block in zip(self._rows, blocks, strict=True):
            np.copyto(block, row)

    def close(self) -> None:
        del self._rows
        self._mapped.close()
        os.close(self._fd)


class Sqlite:
    """An embedded database: one row a block, one transaction for all of them."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._path = folder / "blocks.sqlite"
        self._open()
        self._db.execute("CREATE TABLE blocks (key BLOB PRIMARY KEY, bytes BLOB) WITHOUT ROWID")

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        self._db.execute("PRAGMA page_size = 65536")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")

    def write(self, blocks: Blocks) -> None:
        self._db.execute("BEGIN")
        rows = ((b"%d" % number, memoryview(block)) for number, block in enumerate(blocks))
        self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def make_cold(self) -> None:
        self._db.close()
        drop_from_cache(self._path)
        self._open()

    def read(self, blocks: Blocks) -> None:
        for number, block in enumerate(blocks):
            query = "SELECT bytes FROM blocks WHERE key = ?"
            (found,) = self._db.execute(query, (b"%d" % number,)).fetchone()
            np.copyto(block, np.frombuffer(found, np.uint8))

    def close(self) -> None:
        self._db.close()


def open_ways(folder: Path, num_blocks: int, block_bytes: int) -> dict[str, DiskWay]:
    """Every way, each in a folder of its own below `folder`."""
    makers: dict[str, Callable[[Path, int, int], DiskWay]] = {
        "raw loop": partial(RawLoop, threads=1),
        f"raw loop, {NUM_THREADS} threads": partial(RawLoop, threads=NUM_THREADS),
        "disk tier": Tier,
        "file per block": FilePerBlock,
        "mmap": MappedFile,
        "sqlite": Sqlite,
    }
    ways: dict[str, DiskWay] = {}
    for name, maker in makers.items():
        own = folder / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        ways[name] = maker(own, num_blocks, block_bytes)
    return ways


def close_all(ways: Sequence[DiskWay]) -> None:
    for way in ways:
        way.close()
