"""CPU times of the threads of two processes, by their part in a transfer."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

CALLER = "caller"
CLIENT, CLIENT_MOVERS, CLIENT_ZMQ = "client", "client's movers", "client's libzmq"
SERVER, SERVER_MOVERS, SERVER_ZMQ = "server", "server's movers", "server's libzmq"
WHO = (CALLER, CLIENT, CLIENT_MOVERS, CLIENT_ZMQ, SERVER, SERVER_MOVERS, SERVER_ZMQ)
"""The movers are the native threads of lanes and of copies; client and server are their loops."""

_OF_CLIENT = {"ZMQ": CLIENT_ZMQ, "kvferry-lanes": CLIENT_MOVERS, "kvferry-mover": CLIENT_MOVERS}
_OF_SERVER = {"ZMQ": SERVER_ZMQ, "kvferry-lanes": SERVER_MOVERS, "kvferry-mover": SERVER_MOVERS}
"""By the beginning of a thread's name."""


class ThreadTimes:
    """Sums the CPU time of the threads of this process and of a server's during `around`, which
    the main thread calls."""

    def __init__(self, server: int) -> None:
        """`server` is the server's process id."""
        self._server = server
        self.trials: list[Counter[str]] = []
        """Nanoseconds by thread, for each call of `around`."""

    def around(self, run: Callable[[], object]) -> None:
        """Call `run` and record each thread's CPU time meanwhile."""
        before = self._now()
        run()
        spent = Counter(self._now())
        spent.subtract(before)
        self.trials.append(spent)

    def _now(self) -> dict[str, int]:
        times = dict.fromkeys(WHO, 0)
        # The kernel updates a running thread's figure at ticks; this thread is running.
        times[CALLER] = time.thread_time_ns()
        for is_main, name, nanoseconds in _threads(os.getpid()):
            if not is_main:
                times[_who(name, _OF_CLIENT, CLIENT)] += nanoseconds
        for _, name, nanoseconds in _threads(self._server):
            times[_who(name, _OF_SERVER, SERVER)] += nanoseconds
        return times


def _who(name: str, known: Mapping[str, str], other: str) -> str:
    return next((who for start, who in known.items() if name.startswith(start)), other)


def _threads(process: int) -> Iterable[tuple[bool, str, int]]:
    """For each thread: whether it is the main one, its name, and its CPU time so far."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            ran = int((thread / "schedstat").read_text().split()[0])
            yield thread.name == str(process), (thread / "comm").read_text().strip(), ran
        except FileNotFoundError:  # the thread has ended
            continue
