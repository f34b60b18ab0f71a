"""The interface of a mover, which moves bytes on its own threads and hashes them as they pass."""

import os
from abc import ABC, abstractmethod

from remote_server.native.job import Job

CLOSED = "the mover is closed, or belongs to the process that this one was forked from"


class Forks:
    """The number of forks between the first process and this one."""

    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=Forks.add)


class Mover(ABC):
    """Runs jobs, on the calling thread or on `threads` of its own, which start with the first job.

    A submitted job completes exactly once: `reap` returns it, with the results of each operation.
    A mover belongs to the process that made it. In a child of fork nothing of it runs, `submit`
    and `fileno` raise `MoverClosed`, and the child may make its own. All calls are thread-safe.
    """

    threads: int

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while a completed job waits for `reap`. Raises
        `MoverClosed`."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Run `job` on the threads: the highest priority first, its operations side by side.

        Raises `MoverFull` when too many jobs have not been reaped, `MoverClosed`, and `ValueError`
        for a job that is submitted already. After an error the job is the caller's."""

    @abstractmethod
    def cancel(self, job: Job) -> bool:
        """End `job` soon: operations that have not begun get ECANCELED, a running one stops after
        its present piece: 256 KiB of a copy, 8 MiB of a file. It completes all the same. False: it
        has completed."""

    @abstractmethod
    def reap(self) -> list[Job]:
        """The jobs that have completed since the last call, oldest first. After `close`, those
        that it ended."""

    @abstractmethod
    def run(self, job: Job) -> int:
        """Run `job` on the calling thread; the number of failed operations. Also after `close` and
        in a child of fork."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all jobs, wait until nothing of them runs, end the threads."""
