"""An object in a process of its own, whose methods this process calls.

Calls go through its standard input, pickled, one at a time, and what they return or raise comes
back through its standard output. It ends with its input, so it never outlives the test.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

_GRACE_S = 60.0


class OwnedProcess:
    """`program` answers once when it has begun, and `serve`s then. One thread may call it."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(program).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address: str = self._answer()
        """What it has answered: where it listens."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *arguments: object) -> Any:
        """What the object's method gives; raises what it raises."""
        pickle.dump((name, arguments), self._pipe("stdin"))
        self._pipe("stdin").flush()
        return self._answer()

    def close(self) -> None:
        """End the process. Safe to repeat."""
        if self._process.poll() is None:
            self._pipe("stdin").close()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._pipe("stdout").close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        answer = pickle.load(self._pipe("stdout"))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _pipe(self, name: str) -> BinaryIO:
        return cast(BinaryIO, getattr(self._process, name))


def serve(address: str, do: Callable[..., object]) -> None:
    """Report `address`, and `do` what the input has, one call after the other, until it ends."""
    _say(address)
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _say(do(name, *arguments))
        except Exception as error:
            _say(error)


def _say(answer: object) -> None:
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()
