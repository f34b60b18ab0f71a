"""The passage of blocks through a lane, in Python: the jobs of one connection."""

import errno
import select
from array import array
from collections import deque
from collections.abc import Callable
from functools import cache
from socket import socket

import xxhash

from remote_server.native.job import memory_at
from remote_server.native.lane_base import HEADER, PIECE_BYTES, TRAILER, LaneJob, LaneKind

EVENTS = {LaneKind.RECEIVE: select.EPOLLIN, LaneKind.SEND: select.EPOLLOUT}
ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Break(Exception):
    """The lane is broken; `error` is 0 at the end of the stream."""

    def __init__(self, error: int) -> None:
        self.error = error


class Entry:
    """A submitted job, and the place that its lane has reached in it."""

    def __init__(self, job: LaneJob) -> None:
        self.job: LaneJob | None = job
        """None: abandoned."""
        self.sends = job.kind is LaneKind.SEND
        self.request_id = job.request_id
        self.addresses, self.lengths, self.seeds = job.addresses, job.lengths, job.seeds
        self.announced = job.announced
        self.index = 0
        self.begin_block()

    @property
    def is_whole(self) -> bool:
        return self.index == len(self.lengths)

    def begin_block(self) -> None:
        self.passed = 0
        """Bytes of the block, with its header and trailer, that have passed."""
        self.hashed = 0
        self.hasher: xxhash.xxh3_64 | None = None
        self.head, self.tail = bytearray(HEADER.size), bytearray(TRAILER.size)
        if self.is_whole:
            return
        HEADER.pack_into(self.head, 0, self.request_id, self.index, self.lengths[self.index])
        if len(self.seeds) and (self.sends or self.addresses[self.index]):
            self.hasher = xxhash.xxh3_64(seed=self.seeds[self.index])

    @property
    def bytes_done(self) -> int:
        """Bytes of the present block itself."""
        return min(max(self.passed - HEADER.size, 0), self.lengths[self.index])

    def hash_to(self, end: int) -> None:
        if self.hasher and end > self.hashed:
            at = self.addresses[self.index] + self.hashed
            self.hasher.update(memory_at(at, end - self.hashed))
            self.hashed = end

    def end_block(self) -> None:
        if self.job:
            digest = self.hasher.intdigest() if self.hasher else 0
            self.job.set_result(self.index, self.lengths[self.index], digest, 0)
        self.index += 1
        self.begin_block()

    def abandon(self) -> None:
        """Discard the rest, without the job's memory."""
        self.job = self.hasher = None
        self.addresses = array("Q", bytes(8 * len(self.lengths)))

    def end(self, error: int) -> LaneJob | None:
        """The job, with `error` for what has not passed."""
        if self.job and not self.is_whole:
            self.job.set_result(self.index, self.bytes_done, 0, error)
            for index in range(self.index + 1, len(self.lengths)):
                self.job.set_result(index, 0, 0, error)
        return self.job


class Lane:
    """A connection and its jobs."""

    def __init__(self, number: int, connection: socket, pending: Callable[[], int]) -> None:
        """`pending`: bytes that were decrypted and not read."""
        self.number = number
        self.connection = connection
        self._pending = pending
        self.jobs: dict[LaneKind, deque[Entry]] = {kind: deque() for kind in LaneKind}

    @property
    def events(self) -> int:
        """Those that it waits for."""
        return select.EPOLLRDHUP | sum(EVENTS[kind] for kind, jobs in self.jobs.items() if jobs)

    @property
    def is_ready(self) -> bool:
        """A RECEIVE would have bytes, though epoll may see none."""
        return bool(self.jobs[LaneKind.RECEIVE]) and self._pending() > 0

    def move(self, kind: LaneKind, completed: list[LaneJob]) -> None:
        """Move at most a piece, and add the jobs that this completes. Raises `Break`."""
        jobs = self.jobs[kind]
        step = _receive if kind is LaneKind.RECEIVE else _send
        left = PIECE_BYTES
        try:
            while jobs:
                entry = jobs[0]
                while left > 0 and not entry.is_whole:
                    left -= step(self.connection, entry, left)
                if not entry.is_whole:
                    break
                jobs.popleft()
                if entry.job:
                    completed.append(entry.job)
        except BlockingIOError:
            pass
        except OSError as failure:
            raise Break(failure.errno or errno.EIO) from None


def _receive(connection: socket, entry: Entry, most: int) -> int:
    """One read into the present block; its bytes. Raises `OSError` and `Break`."""
    length = entry.lengths[entry.index]
    payload = entry.passed - HEADER.size
    if payload < 0:
        count = connection.recv_into(memoryview(entry.head)[entry.passed :])
    elif payload < length:
        size = min(length - payload, most)
        address = entry.addresses[entry.index]
        view = memory_at(address + payload, size) if address else memoryview(_sink())[:size]
        count = connection.recv_into(view)
    else:
        count = connection.recv_into(memoryview(entry.tail)[payload - length :])
    if not count:
        raise Break(0)
    entry.passed += count
    due = (entry.request_id, entry.index, length)
    if payload < 0 and entry.passed == HEADER.size and HEADER.unpack(entry.head) != due:
        raise Break(errno.EPROTO)
    entry.hash_to(entry.bytes_done)
    if entry.job:
        entry.job.set_result(entry.index, entry.bytes_done, 0, 0)
        entry.job.set_announced(entry.index, TRAILER.unpack(entry.tail)[0])
    if entry.passed == HEADER.size + length + TRAILER.size:
        entry.end_block()
    return count


def _send(connection: socket, entry: Entry, most: int) -> int:
    """One write from the present block; its bytes. Raises `OSError`."""
    length = entry.lengths[entry.index]
    payload = entry.passed - HEADER.size
    if payload < 0:
        count = connection.send(memoryview(entry.head)[entry.passed :])
    elif payload < length:
        size = min(length - payload, most)
        entry.hash_to(payload + size)
        count = connection.send(memory_at(entry.addresses[entry.index] + payload, size))
    else:
        checksum = entry.hasher.intdigest() if entry.hasher else entry.announced[entry.index]
        TRAILER.pack_into(entry.tail, 0, checksum)
        count = connection.send(memoryview(entry.tail)[payload - length :])
    entry.passed += count
    if entry.passed == HEADER.size + length + TRAILER.size:
        entry.end_block()
    return count


@cache
def _sink() -> bytearray:
    """Memory for bytes that are discarded."""
    return bytearray(PIECE_BYTES)
