"""The interface of lanes, TCP connections that carry blocks to and from memory on threads of their
own, and the jobs that they carry.

A block on a lane is a header of 16 bytes (u64 request, u32 position, u32 length), its bytes, and a
trailer of 8 bytes with its checksum; numbers are little-endian. PROTOCOL.md has the preamble that
comes before the first block, which is the caller's.
"""

import errno
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from enum import IntEnum
from operator import and_, eq
from socket import socket

from remote_server.native.tls_base import TlsConnection

CLOSED = "the lanes are closed, or belong to the process that this one was forked from"

PIECE_BYTES = 256 << 10
"""A lane looks at its jobs anew between two pieces of at most so many bytes."""

HEADER = struct.Struct("<QII")
TRAILER = struct.Struct("<Q")

MAX_BLOCK_BYTES = (1 << 32) - 1


class LaneKind(IntEnum):
    """Of all blocks of a job. `KVF_SEND` and so on of lanes.h; the mover's kinds are below them."""

    SEND = 3
    """From addresses to the peer."""
    RECEIVE = 4
    """From the peer to addresses."""


# struct kvf_lane_job of lanes.h.
_pack = struct.Struct("=4I8Q").pack
_HASH = 1


class LaneJob:
    """The blocks of one message, in columns with one entry each; their positions are 0, 1, ….

    From `submit` until it is reaped, or `abandon`, `close_lane` or `close` has returned, the memory
    that it names belongs to the lanes: nothing may free it; SEND reads it, RECEIVE writes it. After
    that the lanes touch none of it. `keep` is an object that must live as long. The results are
    meaningful when the job has been reaped; then it may be submitted again.
    """

    __slots__ = (
        "_columns", "_has_seeds", "_seeds_at", "count", "header", "keep", "kind", "lane",
        "num_bytes", "number", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        kind: LaneKind,
        request_id: int,
        addresses: Sequence[int],
        lengths: Sequence[int],
        *,
        seeds: Sequence[int] | None = None,
        announced: Sequence[int] | None = None,
        keep: object = None,
    ) -> None:
        """With `seeds` each block gets its XXH3-64 while it passes, and a SEND sends it as the
        trailer. A SEND without seeds sends `announced`, or 0. A RECEIVE whose address is 0 discards
        the block and has no digest of it.

        Raises `ValueError` for columns of different lengths, blocks of 4 GiB and more, or a RECEIVE
        with `announced`, and `OverflowError` for numbers that are negative or exceed 64 bits."""
        count = len(addresses)
        for column in (lengths, seeds, announced):
            if column is not None and len(column) != count:
                raise ValueError(f"columns: {count} and {len(column)} entries")
        if max(lengths, default=0) > MAX_BLOCK_BYTES:
            raise ValueError(f"a block of {max(lengths)} bytes")
        if kind is LaneKind.RECEIVE and announced is not None:
            raise ValueError("checksums of a RECEIVE are announced by the peer")
        self.kind = kind
        self.request_id = request_id
        self.count = count
        self.keep = keep
        self.number = 0
        """The lanes' name for it while it is submitted, else 0."""
        self.lane = 0
        """The lane that it was submitted to last."""
        self.num_bytes: int = sum(lengths)
        # One array of all columns: its address is that of each, with an offset. Errors are last and
        # take half a word each.
        blank = (0,) * count
        errors = (0,) * ((count + 1) // 2)
        columns = array("Q", [*addresses, *lengths, *(announced or blank), *blank, *blank, *errors])
        self._seeds_at = len(columns)
        self._has_seeds = seeds is not None
        columns.extend(seeds or ())
        self._columns = columns
        at, column_bytes = columns.buffer_info()[0], 8 * count
        self.header = _pack(
            kind, _HASH if self._has_seeds else 0, count, 0,
            request_id,
            at, at + column_bytes, at + 8 * self._seeds_at, at + 2 * column_bytes,
            at + 3 * column_bytes, at + 4 * column_bytes, at + 5 * column_bytes,
        )  # fmt: skip
        """`struct kvf_lane_job`, with addresses in this object's array."""

    def _column(self, index: int) -> "array[int]":
        return self._columns[index * self.count : (index + 1) * self.count]

    @property
    def addresses(self) -> "array[int]":
        return self._column(0)

    @property
    def lengths(self) -> "array[int]":
        return self._column(1)

    @property
    def seeds(self) -> "array[int]":
        """Empty in a job without seeds."""
        return self._columns[self._seeds_at :]

    @property
    def announced(self) -> "array[int]":
        """Of a RECEIVE, the trailers as received, of blocks without an error."""
        return self._column(2)

    @property
    def done(self) -> "array[int]":
        """Of each block, the bytes that were received, or handed to the system to be sent. It grows
        while the job is carried."""
        return self._column(3)

    @property
    def digests(self) -> "array[int]":
        """Of each block without an error, the XXH3-64 of its bytes, if the job has seeds."""
        return self._column(4)

    @property
    def errors(self) -> "array[int]":
        """Of each block, 0 if it has passed whole, or an errno: ECANCELED (the lane was closed),
        EPROTO (the peer sent another block), ECONNRESET, EPIPE, ETIMEDOUT, EFAULT."""
        words = self._columns[5 * self.count : self._seeds_at]
        return array("i", words.tobytes())[: self.count]

    @property
    def failed(self) -> bool:
        """Whether any block has an error."""
        return any(self._columns[5 * self.count : self._seeds_at])

    def intact(self) -> list[bool]:
        """Of each block, whether it has passed whole and, in a job with seeds, its digest is the
        announced one."""
        whole = [not error for error in self.errors] if self.failed else [True] * self.count
        if not self._has_seeds or self.kind is LaneKind.SEND:
            return whole
        return [*map(and_, whole, map(eq, self.digests, self.announced))]

    def set_result(self, index: int, done: int, digest: int, error: int) -> None:
        """The results of one block, of lanes that are not native."""
        self._columns[3 * self.count + index] = done
        self._columns[4 * self.count + index] = digest
        with memoryview(self._columns) as words, words.cast("B") as octets:
            octets[40 * self.count :].cast("i")[index] = error

    def set_announced(self, index: int, checksum: int) -> None:
        self._columns[2 * self.count + index] = checksum


Broken = tuple[int, int]
"""A lane and the errno that broke it."""


class Lanes(ABC):
    """Carries jobs over TCP connections, on `threads` of its own, which start with the lanes.

    Each lane takes jobs of both kinds; those of one kind are carried in the order submitted, at the
    same time as those of the other kind. A job completes exactly once: `reap` returns it, unless it
    was abandoned.

    A lane breaks when its peer closes it or sends anything but the header that its next RECEIVE
    expects, and with an error of its connection. All its jobs complete then. Bytes that come while
    no RECEIVE is submitted stay in the connection, where they hold back the peer.

    Lanes belong to the process that made them. In a child of fork nothing of them runs, calls raise
    `MoverClosed`, and the child may make its own. All calls are thread-safe.
    """

    threads: int

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while `reap` has something to return. Raises
        `MoverClosed`."""

    @abstractmethod
    def open(self, connection: socket | TlsConnection) -> int:
        """A lane over `connection`, which is connected and has carried its preamble. Its number is
        above 0 and is never used again by this object.

        The connection is detached from its object. After an error it is the caller's. Blocks pass
        encrypted over a `TlsConnection`, which must be of the same kind as the lanes: `make_lanes`
        and `make_tls_context` choose alike. Raises `MoverClosed`, `OSError`, and `TypeError` for
        another kind."""

    @abstractmethod
    def submit(self, lane: int, job: LaneJob) -> None:
        """Carry `job` on `lane`, after all jobs of its kind there.

        Raises `LaneBroken` when the lane is broken, closed or unknown, `MoverClosed`, and
        `ValueError` for a job that is submitted already. After an error the job is the caller's."""

    @abstractmethod
    def abandon(self, job: LaneJob) -> None:
        """Take `job` back: its memory is the caller's when this returns, at the latest after the
        present piece. It is never reaped, its results mean nothing, and its `keep` is dropped.

        What is left of a RECEIVE is discarded as it comes, and the lane goes on. A SEND that has
        not been sent whole breaks its lane with ECANCELED, because its peer expects the rest. A job
        that is not submitted, or that was reaped, stays as it is."""

    @abstractmethod
    def reap(self) -> tuple[list[LaneJob], list[Broken]]:
        """The jobs that have completed since the last call, oldest first, and the lanes that have
        broken since, each after all its jobs. An errno of 0: the peer closed the lane while it had
        no jobs. After `close`, the jobs that it ended."""

    @abstractmethod
    def close_lane(self, lane: int) -> None:
        """Close the connection. The lane's jobs complete with ECANCELED, and nothing touches their
        memory when this returns. It is not reported as broken from now on. An unknown lane, or one
        that was reported, stays as it is."""

    @abstractmethod
    def close(self) -> None:
        """Close all lanes and end the threads."""


def error_of_jobs(broken: int) -> int:
    """The errno of the jobs on a lane that broke with `broken`."""
    return broken or errno.ECONNRESET
