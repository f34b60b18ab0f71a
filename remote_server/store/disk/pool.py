"""I/O threads: jobs that read and write files, and their results on the way back to the loop.

The queues have no bound of their own: what waits to be written is bounded where slots are
reserved (`writing`), what is read by the memory it is read into, and the rest is a few jobs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from remote_server.copier import Gate
from remote_server.guard import Guard
from remote_server.store.disk.files import Scratch

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Enough to keep a device's queue from running empty while one thread hashes; each holds at
# most one piece (`transfers.PIECE_BYTES`) of scratch memory.
NUM_THREADS = 4


class Priority(IntEnum):
    """Which job is taken first. Inside a priority, in the order submitted."""

    READ = 0  # somebody waits for it
    WRITE = 1
    CHORE = 2  # nobody waits: verifying what was recovered


class Job(Generic[Result]):
    """`work` runs on an I/O thread and touches only bytes and files; `finish` gets what it
    returned on the loop, or None when it raised."""

    __slots__ = ("finish", "priority", "result", "work")

    def __init__(
        self,
        priority: Priority,
        work: Callable[[Scratch], Result],
        finish: Callable[[Result | None], None],
    ) -> None:
        self.priority = priority
        self.work = work
        self.finish = finish
        self.result: Result | None = None

    def run(self, scratch: Scratch) -> None:
        try:
            self.result = self.work(scratch)
        except Exception:  # whatever it was, the thread must live: all blocks need it
            log.exception("a disk job failed; its blocks are dropped")


class Pool(Protocol):
    """What the tier needs of it; a test puts one without threads in its place."""

    def submit(self, job: Job[Any]) -> None:
        """Run it later. It is the pool's until its `finish` is called, from `finish_jobs`."""

    def finish_jobs(self) -> None:
        """Call `finish` of every job that is done."""

    def wake(self) -> None:
        """Have the loop call `finish_jobs` again soon."""

    @property
    def busy(self) -> bool:
        """Some job has been submitted and not finished."""

    def stop(self) -> None:
        """Let the jobs at hand end and forget the others."""


class ThreadPool:
    """`NUM_THREADS` threads. `wake` is called, on one of them, when a job is done: it must make
    the loop call `finish_jobs`."""

    def __init__(
        self,
        wake: Callable[[], None],
        num_threads: int = NUM_THREADS,
        guard: Guard | None = None,
    ) -> None:
        self.wake = wake
        self._guard = guard or Guard()
        self.gate = Gate(on_open=wake)
        self._ready = threading.Condition()
        self._waiting: tuple[deque[Job[Any]], ...] = tuple(deque() for _ in Priority)
        self._done: deque[Job[Any]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    @property
    def num_dead(self) -> int:
        """Threads that have ended although nothing stopped them."""
        return 0 if self._stopping else sum(not one.is_alive() for one in self._threads)

    def submit(self, job: Job[Any]) -> None:
        self._unfinished += 1
        with self._ready:
            self._waiting[job.priority].append(job)
            self._ready.notify()

    def finish_jobs(self) -> None:
        for _ in range(len(self._done)):
            job = self._done.popleft()
            self._unfinished -= 1
            self._guard.run("the end of a disk job", partial(job.finish, job.result), None)

    def stop(self) -> None:
        with self._ready:
            self._stopping = True
            for waiting in self._waiting:
                waiting.clear()
            self._ready.notify_all()
        self.gate.open_for_good()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        scratch = Scratch()
        while (job := self._next()) is not None:
            self.gate.wait()
            job.run(scratch)
            self._done.append(job)
            self.wake()

    def _next(self) -> Job[Any] | None:
        with self._ready:
            while not self._stopping:
                for waiting in self._waiting:
                    if waiting:
                        return waiting.popleft()
                self._ready.wait()
        return None
