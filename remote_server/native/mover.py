"""The native mover, and the choice between it and the reference in Python."""

import errno
import os
from array import array
from collections.abc import Iterable
from functools import cache
from threading import Lock
from weakref import finalize

from remote_server.errors import ConfigError, MoverClosed, MoverFull
from remote_server.native.base import CLOSED, Mover
from remote_server.native.handle import Handle
from remote_server.native.job import Job, Kind
from remote_server.native.library import Library, LibraryMissing, load
from remote_server.native.reference import ReferenceMover

VARIABLE = "KVFERRY_MOVER"
"""An environment variable: with `python` every mover is a reference mover. Without it, a mover is
one where there is no library."""

MAX_THREADS, MAX_JOBS = 1024, 1 << 20

# Releasing the GIL costs more than copying this much, when another thread then takes it.
_HOLD_GIL_BELOW_BYTES = 128 << 10


def make_mover(threads: int, max_jobs: int = 1024) -> Mover:
    """A native mover, or a reference mover without a library. `max_jobs` bounds the jobs that are
    submitted and not reaped. Raises `ConfigError` for the variable and `OSError`."""
    if not (0 < threads <= MAX_THREADS and 0 < max_jobs <= MAX_JOBS):
        raise ValueError(f"a mover of {threads} threads and {max_jobs} jobs")
    library = library_or_reason()
    if isinstance(library, Library):
        return NativeMover(library, threads, max_jobs)
    return ReferenceMover(threads, max_jobs)


def what_moves() -> str:
    """The mover that `make_mover` makes: "native, avx512", or "Python: " and the reason."""
    library = library_or_reason()
    if isinstance(library, Library):
        return f"native, {library.instructions}"
    return f"Python: {library}"


def library_or_reason() -> Library | str:
    """The library, or why there is none."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "python":
        return f"{VARIABLE}=python"
    if wanted:
        raise ConfigError(f"{VARIABLE} is {wanted!r:.40}; it may be 'python'")
    try:
        return load()
    except LibraryMissing as error:
        return str(error)


def run(job: Job) -> int:
    """Run `job` on the calling thread; the number of failed operations."""
    return _runner().run(job)


@cache
def _runner() -> Mover:
    """Any process's: `run` uses nothing of a mover but its library."""
    return make_mover(1)


class _Pool(Handle):
    """The pool in C and its jobs."""

    def __init__(self, library: Library, threads: int, max_jobs: int) -> None:
        what = f"mover of {threads} threads and {max_jobs} jobs"
        super().__init__(library.pool_new(threads, max_jobs), what)
        self.jobs: dict[int, Job] = {}
        """Submitted and not reaped, by number."""
        self.freed = False
        self._freeing = Lock()
        self._free = library.pool_free

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:
            address, self.address = self.address, None
        with self._freeing:  # a second call returns no earlier
            if address is not None:
                self._free(address)
                self.freed = True


class NativeMover(Mover):
    """The mover in C.

    It installs a handler of SIGBUS, once a process: in a copy, the signal ends the operation with
    EFAULT. All other SIGBUS go to the handler before it. A handler that is installed later must do
    the same, or restore it and raise the signal again, as `faulthandler` does."""

    def __init__(self, library: Library, threads: int, max_jobs: int) -> None:
        self.threads = threads
        self._library = library
        self._pool = _Pool(library, threads, max_jobs)
        self._numbers = array("q", [0]) * max_jobs
        self._numbers_at = self._numbers.buffer_info()[0]
        self._max_jobs = max_jobs
        # At exit, before the interpreter frees the memory of running jobs.
        finalize(self, self._pool.close)

    def fileno(self) -> int:
        descriptor = self._pool.descriptor(self._library.pool_descriptor)
        if descriptor is None:
            raise MoverClosed(CLOSED)
        return descriptor

    def submit(self, job: Job) -> None:
        pool = self._pool
        if pool.is_foreign:
            raise MoverClosed(CLOSED)
        with pool.lock:
            if job.number:
                raise ValueError("the job is submitted already")
            if pool.address is None:
                raise MoverClosed(CLOSED)
            number = self._library.submit(pool.address, job.header)
            if number > 0:
                job.number = number
                pool.jobs[number] = job
                return
        if number == -errno.EAGAIN:
            raise MoverFull(f"{self._max_jobs} jobs have not been reaped")
        raise ValueError(f"a job of kind {job.kind!r} and priority {job.priority!r}")

    def cancel(self, job: Job) -> bool:
        pool = self._pool
        if pool.is_foreign:
            return False
        with pool.lock:
            if pool.address is None or pool.jobs.get(job.number) is not job:
                return False
            return self._library.cancel(pool.address, job.number) == 0

    def reap(self) -> list[Job]:
        pool = self._pool
        if pool.is_foreign:
            return []
        with pool.lock:
            numbers: Iterable[int]
            if pool.address is None:
                numbers = [*pool.jobs] if pool.freed else []
            else:
                count = self._library.reap(pool.address, self._numbers_at, self._max_jobs)
                numbers = self._numbers[:count]
            jobs = [*map(pool.jobs.pop, numbers)]
            for job in jobs:
                job.number = 0
            return jobs

    def run(self, job: Job) -> int:
        if job.num_bytes < _HOLD_GIL_BELOW_BYTES and job.kind is Kind.COPY:
            return self._library.run_holding_the_gil(job.header)
        return self._library.run(job.header)

    def close(self) -> None:
        self._pool.close()
