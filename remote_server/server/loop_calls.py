"""Calls from other threads, run by the server's loop between two turns.

The data path therefore needs no lock: another thread has the loop read or change state, and waits
on a future, for any time.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from remote_server.errors import ServerUnavailable

Answer = TypeVar("Answer")

# Far above the calls that the admin HTTP has under way. More are refused.
MAX_QUESTIONS = 64


class Desk:
    """`ask` on any thread, `answer_one` on the loop's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes the loop take a turn soon, from any thread."""
        self._wake = wake
        self._questions: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def ask(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Have the loop call `question`, which must be quick: the loop serves no request meanwhile.

        The future gets its result or exception. It fails with `ServerUnavailable` when the loop has
        ended or ends, or when `MAX_QUESTIONS` calls wait. It may be cancelled.
        """
        future: Future[Answer] = Future()
        if len(self._questions) >= MAX_QUESTIONS:
            future.set_exception(ServerUnavailable(f"{MAX_QUESTIONS} calls are waiting"))
            return future
        self._questions.append((future, question))
        if self._closed:
            self._refuse_all()
        else:
            self._wake()
        return future

    def answer_one(self) -> None:
        """One a turn, so that many calls delay a request by no more than one."""
        if not self._questions:
            return
        future, question = self._questions.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(question())
            except Exception as error:  # the caller's error, which must never end the server
                future.set_exception(error)
        if self._questions:
            self._wake()

    def close(self) -> None:
        """The loop has ended: fail waiting calls, and all later ones."""
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
