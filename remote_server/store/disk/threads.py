"""The threads that all pools of a process share, and whose job they take next."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remote_server.store.disk.files import Scratch

if TYPE_CHECKING:
    from remote_server.store.disk.pool import Job

# Enough to keep a device's queue from running empty while one thread hashes; each holds at
# most one piece (`transfers.PIECE_BYTES`) of scratch memory.
NUM_THREADS = 4

NUM_PRIORITIES = 3

Run = Callable[["Job[Any]", Scratch], None]


class Threads:
    """`num_threads` of them, started with the first job. Jobs are taken by priority; within one,
    each owner has its turn, so that one tenant's work delays another's by a job at most."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._ready = threading.Condition()
        self._waiting: tuple[dict[Run, deque[Job[Any]]], ...] = tuple(
            {} for _ in range(NUM_PRIORITIES)
        )
        self._running: list[Run] = []
        self._stopping = False
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []

    @property
    def num_dead(self) -> int:
        """Threads that have ended although nothing stopped them."""
        return 0 if self._stopping else sum(not one.is_alive() for one in self._threads)

    def submit(self, owner: Run, job: "Job[Any]") -> None:
        """Have `owner` called with `job`, and a thread's scratch memory, on that thread. It must
        not raise."""
        with self._ready:
            self._waiting[job.priority].setdefault(owner, deque()).append(job)
            self._ready.notify()
        if not self._threads:
            self._start()

    def forget(self, owner: Run) -> None:
        """Forget what waits for `owner`, and return when none of its jobs runs."""
        with self._ready:
            for waiting in self._waiting:
                waiting.pop(owner, None)
            self._ready.wait_for(lambda: owner not in self._running)

    def stop(self) -> None:
        """Let the jobs at hand end, forget the others, and end the threads."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"disk-{number}", daemon=True)
            for number in range(self._num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        scratch = Scratch()
        while (taken := self._next()) is not None:
            owner, job = taken
            try:
                owner(job, scratch)
            finally:
                with self._ready:
                    self._running.remove(owner)
                    self._ready.notify_all()

    def _next(self) -> tuple[Run, "Job[Any]"] | None:
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
