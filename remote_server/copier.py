"""One background thread for the slow part of a request: copying and hashing bytes."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from remote_server.config import MiB

log = logging.getLogger(__name__)

# What the copy thread may be behind by before the server stops reading requests. At 2 GB/s it
# is 16 ms of work, well inside the 50 ms a lookup may take while it waits behind it.
MAX_QUEUED_BYTES = 32 * MiB


class Gate:
    """A door before a piece of work, always open, that a test can shut.

    A thread of its own waits there; a loop asks `is_open`, and is told by `on_open`.
    """

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self._open = threading.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        self._open.wait()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Whoever reaches the gate waits there until this block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
            self._on_open()

    def open_for_good(self) -> None:
        self._open.set()


@dataclass(slots=True)
class Job:
    """`work` runs on the copy thread and gives one verdict per block; `finish` gets them on
    the thread that calls `Copier.finish_jobs`, or None if `work` failed as a whole."""

    work: Callable[[], list[bool]]
    finish: Callable[[list[bool] | None], None]
    num_bytes: int
    verdicts: list[bool] | None = None


class Copier:
    """Runs jobs in the order submitted, on one thread: copies then follow one another through
    the cache instead of competing for it, and forced puts land in the order they came.

    `wakeup` becomes readable when jobs are done: poll it, then call `finish_jobs`.
    """

    def __init__(self) -> None:
        self.gate = Gate(on_open=self.wake)
        self.queued_bytes = 0
        self.wakeup, self._wake = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wake.setblocking(False)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Job] = deque()
        self._unfinished = 0
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)

    @property
    def busy(self) -> bool:
        """Some job has been submitted and not finished."""
        return self._unfinished > 0

    @property
    def full(self) -> bool:
        return self.queued_bytes > MAX_QUEUED_BYTES

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self.queued_bytes += job.num_bytes
        self._unfinished += 1
        self._jobs.put(job)

    def finish_jobs(self) -> None:
        """Call `finish` of every job that is done. An exception there is for the caller."""
        self._drain_wakeup()
        while self._done:
            job = self._done.popleft()
            self.queued_bytes -= job.num_bytes
            self._unfinished -= 1
            job.finish(job.verdicts)

    def wake(self) -> None:
        """Make `wakeup` readable, from any thread or signal handler."""
        with suppress(OSError):  # full, so readable already; or closed, and nobody is asleep
            self._wake.send(b"\0")

    def stop(self) -> None:
        """Let the job at hand end and forget the others. What they wrote stays unpublished."""
        self.gate.open_for_good()
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self.wakeup.close()
        self._wake.close()

    def _drain_wakeup(self) -> None:
        with suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.gate.wait()
            try:
                job.verdicts = job.work()
            except Exception:  # whatever it was, this thread must live: all puts need it
                log.exception("a copy failed; its blocks are dropped")
            self._done.append(job)
            self.wake()
