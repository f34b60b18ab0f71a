"""A fault proxy in a process of its own, for an engine under test.

A `FaultProxy` in the test's process shares its interpreter with the test: while the test computes
or waits for the interpreter, everything on the way stands still, and healthy lookups are late.

    with ProxyProcess(server.endpoint) as proxy:
        proxy.set(Faults(swallowed=BOTH))
        proxy.clear()

What it is to do goes through its standard input, pickled, and its answers come back through its
standard output. It ends with its input, so it never outlives the test.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from fault_proxy import FaultProxy
from faults import CLEAR, Faults

_GRACE_S = 15.0


class ProxyProcess:
    """Listens on `endpoint` and forwards to `target`. One thread at a time may call it."""

    def __init__(self, target: str, seed: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), target, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.endpoint: str = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def set(self, faults: Faults) -> None:
        """What happens to everything that comes by, from the return of this call on."""
        self._call("set", faults)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def reset_connections(self) -> None:
        """End every connection as a broken network does."""
        self._call("reset_connections")

    def aim(self, target: str) -> None:
        """Forward new connections to `target`."""
        self._call("aim", target)

    def count(self, what: str) -> int:
        """`FaultProxy.counts`: what was done to how many units."""
        return int(self._call("count", what))

    def close(self) -> None:
        """End every connection and the process. Safe to repeat."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, name: str, *arguments: object) -> Any:
        """What the proxy's method gives; raises what it raises."""
        pickle.dump((name, arguments), self._pipe("stdin"))
        self._pipe("stdin").flush()
        return self._answer()

    def _answer(self) -> Any:
        answer = pickle.load(self._pipe("stdout"))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _pipe(self, name: str) -> BinaryIO:
        return cast(BinaryIO, getattr(self._process, name))


def _serve(target: str, seed: int) -> None:
    """Do what the input has, one call after the other, until it ends."""
    with FaultProxy(target, seed) as proxy:
        _say(proxy.endpoint)
        while True:
            try:
                name, arguments = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                _say(_do(proxy, name, *arguments))
            except Exception as error:
                _say(error)


def _do(proxy: FaultProxy, name: str, *arguments: Any) -> object:
    match name:
        case "aim":
            (proxy.target,) = arguments
            return None
        case "count":
            (what,) = arguments
            return proxy.counts[what]
        case _:
            return getattr(proxy, name)(*arguments)


def _say(answer: object) -> None:
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
