"""The mailbox of the I/O thread: requests, and calls that it runs, from other threads."""

import contextlib
import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from remote_server.client.connection.channel import Request
from remote_server.errors import KVFerryError, ServerUnavailable

logger = logging.getLogger(__name__)

# Holds the GIL, which a write by way of Python releases: the woken thread would take it, and an
# engine's scheduler would get it back only when that thread has no more work.
_ring = ctypes.PyDLL(None).eventfd_write
_ring.argtypes = [ctypes.c_int, ctypes.c_uint64]


@dataclass(slots=True, eq=False)
class Call:
    """A function to run on the I/O thread, in order with the requests."""

    run: Callable[[], None]

    def turn_away(self, error: KVFerryError) -> None:
        """Run it on the thread that ends what the I/O thread has not taken."""
        self.run()


Submission = Request | Call


class Mailbox:
    """A queue that any thread may submit to and one thread takes from."""

    def __init__(self) -> None:
        self._waiting: deque[Submission] = deque()
        self._woken = False
        self.closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def fileno(self) -> int:
        """Readable while there may be something to take."""
        return self._bell

    def submit(self, submission: Submission) -> None:
        """Queue a request. A closed mailbox ends it at once, on the calling thread."""
        self._waiting.append(submission)
        if self.closed:
            self._turn_all_away()
        elif not self._woken:
            self._woken = True
            self.wake()

    def wake(self) -> None:
        """Wake the taker, whether or not there is something to take."""
        with self._bell_lock:  # or the number may be another file's by now
            if self._bell >= 0:
                _ring(self._bell, 1)

    def take(self) -> Iterator[Submission]:
        """Yield what has been submitted so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        # After the read, which would discard a later wake with this one; before the pops, so that
        # every later `submit` wakes the thread again.
        self._woken = False
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        """End all queued requests, and from now on every request submitted."""
        self.closed = True
        # Requests appended before this line are ended here; a later `submit` sees `closed`.
        self._turn_all_away()
        with self._bell_lock:
            if self._bell >= 0:
                os.close(self._bell)
            self._bell = -1

    def _turn_all_away(self) -> None:
        error = ServerUnavailable("the client was closed")
        with contextlib.suppress(IndexError):
            while True:
                submission = self._waiting.popleft()
                try:
                    submission.turn_away(error)
                except Exception:  # the others end all the same
                    logger.exception("client: could not turn away a %s", type(submission).__name__)
