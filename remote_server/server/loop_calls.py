"""Questions from other threads, answered by the server's loop between two turns.

So nothing on the data path needs a lock: what another thread wants to know or to have done, it
asks for here and waits, as long as it likes, on a future.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from remote_server.errors import ServerUnavailable

Answer = TypeVar("Answer")

# Far above what the one who asks has under way. More are refused rather than remembered.
MAX_QUESTIONS = 64


class Desk:
    """`ask` on any thread, `answer_one` on the loop's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes the loop take a turn soon, whoever calls it."""
        self._wake = wake
        self._questions: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def ask(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Have the loop call `question`, which must be quick: nobody is served meanwhile.

        What it returns or raises is the future's. The future fails with `ServerUnavailable` when
        the loop has ended, ends, or is asked too much at once. Cancelling it is fine.
        """
        future: Future[Answer] = Future()
        if len(self._questions) >= MAX_QUESTIONS:
            future.set_exception(ServerUnavailable(f"{MAX_QUESTIONS} questions are waiting"))
            return future
        self._questions.append((future, question))
        if self._closed:
            self._refuse_all()
        else:
            self._wake()
        return future

    def answer_one(self) -> None:
        """One a turn, so that many questions delay nobody by more than one."""
        if not self._questions:
            return
        future, question = self._questions.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(question())
            except Exception as error:  # it is the asker's, and must never end the server
                future.set_exception(error)
        if self._questions:
            self._wake()

    def close(self) -> None:
        """The loop has ended: whoever waits, or asks from now on, is told so."""
        self._closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while True:
            try:  # two threads may be here at once
                future, _ = self._questions.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(ServerUnavailable("the server is stopping"))
