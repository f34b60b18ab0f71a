"""The interface of a system, and memory and files as systems."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.harness.files import drop_from_cache, require_all
from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.kvbench.ways import Rows
from benchmarks.remote_kv_cache.work.blocks import SharedPool
from benchmarks.remote_kv_cache.work.ferry_client import key_of


class System(Protocol):
    """A store of blocks: writes rows of `rows.source`, reads each into its row of `rows.target`."""

    def clear(self) -> None:
        """Remove all blocks, before a write. Not timed."""

    def write(self) -> None:
        """Write all blocks. Returns when they are readable."""

    def read(self) -> None:
        """Read all blocks, as warm as after the write or an earlier read."""

    def make_cold(self) -> None:
        """Drop all blocks from memory before the next read. Not timed. Raises `Skipped` where that
        is impossible."""

    def close(self) -> None: ...


class Sizes(NamedTuple):
    """The contents of one system from all clients together."""

    block_bytes: int
    num_blocks: int
    folder: Path
    """A folder of this system alone, empty."""

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True)
class Host:
    """The running server of a system."""

    address: Any = None
    """Its address for clients in this process or another; can be pickled."""

    restart: Callable[[], Any] | None = None
    """Restarts it and returns the new address; only in the process that started it."""

    never_cold: str = "it keeps everything in memory"
    """The reason for no cold reads, when it cannot be restarted."""


class Share(NamedTuple):
    """One client's blocks: `first`, `first` + 1, … of all, in rows of its own."""

    rows: Rows
    pools: tuple[SharedPool, SharedPool]
    """The shared memory of the rows."""

    folder: Path
    """A folder of this client alone."""

    first: int = 0

    def block_keys(self) -> list[bytes]:
        return [key_of(self.first + place) for place in range(len(self.rows))]


@contextmanager
def nothing_to_serve(_: Sizes) -> Iterator[Host]:
    """The server of systems without a process."""
    yield Host()


def verify(rows: Rows) -> None:
    """Compare every byte. Raises `WrongBytes`."""
    for number, (source, target) in enumerate(zip(rows.source_pool, rows.target_pool, strict=True)):
        if not np.array_equal(source, target):
            raise WrongBytes(f"block {number} came back with other bytes")


class SharedMap:
    """A mapped file in shared memory, which other processes of this host could map too."""

    def __init__(self, _: Host, share: Share) -> None:
        self._rows = rows = share.rows
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

    def __init__(self, _: Host, share: Share, *, synced: bool) -> None:
        self._rows = share.rows
        self._synced = synced
        self._paths = [share.folder / f"{place}" for place in range(len(share.rows))]

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
