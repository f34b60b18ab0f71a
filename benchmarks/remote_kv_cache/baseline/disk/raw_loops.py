"""Raw loops over one file: the bounds of every other way to a disk and back."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness.files import require_all
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.disk.ways import Blocks, aligned
from remote_server.native.job import Job, Kind
from remote_server.native.mover import run
from remote_server.store.disk.files import Folder


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
