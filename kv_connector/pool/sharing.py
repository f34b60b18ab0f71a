"""Proof that all processes of an engine share one pool: marks of its workers, and its file.

Each worker leaves a mark in the pool that it has mapped. The scheduler looks for the marks in its
own pool before any row is in use, and compares the file in each report of a worker later.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kv_connector.pool.pool_file import UNEQUAL_PARTS
from remote_server.errors import ConfigError

MARK_BYTES = 64

_MAGIC = b"kvferry1"
# Magic, digest of the engine's name, rank, rows, row stride, the part's start and size in bytes.
_MARK = struct.Struct("<8s16sIIQQQ8x")


class PoolFile(NamedTuple):
    """Identity of a pool's file. Two processes with equal values share its memory."""

    device: int
    inode: int
    size: int


class Place(NamedTuple):
    """Position of a worker's part in each row, in bytes."""

    rank: int
    num_rows: int
    stride: int
    """Bytes from the start of a row to the start of the next."""
    start: int
    """Offset of the part in the row."""
    num_bytes: int

    @property
    def mark_at(self) -> int:
        """Offset of this worker's mark: its slot behind the middle of the pool, where it is found
        however this worker lays out the rows."""
        return self.num_rows * self.stride // 2 + self.rank * MARK_BYTES


def pool_file_of(fd: int) -> PoolFile:
    """The file of an open descriptor."""
    status = os.fstat(fd)
    return PoolFile(status.st_dev, status.st_ino, status.st_size)


def leave_mark(pool: memoryview, place: Place, engine: str) -> None:
    """Write this worker's mark to `pool`, all of it as bytes, before any row is in use. Raises
    `ConfigError` if this worker has left one: its engine has two connectors of kvferry."""
    if _owner(pool[_slot(place)]) == _owner(_mark(place, engine)):
        raise ConfigError(
            f"worker {place.rank} uses this CPU pool already: an engine can have one connector of "
            "kvferry, and this one has two; remove one"
        )
    pool[_slot(place)] = _mark(place, engine)


def take_marks(pool: memoryview, places: Sequence[Place], engine: str) -> None:
    """Check the mark of every worker, then zero the marks: an unused row holds zeros. Raises
    `ConfigError` with the workers whose marks are missing or differ."""
    marks = [bytes(pool[_slot(place)]) for place in places]
    for place in places:
        pool[_slot(place)] = bytes(MARK_BYTES)
    absent, unequal = [], []
    for place, mark in zip(places, marks, strict=True):
        if _owner(mark) != _owner(_mark(place, engine)):
            absent.append(f"worker {place.rank} {_whose(mark)}")
        elif mark != _mark(place, engine):
            unequal.append(f"worker {place.rank} {_layout(mark, place)}")
    if absent:
        raise ConfigError(
            f"the scheduler's CPU pool is not the one that its workers use: {'; '.join(absent)}. "
            "Scheduler and workers must run on one host, the workers as children of the engine "
            "core"
        )
    if unequal:
        raise ConfigError(f"{'; '.join(unequal)}: {UNEQUAL_PARTS}")


def _slot(place: Place) -> slice:
    return slice(place.mark_at, place.mark_at + MARK_BYTES)


def _mark(place: Place, engine: str) -> bytes:
    name = hashlib.blake2b(engine.encode(), digest_size=16).digest()
    return _MARK.pack(
        _MAGIC, name, place.rank, place.num_rows, place.stride, place.start, place.num_bytes
    )


def _owner(mark: bytes | memoryview) -> tuple[bytes, bytes, int]:
    magic, name, rank, *_ = _MARK.unpack(mark)
    return magic, name, rank


def _whose(mark: bytes) -> str:
    magic, _, rank = _owner(mark)
    if magic != _MAGIC:
        return "left no mark in it"
    return f"has the mark of worker {rank} of another engine"


def _layout(mark: bytes, expected: Place) -> str:
    *_, num_rows, stride, start, num_bytes = _MARK.unpack(mark)
    return (
        f"has {num_bytes} bytes from {start} of each of {num_rows} rows, {stride} bytes apart, "
        f"where the scheduler expects {expected.num_bytes} from {expected.start} of "
        f"{expected.num_rows} rows, {expected.stride} bytes apart"
    )


class PoolNotShared(RuntimeError):
    """A worker and the scheduler use different pools."""


def check_pool_of(rank: int, pool: PoolFile | None, pool_fd: int) -> None:
    """Raise `PoolNotShared`, which ends the engine, if a worker has mapped another pool than the
    scheduler's since the marks were checked at start: it would load other bytes than were stored.
    """
    if pool is not None and pool != (ours := pool_file_of(pool_fd)):
        raise PoolNotShared(f"worker {rank} uses the CPU pool {pool}, the scheduler {ours}")
