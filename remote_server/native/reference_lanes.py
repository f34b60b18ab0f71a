"""The lanes in Python: the same contract with one thread of the interpreter.

They run where there is no library, and tests compare the library with them.
"""

import ctypes
import errno
import os
import select
from array import array
from collections import deque
from contextlib import suppress
from functools import cache
from socket import SHUT_RDWR, SO_ERROR, SOL_SOCKET, socket
from threading import Lock, Thread
from weakref import finalize

import xxhash

from remote_server.errors import LaneBroken, MoverClosed
from remote_server.native.base import Forks
from remote_server.native.lane_base import (
    CLOSED,
    HEADER,
    PIECE_BYTES,
    TRAILER,
    Broken,
    LaneJob,
    LaneKind,
    Lanes,
    error_of_jobs,
)

_EVENTS = {LaneKind.RECEIVE: select.EPOLLIN, LaneKind.SEND: select.EPOLLOUT}
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class ReferenceLanes(Lanes):
    """The lanes without a library. One thread serves them all."""

    def __init__(self, threads: int) -> None:
        """Raises `OSError`."""
        self.threads = threads
        self._loop = _Loop()
        finalize(self, self._loop.close)

    def fileno(self) -> int:
        if self._loop.is_foreign or self._loop.stopping:
            raise MoverClosed(CLOSED)
        return self._loop.bell

    def open(self, connection: socket) -> int:
        if self._loop.is_foreign:
            raise MoverClosed(CLOSED)
        return self._loop.open(connection)

    def submit(self, lane: int, job: LaneJob) -> None:
        if self._loop.is_foreign:
            raise MoverClosed(CLOSED)
        self._loop.submit(lane, job)

    def abandon(self, job: LaneJob) -> None:
        if not self._loop.is_foreign:
            self._loop.abandon(job)

    def reap(self) -> tuple[list[LaneJob], list[Broken]]:
        return ([], []) if self._loop.is_foreign else self._loop.reap()

    def close_lane(self, lane: int) -> None:
        if not self._loop.is_foreign:
            self._loop.close_lane(lane)

    def close(self) -> None:
        self._loop.close()


class _Break(Exception):
    """The lane is broken; `error` is 0 at the end of the stream."""

    def __init__(self, error: int) -> None:
        self.error = error


class _Entry:
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
            self.hasher.update(_memory(at, end - self.hashed))
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


class _Lane:
    """A connection and its jobs."""

    def __init__(self, number: int, connection: socket) -> None:
        self.number = number
        self.connection = connection
        self.jobs: dict[LaneKind, deque[_Entry]] = {kind: deque() for kind in LaneKind}

    @property
    def events(self) -> int:
        """Those that it waits for."""
        return select.EPOLLRDHUP | sum(_EVENTS[kind] for kind, jobs in self.jobs.items() if jobs)

    def move(self, kind: LaneKind, completed: list[LaneJob]) -> None:
        """Move at most a piece, and add the jobs that this completes. Raises `_Break`."""
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
            raise _Break(failure.errno or errno.EIO) from None


def _receive(connection: socket, entry: _Entry, most: int) -> int:
    """One read into the present block; its bytes. Raises `OSError` and `_Break`."""
    length = entry.lengths[entry.index]
    payload = entry.passed - HEADER.size
    if payload < 0:
        count = connection.recv_into(memoryview(entry.head)[entry.passed :])
    elif payload < length:
        size = min(length - payload, most)
        address = entry.addresses[entry.index]
        view = _memory(address + payload, size) if address else memoryview(_sink())[:size]
        count = connection.recv_into(view)
    else:
        count = connection.recv_into(memoryview(entry.tail)[payload - length :])
    if not count:
        raise _Break(0)
    entry.passed += count
    due = (entry.request_id, entry.index, length)
    if payload < 0 and entry.passed == HEADER.size and HEADER.unpack(entry.head) != due:
        raise _Break(errno.EPROTO)
    entry.hash_to(entry.bytes_done)
    if entry.job:
        entry.job.set_result(entry.index, entry.bytes_done, 0, 0)
        entry.job.set_announced(entry.index, TRAILER.unpack(entry.tail)[0])
    if entry.passed == HEADER.size + length + TRAILER.size:
        entry.end_block()
    return count


def _send(connection: socket, entry: _Entry, most: int) -> int:
    """One write from the present block; its bytes. Raises `OSError`."""
    length = entry.lengths[entry.index]
    payload = entry.passed - HEADER.size
    if payload < 0:
        count = connection.send(memoryview(entry.head)[entry.passed :])
    elif payload < length:
        size = min(length - payload, most)
        entry.hash_to(payload + size)
        count = connection.send(_memory(entry.addresses[entry.index] + payload, size))
    else:
        checksum = entry.hasher.intdigest() if entry.hasher else entry.announced[entry.index]
        TRAILER.pack_into(entry.tail, 0, checksum)
        count = connection.send(memoryview(entry.tail)[payload - length :])
    entry.passed += count
    if entry.passed == HEADER.size + length + TRAILER.size:
        entry.end_block()
    return count


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


@cache
def _sink() -> bytearray:
    """Memory for bytes that are discarded."""
    return bytearray(PIECE_BYTES)


class _Loop:
    """Lanes and their thread. It holds the lock while it moves a piece: then a caller that has the
    lock knows that no memory is touched."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopping = False
        self._stops = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._stops, select.EPOLLIN)
        self._lock = Lock()
        self._lanes: dict[int, _Lane] = {}
        self._by_file: dict[int, _Lane] = {}
        self._submitted: dict[int, tuple[_Lane, _Entry]] = {}
        """By the job's number; completed ones are not here."""
        self._completed: list[LaneJob] = []
        self._broken: list[Broken] = []
        self._sequence = 0
        self._thread: Thread | None = None
        self._forks = Forks.count

    @property
    def is_foreign(self) -> bool:
        """This process was forked from that of the lanes. The lock may be held by no thread."""
        return self._forks != Forks.count

    def open(self, connection: socket) -> int:
        with self._lock:
            if self.stopping:
                raise MoverClosed(CLOSED)
            if connection.fileno() < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._sequence += 1
            self._epoll.register(connection, select.EPOLLRDHUP)
            own = socket(fileno=connection.detach())
            own.setblocking(False)
            lane = _Lane(self._sequence, own)
            self._lanes[lane.number] = self._by_file[own.fileno()] = lane
            if not self._thread:
                self._thread = Thread(target=self._run, name="lanes", daemon=True)
                self._thread.start()
            return lane.number

    def submit(self, number: int, job: LaneJob) -> None:
        with self._lock:
            if self.stopping:
                raise MoverClosed(CLOSED)
            if job.number:
                raise ValueError("the job is submitted already")
            lane = self._lanes.get(number)
            if not lane:
                raise LaneBroken(f"lane {number} is broken or closed")
            self._sequence += 1
            job.number, job.lane = self._sequence, number
            entry = _Entry(job)
            self._submitted[job.number] = lane, entry
            if entry.is_whole and not lane.jobs[job.kind]:
                self._complete([job])
                return
            lane.jobs[job.kind].append(entry)
            self._epoll.modify(lane.connection, lane.events)

    def abandon(self, job: LaneJob) -> None:
        with self._lock:
            if job in self._completed:
                self._completed.remove(job)
                self._ring()
            elif (found := self._submitted.get(job.number)) and found[1].job is job:
                lane, entry = found
                entry.abandon()
                del self._submitted[job.number]
                if job.kind is LaneKind.SEND:
                    self._end_lane(lane, errno.ECANCELED)
            else:
                return
            job.number, job.keep = 0, None

    def reap(self) -> tuple[list[LaneJob], list[Broken]]:
        with self._lock:
            completed, self._completed = self._completed, []
            broken, self._broken = self._broken, []
            self._ring()
            for job in completed:
                job.number = 0
            return completed, broken

    def close_lane(self, number: int) -> None:
        with self._lock:
            if lane := self._lanes.get(number):
                self._end_lane(lane, errno.ECANCELED)
            self._broken = [each for each in self._broken if each[0] != number]
            self._ring()

    def close(self) -> None:
        if self.is_foreign:
            return
        with self._lock:
            self.stopping = True
            for lane in [*self._lanes.values()]:
                self._end_lane(lane, errno.ECANCELED)
            self._broken.clear()
            if self._stops >= 0:
                os.eventfd_write(self._stops, 1)
        if self._thread:
            self._thread.join()
        with self._lock:
            if self.bell >= 0:
                os.close(self.bell)
                os.close(self._stops)
                self._epoll.close()
            self.bell = self._stops = -1

    def _run(self) -> None:
        while True:
            self._epoll.poll()  # only waits: a file may be closed before the lock is taken
            with self._lock:
                if self.stopping:
                    return
                for file, events in self._epoll.poll(0, 1):
                    self._serve(self._by_file[file], events)

    def _serve(self, lane: _Lane, events: int) -> None:
        completed: list[LaneJob] = []
        try:
            for kind, event in _EVENTS.items():
                if events & (event | _ENDS) and lane.jobs[kind]:
                    lane.move(kind, completed)
            if events & _ENDS and not lane.jobs[LaneKind.RECEIVE]:
                raise _Break(lane.connection.getsockopt(SOL_SOCKET, SO_ERROR))
            self._epoll.modify(lane.connection, lane.events)
        except _Break as broken:
            self._complete(completed)
            is_idle = not any(lane.jobs.values())
            self._end_lane(lane, broken.error if is_idle else error_of_jobs(broken.error))
        else:
            self._complete(completed)

    def _complete(self, jobs: list[LaneJob]) -> None:
        for job in jobs:
            del self._submitted[job.number]
        self._completed += jobs
        self._ring()

    def _end_lane(self, lane: _Lane, error: int) -> None:
        """Close the connection; its jobs complete, and it is reported."""
        del self._lanes[lane.number], self._by_file[lane.connection.fileno()]
        self._epoll.unregister(lane.connection)
        with suppress(OSError):
            lane.connection.shutdown(SHUT_RDWR)  # the peer's news, also if a child of fork has it
        lane.connection.close()
        ended = [entry.end(error) for jobs in lane.jobs.values() for entry in jobs]
        self._complete([job for job in ended if job])
        self._broken.append((lane.number, error))
        self._ring()

    def _ring(self) -> None:
        """Set the descriptor."""
        if self.bell < 0:
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        if self._completed or self._broken:
            os.eventfd_write(self.bell, 1)
