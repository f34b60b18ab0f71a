"""An object in a process of its own, whose methods this process calls.

Calls go through a pipe, one at a time, and what they return or raise comes back. The process
ignores Ctrl-C, which its parent answers, and ends with the pipe, so it never outlives the test.
"""

import contextlib
import logging
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

_GRACE_S = 60.0


class OwnedProcess:
    """What `make(*arguments)` returns, for any thread. Its `close` is called at the end."""

    def __init__(self, make: Callable[..., Any], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._one_call = threading.Lock()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The object's method: it returns and raises what that does there."""
        return partial(self._call, name)

    def close(self) -> None:
        """End the process. Safe to repeat."""
        self._pipe.close()
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *arguments: object) -> Any:
        with self._one_call:
            self._pipe.send((name, arguments))
            return self._answer()

    def _answer(self) -> Any:
        try:
            kind, answer = self._pipe.recv()
        except EOFError:
            raise AssertionError("an owned process ended by itself") from None
        if kind is not None:
            raise kind(answer)
        return answer


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("remote_server").setLevel(logging.ERROR)  # outages are what it is about
    with contextlib.suppress(EOFError, OSError), contextlib.closing(make(*arguments)) as owned:
        pipe.send((None, None))
        while True:  # until the parent has closed the pipe, or ended
            name, arguments = pipe.recv()
            pipe.send(_done(getattr(owned, name), arguments))


def _done(
    method: Callable[..., object], arguments: tuple[object, ...]
) -> tuple[type[AssertionError] | None, object]:
    """None and the answer, or a kind of failure and the traceback."""
    try:
        return None, method(*arguments)
    except BaseException as error:
        kind = type(error) if isinstance(error, AssertionError) else AssertionError
        return kind, "".join(traceback.format_exception(error))
