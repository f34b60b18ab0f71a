"""The mover in Python: the same contract with ctypes, xxhash and threads of the interpreter.

It runs where there is no library, and property tests compare the library with it. One difference: a
SIGBUS, of memory whose file was truncated, ends the process.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from weakref import finalize

import xxhash

from remote_server.errors import MoverClosed, MoverFull
from remote_server.native.base import CLOSED, Forks, Mover
from remote_server.native.job import Job, Kind, Priority, memory_at

PIECE_BYTES = 256 << 10


class ReferenceMover(Mover):
    """The mover without a library."""

    def __init__(self, threads: int, max_jobs: int) -> None:
        """Raises `OSError`."""
        self.threads = threads
        self._pool = _Pool(threads, max_jobs)
        finalize(self, self._pool.close)

    def fileno(self) -> int:
        if self._pool.is_foreign or self._pool.stopping:
            raise MoverClosed(CLOSED)
        return self._pool.bell

    def submit(self, job: Job) -> None:
        if self._pool.is_foreign:
            raise MoverClosed(CLOSED)
        self._pool.submit(job)

    def cancel(self, job: Job) -> bool:
        return not self._pool.is_foreign and self._pool.cancel(job)

    def reap(self) -> list[Job]:
        return [] if self._pool.is_foreign else self._pool.reap()

    def run(self, job: Job) -> int:
        for index in range(job.count):
            _operate(job, index, lambda: False)
        return sum(error != 0 for error in job.errors)

    def close(self) -> None:
        self._pool.close()


class _Entry:
    """A submitted job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.next = 0
        """Operations before it are taken or cancelled."""
        self.running = 0
        self.cancelled = False


class _Pool:
    """Jobs and threads. `ready` guards all of it but the bytes."""

    def __init__(self, threads: int, max_jobs: int) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopping = False
        self._ready = Condition()
        self._queues: tuple[deque[_Entry], ...] = tuple(deque() for _ in Priority)
        self._entries: dict[int, _Entry] = {}
        """Those that have not completed, by the job's number."""
        self._completed: deque[Job] = deque()
        self._sequence = 0
        self._idle = 0
        self._max_threads = threads
        self._max_jobs = max_jobs
        self._threads: list[Thread] = []
        self._forks = Forks.count

    @property
    def is_foreign(self) -> bool:
        """This process was forked from the pool's. Its lock may be held by no thread."""
        return self._forks != Forks.count

    def submit(self, job: Job) -> None:
        with self._ready:
            if job.number:
                raise ValueError("the job is submitted already")
            if self.stopping:
                raise MoverClosed(CLOSED)
            if len(self._entries) + len(self._completed) >= self._max_jobs:
                raise MoverFull(f"{self._max_jobs} jobs have not been reaped")
            queue = self._queues[job.priority]
            self._sequence += 1
            job.number = self._sequence
            entry = self._entries[job.number] = _Entry(job)
            if not job.count:
                self._end_operation(entry, 0)
                return
            queue.append(entry)
            self._ready.notify(job.count)
            waiting = sum(each.job.count - each.next for queue in self._queues for each in queue)
            for _ in range(min(waiting - self._idle, self._max_threads - len(self._threads))):
                thread = Thread(target=self._work, name="mover", daemon=True)
                self._idle += 1
                self._threads.append(thread)
                thread.start()

    def cancel(self, job: Job) -> bool:
        with self._ready:
            entry = self._entries.get(job.number)
            if entry is None or entry.job is not job:
                return False
            self._cancel(entry)
            return True

    def reap(self) -> list[Job]:
        with self._ready:
            if self.stopping and self._entries:
                return []  # `close` is waiting for them
            jobs = [*self._completed]
            self._completed.clear()
            if jobs and not self.stopping:
                os.eventfd_read(self.bell)
            for job in jobs:
                job.number = 0
            return jobs

    def close(self) -> None:
        if self.is_foreign:
            return
        with self._ready:
            for entry in [*self._entries.values()]:
                self._cancel(entry)
            self.stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()
        with self._ready:
            if self.bell >= 0:
                os.close(self.bell)
            self.bell = -1

    def _cancel(self, entry: _Entry) -> None:
        job = entry.job
        entry.cancelled = True
        if entry.next == job.count:
            return
        for index in range(entry.next, job.count):
            job.set_result(index, 0, 0, errno.ECANCELED)
        entry.next = job.count
        self._queues[job.priority].remove(entry)
        self._end_operation(entry, 0)

    def _end_operation(self, entry: _Entry, number: int) -> None:
        entry.running -= number
        if entry.running == 0 and entry.next == entry.job.count:
            del self._entries[entry.job.number]
            if not self._completed:
                os.eventfd_write(self.bell, 1)
            self._completed.append(entry.job)

    def _work(self) -> None:
        while self._work_some():
            pass

    def _work_some(self) -> bool:
        """Do an operation; False at the end. No job is held while it waits for the next one."""
        taken = self._take()
        if taken is None:
            return False
        entry, index = taken
        _operate(entry.job, index, lambda: entry.cancelled)
        with self._ready:
            self._idle += 1
            self._end_operation(entry, 1)
        return True

    def _take(self) -> tuple[_Entry, int] | None:
        with self._ready:
            while not self.stopping:
                for queue in self._queues:
                    if queue:
                        entry = queue[0]
                        index = entry.next
                        entry.next += 1
                        entry.running += 1
                        if entry.next == entry.job.count:
                            queue.popleft()
                        self._idle -= 1
                        return entry, index
                self._ready.wait()
        return None


def _operate(job: Job, index: int, is_cancelled: Callable[[], bool]) -> None:
    """One operation, in pieces."""
    hasher = xxhash.xxh3_64(seed=job.seeds[index]) if job.seeds else None
    step = _STEPS[job.kind]
    done = error = 0
    length = job.lengths[index]
    if is_cancelled():
        error = errno.ECANCELED
    while done < length and not error:
        if is_cancelled():
            error = errno.ECANCELED
            break
        try:
            moved = step(job, index, done, min(PIECE_BYTES, length - done))
        except OSError as failure:
            error = failure.errno or errno.EIO
        except OverflowError:  # an offset that no file has
            error = errno.EINVAL
        else:
            if hasher:
                address = job.sources[index] if job.kind is Kind.WRITE else job.targets[index]
                address = address or job.sources[index]  # a copy to nowhere
                hasher.update(memory_at(address + done, moved))
            done += moved
    job.set_result(index, done, hasher.intdigest() if hasher else 0, error)


def _copy(job: Job, index: int, begin: int, length: int) -> int:
    if job.targets[index]:
        ctypes.memmove(job.targets[index] + begin, job.sources[index] + begin, length)
    return length


def _read(job: Job, index: int, begin: int, length: int) -> int:
    memory = memory_at(job.targets[index] + begin, length)
    moved = os.preadv(job.files[index], [memory], job.sources[index] + begin)
    if not moved:
        raise OSError(errno.ENODATA, "end of file")
    return moved


def _write(job: Job, index: int, begin: int, length: int) -> int:
    memory = memory_at(job.sources[index] + begin, length)
    moved = os.pwritev(job.files[index], [memory], job.targets[index] + begin)
    if not moved:
        raise OSError(errno.EIO, "nothing was written")
    return moved


_STEPS = {Kind.COPY: _copy, Kind.READ: _read, Kind.WRITE: _write}
