"""What every system has to do here, and the systems that are memory and files."""

import mmap
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.harness.files import drop_from_cache, require_all
from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.ways import Rows


class System(Protocol):
    """Keeps blocks: row `n` of `rows.source`, and gives it back into row `n` of `rows.target`."""

    def clear(self) -> None:
        """Before a write, and not timed: forget what there is."""

    def write(self) -> None:
        """All blocks. Ends when they could be read."""

    def read(self) -> None:
        """All blocks, as warm as the write or an earlier read left them."""

    def make_cold(self) -> None:
        """Not timed: let the next read find nothing in memory. Raises `Skipped` where there is no
        such thing."""

    def close(self) -> None: ...


class SharedMap:
    """A file in shared memory, mapped: what a process on this host could map as well."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._fd = os.memfd_create("kvferry-six-systems")
        os.ftruncate(self._fd, len(rows) * rows.block_bytes)
        self._map = mmap.mmap(self._fd, 0)
        self._kept = np.frombuffer(self._map, np.uint8).reshape(len(rows), rows.block_bytes)

    def clear(self) -> None:
        self._kept.fill(0)

    def write(self) -> None:
        for kept, source in zip(self._kept, self._rows.source_pool, strict=True):
            np.copyto(kept, source)

    def read(self) -> None:
        for kept, target in zip(self._kept, self._rows.target_pool, strict=True):
            np.copyto(target, kept)

    def make_cold(self) -> None:
        raise Skipped("memory is never cold")

    def close(self) -> None:
        self._kept = np.empty((0, 0), np.uint8)
        self._map.close()
        os.close(self._fd)


class FilePerBlock:
    """A file for each block, through the page cache; synced before the write ends, or not."""

    def __init__(self, folder: Path, rows: Rows, *, synced: bool) -> None:
        self._rows = rows
        self._synced = synced
        folder.mkdir()
        self._paths = [folder / f"{place}" for place in range(len(rows))]

    def clear(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def write(self) -> None:
        for path, row in zip(self._paths, self._rows.source, strict=True):
            with path.open("wb", buffering=0) as file:
                require_all(file.write(row), row.nbytes)
                if self._synced:
                    os.fsync(file.fileno())

    def read(self) -> None:
        for path, row in zip(self._paths, self._rows.target, strict=True):
            with path.open("rb", buffering=0) as file:
                require_all(file.readinto(row), row.nbytes)

    def make_cold(self) -> None:
        for path in self._paths:
            drop_from_cache(path)

    def close(self) -> None:
        self.clear()
