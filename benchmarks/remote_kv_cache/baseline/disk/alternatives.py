"""Blocks to a disk and back by files, by a mapped file and by a database."""

import mmap
import os
import sqlite3
from pathlib import Path

import numpy as np

from benchmarks.harness.files import drop_from_cache, require_all
from benchmarks.remote_kv_cache.baseline.disk.ways import Blocks


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
