"""Copy jobs: copying and hashing bytes, a turn at a time on the loop thread."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from remote_server.fault_points import Gate
from remote_server.guard import Guard
from remote_server.sizes import MiB
from remote_server.turns import Turns

log = logging.getLogger(__name__)

# Bytes copied before requests get their turn again: about half a millisecond.
TURN_BYTES = 4 * MiB

# While more bytes wait to be copied, a put is answered only after its copy, so that its sender
# waits. Little, because bytes that wait fall out of the CPU's cache.
MAX_QUEUED_BYTES = 4 * MiB


class Job(Protocol):
    """Work on bytes, a turn at a time."""

    @property
    def num_bytes(self) -> int:
        """The bytes of a put, until they are copied; otherwise 0."""

    def work_some(self) -> bool:
        """Work for one turn. True when there is nothing left to do."""

    def end(self, failed: bool) -> None:
        """Called once: when `work_some` has returned True, or has raised."""


@dataclass(slots=True)
class BlockJob:
    """`work(i)` returns the verdict on block i of `num_blocks`; `finish` gets all of them, or None
    if `work` raised."""

    work: Callable[[int], bool]
    num_blocks: int
    num_bytes: int
    finish: Callable[[list[bool] | None], None]
    verdicts: list[bool] = field(default_factory=list)

    def work_some(self) -> bool:
        start, end = len(self.verdicts), self.num_blocks
        if self.num_bytes > TURN_BYTES:
            end = min(end, start + max(1, TURN_BYTES * self.num_blocks // self.num_bytes))
        self.verdicts += map(self.work, range(start, end))
        return end == self.num_blocks

    def end(self, failed: bool) -> None:
        self.finish(None if failed else self.verdicts)


class Copier:
    """Jobs of all connections, in turns. Those of one connection are done in the order submitted,
    so that its forced puts take effect in order of arrival.

    A thread of its own gains nothing: libzmq's thread already receives while this copies, and two
    Python threads lost more by passing the interpreter's lock than they gained by overlap.

    `wakeup` becomes readable when `wake` is called; poll it, then call `drain_wakeup`.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.gate = Gate(on_open=self.wake)
        self.wakeup, self._wake = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wake.setblocking(False)
        self._turns: Turns[Job] = Turns()

    @property
    def busy(self) -> bool:
        """Some job has been submitted and not finished."""
        return bool(self._turns.num_waiting)

    @property
    def queued_bytes(self) -> int:
        """Of the jobs that are not finished."""
        return self._turns.num_bytes

    def is_full(self) -> bool:
        """So much waits that the answer to a put must wait for its copy."""
        return self._turns.num_bytes > MAX_QUEUED_BYTES

    @property
    def num_jobs(self) -> int:
        """Those submitted and not finished."""
        return self._turns.num_waiting

    def submit(self, job: Job, client: bytes = b"", tenant: str = "") -> None:
        """Queue `job`, of the connection `client` of `tenant`."""
        self._turns.add(tenant, client, job, job.num_bytes)

    def copy_some(self) -> bool:
        """Give the next job its turn. True when there is more to do at once."""
        if not self._turns.num_waiting or not self.gate.is_open:
            return False
        self._turns.take_turn(self._work_some)
        return self.busy

    def _work_some(self, job: Job) -> bool:
        try:
            if not job.work_some():
                return False
        except Exception:  # one job must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
            self._guard.run("the end of a copy", partial(job.end, True), None)
        else:
            self._guard.run("the end of a copy", partial(job.end, False), None)
        return True

    def wake(self) -> None:
        """Make `wakeup` readable, from any thread or signal handler."""
        with suppress(OSError):  # full, so readable already; or closed, and no thread polls it
            self._wake.send(b"\0")

    def drain_wakeup(self) -> None:
        with suppress(BlockingIOError):
            while len(self.wakeup.recv(4096)) == 4096:
                pass

    def stop(self) -> None:
        """Drop unfinished jobs. Their blocks stay unpublished."""
        self._turns.drop_all()
        self.wakeup.close()
        self._wake.close()
