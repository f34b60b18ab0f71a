"""Moves: jobs on the threads of a mover, each with the call at its end."""

import os
from collections import Counter
from collections.abc import Callable, Hashable
from select import POLLIN, poll

from remote_server.native.job import Job
from remote_server.native.mover import make_mover

# A smaller job runs on the calling thread: waking another thread, and being woken by it, takes as
# long as copying half a megabyte.
RUN_HERE_BELOW_BYTES = 1 << 20

# More threads do not copy more: four saturate the memory of one socket.
MAX_THREADS = 4


def threads_for(cores: int) -> int:
    """The threads of a process with so many cores. On two, loops and peers need the other one."""
    return max(1, min(MAX_THREADS, cores // 2))


class Moves:
    """Jobs on the threads of a mover, each with the call at its end. Used by one thread."""

    def __init__(self, threads: int = 0, run_here_below_bytes: int = RUN_HERE_BELOW_BYTES) -> None:
        """`threads` are as many as suit this machine if 0. They start with the first job."""
        self._mover = make_mover(threads or threads_for(len(os.sched_getaffinity(0))))
        self.threads = self._mover.threads
        self._run_here_below_bytes = run_here_below_bytes
        self._jobs: dict[Job, tuple[Hashable, Callable[[Job], None]]] = {}
        self.num_bytes: Counter[Hashable] = Counter()
        """Of each owner, the bytes of its jobs that have not ended."""

    def fileno(self) -> int:
        """Readable when `finish` has work."""
        return self._mover.fileno()

    def submit(self, owner: Hashable, job: Job, at_end: Callable[[Job], None]) -> None:
        """Run `job`. `at_end` is called once, in `finish` or `end_all`, when no thread touches the
        memory of `job` any more. A small job has run, and ended, when this returns."""
        if job.num_bytes < self._run_here_below_bytes:
            self._mover.run(job)
            at_end(job)
            return
        self._mover.submit(job)
        self._jobs[job] = owner, at_end
        self.num_bytes[owner] += job.num_bytes

    def finish(self) -> None:
        """End the jobs that have completed."""
        for job in self._mover.reap():
            owner, at_end = self._jobs.pop(job)
            self.num_bytes[owner] -= job.num_bytes
            if not self.num_bytes[owner]:
                del self.num_bytes[owner]
            at_end(job)

    def end_all(self, owner: Hashable) -> None:
        """Cancel the jobs of `owner`, and return when they have ended: after a piece of 256 KiB for
        each thread. Jobs of others may end meanwhile."""
        for job in [job for job, (one, _) in self._jobs.items() if one == owner]:
            self._mover.cancel(job)
        completions = poll()
        completions.register(self.fileno(), POLLIN)
        while owner in self.num_bytes:
            completions.poll()
            self.finish()

    def close(self) -> None:
        """Cancel all jobs and end the threads."""
        self._mover.close()
