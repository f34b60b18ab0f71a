"""I/O threads shared by all disks, and each disk's queue of jobs."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from remote_server.guard import Guard
from remote_server.store.pages import Scratch

# Enough to keep a device's queue filled while one thread hashes; each holds at most one piece
# (`transfers.PIECE_BYTES`) of scratch memory.
NUM_THREADS = 4

NUM_PRIORITIES = 3


class Owner(Protocol):
    """Has jobs done on shared threads. Compared by identity."""

    def run(self, job: "Job[Any]", scratch: Scratch) -> None:
        """Do `job` on this thread, with its scratch memory. It must not raise."""


class Threads:
    """`num_threads` of them, started with the first job. Jobs are taken by priority; within one,
    owners take turns, so that one tenant's work delays another's by a job at most."""

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "disk") -> None:
        lock = threading.Lock()
        self._ready = threading.Condition(lock)
        """A job waits, or the threads are to end."""
        self._ended = threading.Condition(lock)
        """A job has ended. Not the same one: it would wake every idle thread after each job."""
        self._waiting: tuple[dict[Owner, deque[Job[Any]]], ...] = tuple(
            {} for _ in range(NUM_PRIORITIES)
        )
        self._running: list[Owner] = []
        self._stopping = False
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []

    @property
    def num_dead(self) -> int:
        """Threads that have ended before `stop`."""
        return 0 if self._stopping else sum(not one.is_alive() for one in self._threads)

    def submit(self, owner: Owner, job: "Job[Any]") -> None:
        """Have `owner` run `job` on a thread."""
        with self._ready:
            self._waiting[job.priority].setdefault(owner, deque()).append(job)
            self._ready.notify()
        if not self._threads:
            self._start()

    def forget(self, owner: Owner) -> None:
        """Drop the waiting jobs of `owner`, and return when none of its jobs runs."""
        with self._ready:
            for waiting in self._waiting:
                waiting.pop(owner, None)
            self._ended.wait_for(lambda: owner not in self._running)

    def stop(self) -> None:
        """Finish the running jobs, drop the others, and end the threads."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            for number in range(self._num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        scratch = Scratch()
        while (taken := self._next()) is not None:
            owner, job = taken
            try:
                owner.run(job, scratch)
            finally:
                with self._ready:
                    self._running.remove(owner)
                    self._ended.notify_all()

    def _next(self) -> tuple[Owner, "Job[Any]"] | None:
        with self._ready:
            while not self._stopping:
                for waiting in self._waiting:
                    if waiting:
                        owner = next(iter(waiting))
                        jobs = waiting.pop(owner)
                        job = jobs.popleft()
                        if jobs:
                            waiting[owner] = jobs  # behind the others
                        self._running.append(owner)
                        return owner, job
                self._ready.wait()
        return None


log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Priority(IntEnum):
    """The order in which jobs are taken. Inside a priority, in the order submitted."""

    READ = 0  # a request waits for it
    WRITE = 1
    CHORE = 2  # no request waits: verification of recovered blocks


class Batch:
    """Jobs whose results are of use together: the last that is done wakes the loop, which takes a
    tenth of a millisecond in each turn."""

    __slots__ = ("_left",)

    def __init__(self, num_jobs: int) -> None:
        self._left = [None] * num_jobs

    def is_last(self) -> bool:
        """To be called once for each job, when it is done, on any thread. At least one call returns
        True, and then all jobs are done."""
        self._left.pop()
        return not self._left


class Job(Generic[Result]):
    """`work` runs on an I/O thread and touches only bytes and files; `finish` gets its result on
    the loop, or None when it raised."""

    __slots__ = ("batch", "finish", "priority", "result", "work")

    def __init__(
        self,
        priority: Priority,
        work: Callable[[Scratch], Result],
        finish: Callable[[Result | None], None],
        batch: Batch | None = None,
    ) -> None:
        self.priority = priority
        self.work = work
        self.finish = finish
        self.batch = batch
        self.result: Result | None = None

    def run(self, scratch: Scratch) -> None:
        try:
            self.result = self.work(scratch)
        except Exception:  # of any kind: the thread must go on, all blocks need it
            log.exception("a disk job failed; its blocks are dropped")


class Pool(Protocol):
    """The interface that the tier uses; a test replaces it by one without threads."""

    def submit(self, job: Job[Any]) -> None:
        """Run it later. It is the pool's until its `finish` is called, from `finish_jobs`."""

    def finish_jobs(self) -> None:
        """Call `finish` of every job that is done."""

    def wake(self) -> None:
        """Have the loop call `finish_jobs` again soon."""

    @property
    def busy(self) -> bool:
        """Whether a job has been submitted and not finished."""

    def stop(self) -> None:
        """Finish the running jobs and drop the others."""


class ThreadPool:
    """The jobs of one tier, on threads that it may share. `wake` is called, on one of them, when a
    job or a batch is done: it must make the loop call `finish_jobs`."""

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
        self._owns_threads = threads is None
        self._threads = threads or Threads(num_threads)
        self._done: deque[Job[Any]] = deque()
        self._unfinished = 0

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    def submit(self, job: Job[Any]) -> None:
        self._unfinished += 1
        self._threads.submit(self, job)

    def finish_jobs(self) -> None:
        for _ in range(len(self._done)):
            job = self._done.popleft()
            self._unfinished -= 1
            self._guard.run("the end of a disk job", partial(job.finish, job.result), None)

    def stop(self) -> None:
        self._threads.forget(self)
        if self._owns_threads:
            self._threads.stop()

    def run(self, job: Job[Any], scratch: Scratch) -> None:
        """On a thread."""
        job.run(scratch)
        self._done.append(job)
        if job.batch is None or job.batch.is_last():
            self.wake()
