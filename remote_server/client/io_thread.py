"""I/O thread: the turns of the loops of any number of clients, one loop for each server.

In one round every loop has a turn that has something to receive, to take over or to send, or whose
time has come; an idle loop costs a comparison. A turn copies or receives some MiB at most, so a
loop with much to copy delays the others by a millisecond or two.
"""

import logging
import select
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Protocol, TypeVar

import zmq

from remote_server.client.connection.poll_set import PollSet
from remote_server.client.requests.mailbox import Call, Mailbox
from remote_server.errors import ConfigError

logger = logging.getLogger(__name__)

# A connection has three sockets: its own, and both ends of its monitor.
_MAX_SOCKETS = 16_383

# Pause of a loop after an unexpected exception: a bug met on every turn must not use a whole core.
_RECOVERY_PAUSE_S = 0.05

_LONGEST_WAIT_S = 3600.0


class TakesTurns(Protocol):
    """The loop of one server."""

    poll_set: PollSet

    @property
    def ended(self) -> bool:
        """It has no further turn, and has closed its poll set."""

    def turn(self, readable: dict[object, int]) -> float:
        """Do what is due, given the sockets with something to receive. Returns the seconds until
        the next turn if nothing comes before."""

    def recover(self, cause: BaseException) -> None:
        """End all its requests, because a turn raised `cause`. Raises nothing."""

    def wake(self) -> None:
        """Make its poll set readable."""

    def stop(self) -> None:
        """End it in its next turns."""


AnyLoop = TypeVar("AnyLoop", bound=TakesTurns)


class IoThread:
    """One thread and one libzmq context for the clients that are made with it.

    Any thread may use it. Callbacks of all futures of its clients run on it, so a callback must not
    wait for a request of any of them.
    """

    def __init__(self) -> None:
        self.zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zmq_context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._adding = threading.Lock()
        self._mailbox = Mailbox()
        self._stopping = False
        self._loops: dict[int, TakesTurns] = {}
        """By the descriptor of the poll set."""
        self._due: dict[TakesTurns, float] = {}
        """Time of the next turn of each loop if nothing comes before."""
        self._unsure: dict[TakesTurns, None] = {}
        """Loops that had a turn after the last poll that found nothing."""
        self._paused: set[TakesTurns] = set()
        """Loops that do not receive until they are due."""
        self._epoll = select.epoll()
        self._epoll.register(self._mailbox.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    # ── called by any thread ─────────────────────────────────────────────────────────────

    def add(self, make: Callable[[], AnyLoop]) -> AnyLoop:
        """Give turns to the loop that `make` returns. Raises what `make` raises, and `ConfigError`
        when this thread has ended."""
        with self._adding:  # the context must not end meanwhile
            if self._mailbox.closed:
                raise ConfigError("io: this I/O thread was closed")
            loop = make()
            self._mailbox.submit(Call(partial(self._begin, loop)))
        self._wake_loops()
        return loop

    def stop(self) -> None:
        """Start the shutdown: every request of every client ends, then the thread."""
        self._stopping = True
        self._mailbox.wake()
        for loop in tuple(self._loops.values()):
            loop.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. False when it has not, or when called on it."""
        if self.is_current_thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 1.0) -> None:
        """Close every client that was made with it, and end the thread. Idempotent.

        Returns after `timeout_s` at the latest. All requests have ended by then, except puts whose
        rows libzmq has not released yet.
        """
        self.stop()
        self.join(timeout_s)

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _wake_loops(self) -> None:
        # The only loop waits in its own poll set, which the mailbox of this thread does not wake.
        for loop in tuple(self._loops.values()):
            loop.wake()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._round()
            except BaseException as error:
                # A bug of this file. Callers must not wait for a dead thread.
                logger.exception("client: unexpected error; all requests in flight end")
                for loop in tuple(self._due):
                    self._recover(loop, error)
        self.zmq_context.destroy(linger=0)
        self._epoll.close()

    def _is_over(self) -> bool:
        """Every loop has ended, and no other can be added any more."""
        if not self._stopping or self._loops or self._mailbox:
            return False
        with self._adding:
            if not self._mailbox:
                self._mailbox.close()
        return self._mailbox.closed

    def _take_over(self) -> None:
        for call in self._mailbox.take():
            assert isinstance(call, Call)
            call.run()

    def _round(self) -> None:
        """Wait for work, and give one turn to each loop that has some."""
        if self._mailbox:
            self._take_over()
        now = monotonic()
        next_at = min(self._due.values(), default=inf)
        if len(self._due) == 1 and not self._paused:
            (loop,) = self._due
            self._turn(loop, max(0.0, next_at - now))  # one wait instead of two
            return
        turns, self._unsure = self._unsure, {}
        self._wait(0.0 if turns else max(0.0, next_at - now), turns)
        now = monotonic()
        if next_at <= now:
            turns |= dict.fromkeys(loop for loop, due_at in self._due.items() if due_at <= now)
        for loop in turns:
            if not loop.ended:
                self._turn(loop, 0.0)

    def _wait(self, wait_s: float, turns: dict[TakesTurns, None]) -> None:
        """Add the loops with a signal to `turns`."""
        timeout_s = None if wait_s == inf else min(wait_s, _LONGEST_WAIT_S)
        for descriptor, _ in self._epoll.poll(timeout_s):
            if descriptor in self._loops:
                turns[self._loops[descriptor]] = None
            else:
                self._take_over()

    # ── a loop ───────────────────────────────────────────────────────────────────────────

    def _begin(self, loop: TakesTurns) -> None:
        self._loops[loop.poll_set.fileno()] = loop
        self._epoll.register(loop.poll_set.fileno(), select.EPOLLIN)
        self._due[loop] = monotonic()
        self._unsure = dict.fromkeys(self._due)
        if self._stopping:
            loop.stop()

    def _turn(self, loop: TakesTurns, wait_s: float) -> None:
        """Give `loop` a turn once something comes or it is due, within `wait_s`."""
        if loop in self._paused:
            self._paused.remove(loop)
            self._epoll.register(loop.poll_set.fileno(), select.EPOLLIN)
        try:
            readable = loop.poll_set.poll(wait_s)
            if not readable and monotonic() < self._due[loop]:
                return
            self._unsure[loop] = None
            self._due[loop] = loop.turn(readable) + monotonic()
        except BaseException as error:
            # Any exception here is a bug of ours. Callers must not wait for a dead loop: end all
            # its requests, open new connections, and log it.
            logger.exception("client: unexpected error; all requests in flight end")
            self._recover(loop, error)
        if loop.ended:
            self._remove(loop)

    def _recover(self, loop: TakesTurns, cause: BaseException) -> None:
        loop.recover(cause)
        if loop.ended or loop in self._paused:
            return
        self._paused.add(loop)
        self._epoll.unregister(loop.poll_set.fileno())
        self._due[loop] = monotonic() + _RECOVERY_PAUSE_S

    def _remove(self, loop: TakesTurns) -> None:
        del self._due[loop]
        self._unsure.pop(loop, None)
        self._paused.discard(loop)
        self._loops = {number: one for number, one in self._loops.items() if one is not loop}
