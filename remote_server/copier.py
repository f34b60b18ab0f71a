"""The slow part of a request: copying and hashing bytes, a turn at a time on the loop thread."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from remote_server.config import MiB
from remote_server.guard import Guard

log = logging.getLogger(__name__)

# What is copied before requests get their turn again: about half a millisecond.
TURN_BYTES = 4 * MiB

# What may wait to be copied before a put is answered only when it has been copied, so that its
# sender waits. Little, because bytes that wait leave the CPU's cache.
MAX_QUEUED_BYTES = 4 * MiB


class Gate:
    """A door before a piece of work, always open, that a test can shut.

    A loop asks `is_open` before each turn of it, and is told by `on_open`; a thread of its own
    waits there.
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

    def open_for_good(self) -> None:
        self._open.set()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """What is behind the gate waits until this block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
            self._on_open()


@dataclass(slots=True)
class Job:
    """`work(i)` gives the verdict on block i of `num_blocks`; `finish` gets all of them, or None
    if `work` failed."""

    work: Callable[[int], bool]
    num_blocks: int
    num_bytes: int
    finish: Callable[[list[bool] | None], None]
    verdicts: list[bool] = field(default_factory=list)

    def work_some(self) -> bool:
        """Do what fits into one turn. True when there is nothing left to do."""
        start, end = len(self.verdicts), self.num_blocks
        if self.num_bytes > TURN_BYTES:
            end = min(end, start + max(1, TURN_BYTES * self.num_blocks // self.num_bytes))
        self.verdicts += map(self.work, range(start, end))
        return end == self.num_blocks


class Copier:
    """Jobs in the order submitted, so that forced puts land in the order they came.

    Not on a thread of its own: libzmq's thread already receives while this copies, and two
    threads of Python cost more in handing the interpreter to and fro than their overlap gained.

    `wakeup` becomes readable when somebody calls `wake`; poll it, then call `drain_wakeup`.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.gate = Gate(on_open=self.wake)
        self.queued_bytes = 0
        self.wakeup, self._wake = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wake.setblocking(False)
        self._jobs: deque[Job] = deque()

    @property
    def busy(self) -> bool:
        """Some job has been submitted and not finished."""
        return bool(self._jobs)

    @property
    def full(self) -> bool:
        return self.queued_bytes > MAX_QUEUED_BYTES

    @property
    def num_jobs(self) -> int:
        """Those submitted and not finished."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        self.queued_bytes += job.num_bytes
        self._jobs.append(job)

    def copy_some(self) -> bool:
        """Give the oldest job a turn. True when there is more to do at once."""
        if not self._jobs or not self.gate.is_open:
            return False
        job = self._jobs[0]
        verdicts: list[bool] | None = None
        try:
            if not job.work_some():
                return True
            verdicts = job.verdicts
        except Exception:  # one job must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
        self._jobs.popleft()
        self.queued_bytes -= job.num_bytes
        self._guard.run("the end of a copy", partial(job.finish, verdicts), None)
        return self.busy

    def wake(self) -> None:
        """Make `wakeup` readable, from any thread or signal handler."""
        with suppress(OSError):  # full, so readable already; or closed, and nobody is asleep
            self._wake.send(b"\0")

    def drain_wakeup(self) -> None:
        with suppress(BlockingIOError):
            while len(self.wakeup.recv(4096)) == 4096:
                pass

    def stop(self) -> None:
        """Forget what was not finished. What it wrote stays unpublished."""
        self._jobs.clear()
        self.wakeup.close()
        self._wake.close()
