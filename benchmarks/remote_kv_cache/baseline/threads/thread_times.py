"""CPU times of the threads of two processes, by their part in a transfer."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

CALLER, CLIENT, CLIENT_ZMQ = "caller", "client", "client's libzmq"
SERVER, SERVER_ZMQ = "server", "server's libzmq"
WHO = (CALLER, CLIENT, CLIENT_ZMQ, SERVER, SERVER_ZMQ)


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
                times[CLIENT_ZMQ if name.startswith("ZMQ") else CLIENT] += nanoseconds
        for _, name, nanoseconds in _threads(self._server):
            times[SERVER_ZMQ if name.startswith("ZMQ") else SERVER] += nanoseconds
        return times


def _threads(process: int) -> Iterable[tuple[bool, str, int]]:
    """For each thread: whether it is the main one, its name, and its CPU time so far."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            ran = int((thread / "schedstat").read_text().split()[0])
            yield thread.name == str(process), (thread / "comm").read_text().strip(), ran
        except FileNotFoundError:  # the thread has ended
            continue
