"""The lanes in Python: the same contract with one thread of the interpreter.

They run where there is no library, and tests compare the library with them.
"""

import errno
import os
import select
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RDWR, SO_ERROR, SOL_SOCKET, socket
from threading import Lock, Thread
from weakref import finalize

from remote_server.errors import LaneBroken, MoverClosed
from remote_server.native.base import Forks
from remote_server.native.lane_base import (
    CLOSED,
    Broken,
    LaneJob,
    LaneKind,
    Lanes,
    error_of_jobs,
)
from remote_server.native.reference_passage import ENDS, EVENTS, Break, Entry, Lane
from remote_server.native.tls_base import TlsConnection


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

    def open(self, connection: socket | TlsConnection) -> int:
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


class _Loop:
    """Lanes and their thread. It holds the lock while it moves a piece: then a caller that has the
    lock knows that no memory is touched."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopping = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wakes, select.EPOLLIN)
        self._ready: dict[int, Lane] = {}
        """Lanes that are served without an event, by their number."""
        self._lock = Lock()
        self._lanes: dict[int, Lane] = {}
        self._by_file: dict[int, Lane] = {}
        self._submitted: dict[int, tuple[Lane, Entry]] = {}
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

    def open(self, connection: socket | TlsConnection) -> int:
        with self._lock:
            if self.stopping:
                raise MoverClosed(CLOSED)
            if connection.fileno() < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._sequence += 1
            self._epoll.register(connection, select.EPOLLRDHUP)
            own, pending = _taken_over(connection)
            own.setblocking(False)
            lane = Lane(self._sequence, own, pending)
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
            entry = Entry(job)
            self._submitted[job.number] = lane, entry
            if entry.is_whole and not lane.jobs[job.kind]:
                self._complete([job])
                return
            lane.jobs[job.kind].append(entry)
            self._watch(lane)

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
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)
        if self._thread:
            self._thread.join()
        with self._lock:
            if self.bell >= 0:
                os.close(self.bell)
                os.close(self._wakes)
                self._epoll.close()
            self.bell = self._wakes = -1

    def _run(self) -> None:
        while True:
            self._epoll.poll()  # only waits: a file may be closed before the lock is taken
            with self._lock:
                if self.stopping:
                    return
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                for file, events in self._epoll.poll(0, 1):
                    self._serve(self._by_file[file], events)
                ready, self._ready = self._ready, {}
                for lane in [*ready.values()]:
                    self._serve(lane, select.EPOLLIN)

    def _serve(self, lane: Lane, events: int) -> None:
        completed: list[LaneJob] = []
        try:
            for kind, event in EVENTS.items():
                if events & (event | ENDS) and lane.jobs[kind]:
                    lane.move(kind, completed)
            if events & ENDS and not lane.jobs[LaneKind.RECEIVE]:
                raise Break(lane.connection.getsockopt(SOL_SOCKET, SO_ERROR))
            self._watch(lane)
        except Break as broken:
            self._complete(completed)
            is_idle = not any(lane.jobs.values())
            self._end_lane(lane, broken.error if is_idle else error_of_jobs(broken.error))
        else:
            self._complete(completed)

    def _watch(self, lane: Lane) -> None:
        """Have the thread serve it when there is something for its jobs."""
        self._epoll.modify(lane.connection, lane.events)
        if lane.is_ready:
            self._ready[lane.number] = lane
            os.eventfd_write(self._wakes, 1)

    def _complete(self, jobs: list[LaneJob]) -> None:
        for job in jobs:
            del self._submitted[job.number]
        self._completed += jobs
        self._ring()

    def _end_lane(self, lane: Lane, error: int) -> None:
        """Close the connection; its jobs complete, and it is reported."""
        del self._lanes[lane.number], self._by_file[lane.connection.fileno()]
        self._ready.pop(lane.number, None)
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


def _taken_over(connection: socket | TlsConnection) -> tuple[socket, Callable[[], int]]:
    """Its socket, and the call that counts decrypted bytes."""
    if isinstance(connection, TlsConnection):
        from remote_server.native.reference_tls import ReferenceTls  # it imports `ssl`

        if not isinstance(connection, ReferenceTls):
            raise TypeError(f"TLS of another kind: {type(connection).__name__}")
        return connection.take_over()
    return socket(fileno=connection.detach()), lambda: 0
