"""Blocks in one preallocated file, moved by a few threads, through the page cache or past it."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.files import require_all
from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.transfer import Range
from benchmarks.kvbench.ways import Rows, blocks_per_request
from remote_server.store.disk.files import Folder
from remote_server.store.io_threads import NUM_THREADS


@dataclass
class FileRequest:
    """A move of blocks at `places`, from or into `rows`."""

    places: Range
    rows: Sequence[memoryview]
    is_write: bool
    futures: list[Future[None]] = field(default_factory=list)


class OneFile:
    """One file, moved by as many threads as the disk tier has, a call for each block.

    A write ends when the kernel (page cache) or the device (O_DIRECT) has the bytes. O_DIRECT moves
    whole pages, so the rest of a block's last page is included. Neither waits for a flush.
    """

    def __init__(self, folder: Path, rows: Rows, *, direct: bool) -> None:
        """Allocates the space. Raises `Skipped` without O_DIRECT."""
        if direct and not Folder(folder).direct:
            raise Skipped(f"the file system of {folder} does not offer O_DIRECT")
        self.blocks_per_request = blocks_per_request(rows.block_bytes)
        self.path = folder / ("direct" if direct else "buffered")
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._fd = os.open(self.path, flags, 0o600)
        self._stride = rows.padded_source.shape[1]
        os.posix_fallocate(self._fd, 0, len(rows) * self._stride)
        if direct:
            self._source = [memoryview(row) for row in rows.padded_source]
            self._target = [memoryview(row) for row in rows.padded_target]
        else:
            self._source, self._target = rows.source, rows.target
        self._threads = ThreadPoolExecutor(NUM_THREADS)

    def prepare_write(self, places: Range) -> FileRequest:
        return FileRequest(places, self._source[places.start : places.stop], is_write=True)

    def prepare_read(self, places: Range) -> FileRequest:
        return FileRequest(places, self._target[places.start : places.stop], is_write=False)

    def post(self, request: FileRequest) -> None:
        move = self._write if request.is_write else self._read
        request.futures = [
            self._threads.submit(move, place, row)
            for place, row in zip(request.places, request.rows, strict=True)
        ]

    def wait(self, request: FileRequest) -> None:
        for future in request.futures:
            future.result()

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self.path.unlink()

    def _write(self, place: int, row: memoryview) -> None:
        require_all(os.pwrite(self._fd, row, place * self._stride), row.nbytes)

    def _read(self, place: int, row: memoryview) -> None:
        require_all(os.preadv(self._fd, [row], place * self._stride), row.nbytes)
