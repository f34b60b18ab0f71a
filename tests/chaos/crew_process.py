"""A crew in a process of its own: one interpreter does not hold all clients and proxies.

Calls go through a pipe, one at a time, and answers come back. The process ignores Ctrl-C, which its
parent answers, and ends with the pipe, so it never outlives the run.
"""

import contextlib
import logging
import multiprocessing
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from actors import SETTLE_S
from chaos_client import Hung, WrongBytes
from crew import Crew, CrewPlan, Memory, Progress, Tally
from sky import Sky

_GRACE_S = 60.0
_KINDS = {kind.__name__: kind for kind in (WrongBytes, Hung)}


class CrewProcess:
    """`Crew`, for any thread."""

    def __init__(self, plan: CrewPlan, endpoint: str, server_sky: Sky) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._one_call = threading.Lock()
        self._process = context.Process(
            target=_serve, args=(theirs, plan, endpoint, server_sky), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def warm_up(self) -> None:
        self._call("warm_up")

    def begin(self, round_number: int) -> None:
        self._call("begin", round_number)

    def progress(self) -> Progress:
        progress: Progress = self._call("progress")
        return progress

    def stop(self) -> None:
        self._call("stop")

    def settle(self, patience_s: float = SETTLE_S) -> None:
        self._call("settle", patience_s)

    def aim(self, endpoint: str) -> None:
        self._call("aim", endpoint)

    def tally(self) -> Tally:
        tally: Tally = self._call("tally")
        return tally

    def memory(self) -> Memory:
        memory: Memory = self._call("memory")
        return memory

    def end(self) -> None:
        self._call("end")

    def close(self) -> None:
        """End the process. Safe to repeat."""
        self._pipe.close()
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, name: str, *arguments: object) -> Any:
        """What the crew's method returns; raises what it raises."""
        with self._one_call:
            self._pipe.send((name, arguments))
            return self._answer()

    def _answer(self) -> Any:
        try:
            kind, answer = self._pipe.recv()
        except EOFError:
            raise AssertionError("the process of a crew ended by itself") from None
        if kind:
            raise _KINDS.get(kind, AssertionError)(answer)
        return answer


def _serve(pipe: Connection, plan: CrewPlan, endpoint: str, server_sky: Sky) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("remote_server").setLevel(logging.ERROR)  # outages are what it is about
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe, or ended
        crew = Crew(plan, endpoint, server_sky)
        try:
            pipe.send(("", None))
            while True:
                name, arguments = pipe.recv()
                pipe.send(_done(crew, name, arguments))
        finally:
            crew.close()


def _done(crew: Crew, name: str, arguments: tuple[object, ...]) -> tuple[str, object]:
    """Empty and the answer, or the kind of the error and its traceback."""
    try:
        return "", getattr(crew, name)(*arguments)
    except BaseException as error:
        return type(error).__name__, "".join(traceback.format_exception(error))
