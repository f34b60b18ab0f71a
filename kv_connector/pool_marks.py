"""Marks in the CPU pool: the proof that scheduler and workers map the same memory.

A worker that maps another file than the scheduler is not noticed otherwise: it copies blocks into
rows that the scheduler never sees, and the scheduler puts rows of zeros under right checksums. So
each worker leaves a mark in its part of one row, before any row is in use, and the scheduler
refuses to start where one is missing.

A mark says where its worker lays its part of a row as well. Workers that compute other sizes than
the scheduler, as pipeline stages with unequal layers do, would write into each other's parts.

The row is the middle one. The start-up canary borrows the first and the last rows while other
workers leave their marks.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from remote_server.errors import ConfigError

MARK_BYTES = 64

_MAGIC = b"kvferry1"
# Magic, digest of the engine's name, rank, rows, bytes from row to row, the part's start and size.
_MARK = struct.Struct("<8s16sIIQQQ8x")


class PoolFile(NamedTuple):
    """The file behind a pool. Two processes that name the same one share its memory."""

    device: int
    inode: int
    size: int


class Place(NamedTuple):
    """Where a worker lays its part of each row."""

    rank: int
    num_rows: int
    stride: int
    """Bytes from the start of a row to that of the next."""
    start: int
    """Of the part, in the row."""
    num_bytes: int
    is_shared: bool
    """Whether all workers have this part together."""

    @property
    def mark_at(self) -> int:
        """Where in the pool this worker's mark lies: at the start of its part, or in its slot of a
        part that is shared."""
        slot = self.rank * MARK_BYTES if self.is_shared else 0
        return self.num_rows // 2 * self.stride + self.start + slot


def pool_file_of(fd: int) -> PoolFile:
    """The file of an open descriptor."""
    status = os.fstat(fd)
    return PoolFile(status.st_dev, status.st_ino, status.st_size)


def leave_mark(pool: memoryview, place: Place, engine: str) -> None:
    """Before any row of `pool`, which is all of it as bytes, is in use."""
    pool[place.mark_at : place.mark_at + MARK_BYTES] = _mark(place, engine)


def take_marks(pool: memoryview, places: Sequence[Place], engine: str) -> None:
    """Check that every worker has left its mark, and remove the marks: a row holds zeros until it
    is in use. Raises `ConfigError` that names the workers whose marks are missing or differ."""
    reasons = []
    for place in places:
        found = bytes(pool[place.mark_at : place.mark_at + MARK_BYTES])
        if (reason := _why_not(found, place, engine)) is not None:
            reasons.append(f"worker {place.rank} {reason}")
    for place in places:
        pool[place.mark_at : place.mark_at + MARK_BYTES] = bytes(MARK_BYTES)
    if reasons:
        raise ConfigError(
            f"the scheduler's CPU pool is not the one that its workers use: {'; '.join(reasons)}. "
            "Scheduler and workers must run on one host, the workers as children of the engine "
            "core"
        )


def _mark(place: Place, engine: str) -> bytes:
    name = hashlib.blake2b(engine.encode(), digest_size=16).digest()
    return _MARK.pack(
        _MAGIC, name, place.rank, place.num_rows, place.stride, place.start, place.num_bytes
    )


def _why_not(found: bytes, place: Place, engine: str) -> str | None:
    if found == _mark(place, engine):
        return None
    magic, name, rank, num_rows, stride, start, num_bytes = _MARK.unpack(found)
    if magic != _MAGIC:
        return "left no mark in it"
    if (name, rank) != _MARK.unpack(_mark(place, engine))[1:3]:
        return f"has the mark of worker {rank} of another engine"
    return (
        f"has {num_bytes} bytes from {start} of each of {num_rows} rows, {stride} bytes apart, "
        f"where the scheduler expects {place.num_bytes} from {place.start} of {place.num_rows} "
        f"rows, {place.stride} bytes apart"
    )
