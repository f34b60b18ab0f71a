"""I/O threads: jobs that read and write files, and their results on the way back to the loop.

The queues have no bound of their own: what waits to be written is bounded where slots are
reserved (`writing`), what is read by the memory it is read into, and the rest is a few jobs.
"""

import logging
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from remote_server.guard import Guard
from remote_server.server.copier import Gate
from remote_server.store.disk.files import Scratch
from remote_server.store.disk.threads import NUM_THREADS, Threads

log = logging.getLogger(__name__)

Result = TypeVar("Result")


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
    """The jobs of one tier, on threads that it may share. `wake` is called, on one of them, when a
    job is done: it must make the loop call `finish_jobs`."""

    def __init__(
        self,
        wake: Callable[[], None],
        num_threads: int = NUM_THREADS,
        guard: Guard | None = None,
        threads: Threads | None = None,
    ) -> None:
        """`threads` are the caller's; without them there are `num_threads` of its own."""
        self.wake = wake
        self._guard = guard or Guard()
        self.gate = Gate(on_open=wake)
        self._owns_threads = threads is None
        self._threads = threads or Threads(num_threads)
        self._done: deque[Job[Any]] = deque()
        self._unfinished = 0

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    def submit(self, job: Job[Any]) -> None:
        self._unfinished += 1
        self._threads.submit(self._run, job)

    def finish_jobs(self) -> None:
        for _ in range(len(self._done)):
            job = self._done.popleft()
            self._unfinished -= 1
            self._guard.run("the end of a disk job", partial(job.finish, job.result), None)

    def stop(self) -> None:
        self.gate.open_for_good()
        self._threads.forget(self._run)
        if self._owns_threads:
            self._threads.stop()

    def _run(self, job: Job[Any], scratch: Scratch) -> None:
        """On a thread."""
        self.gate.wait()
        job.run(scratch)
        self._done.append(job)
        self.wake()
