"""Where callers leave requests for the I/O thread, without a lock and without waiting.

Appending to and popping from a deque are atomic in CPython, and a byte in a socket wakes the
thread. What is left behind when the thread has gone is answered by whoever finds it.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remote_server.client.get_window import GetTransfer
from remote_server.client.put_transfer import PutTransfer
from remote_server.client.requests import Ask
from remote_server.client.results import GetOutcome
from remote_server.errors import KVFerryError, ServerUnavailable


@dataclass(slots=True, eq=False)
class Call:
    """Something to be done on the I/O thread, in its turn among the requests."""

    run: Callable[[], None]


Submission = Ask | GetTransfer | PutTransfer | Call


class Mailbox:
    """A queue that any thread may submit to and one thread takes from."""

    def __init__(self) -> None:
        self._waiting: deque[Submission] = deque()
        self._woken = False
        self.closed = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def fileno(self) -> int:
        """Readable while there may be something to take."""
        return self._reader.fileno()

    def submit(self, submission: Submission) -> None:
        """Hand over a request; when closed, end it here and now."""
        self._waiting.append(submission)
        if self.closed:
            self._turn_all_away()
        elif not self._woken:
            self._woken = True
            self.wake()

    def wake(self) -> None:
        """Let the taker look, whether or not there is something to take."""
        # BlockingIOError: it has been woken often enough. OSError: it is closed.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def take(self) -> Iterator[Submission]:
        """What has been submitted so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        # After the bytes are gone, or one that came meanwhile would be gone with them and nobody
        # would ever wake us again; before looking, so that whoever submits from here on does.
        self._woken = False
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        """End what waits, and from now on everything that is submitted."""
        self.closed = True
        # Whoever appended before this line is found here; whoever does after it sees `closed`.
        self._turn_all_away()
        self._reader.close()
        self._writer.close()

    def _turn_all_away(self) -> None:
        error = ServerUnavailable("the client was closed")
        with contextlib.suppress(IndexError):
            while True:
                turn_away(self._waiting.popleft(), error)


def turn_away(submission: Submission, error: KVFerryError) -> None:
    """End a request that nobody has taken over, unless it has ended."""
    match submission:
        case Ask():
            if not submission.ended:
                submission.ended = True
                submission.end(error)
        case GetTransfer():
            submission.end(error, GetOutcome.UNAVAILABLE)
        case PutTransfer():
            submission.abandon(error)
        case Call():
            submission.run()
