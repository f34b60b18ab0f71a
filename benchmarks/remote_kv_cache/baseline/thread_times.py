"""How long each thread of two processes ran, by what it does for a transfer."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

CALLER, CLIENT, CLIENT_ZMQ = "caller", "client", "client's libzmq"
SERVER, SERVER_ZMQ = "server", "server's libzmq"
WHO = (CALLER, CLIENT, CLIENT_ZMQ, SERVER, SERVER_ZMQ)


class ThreadTimes:
    """Adds up what the threads of this process and of a server's ran inside `around`, which the
    main thread calls."""

    def __init__(self, server: int) -> None:
        """`server` is the process that serves."""
        self._server = server
        self.trials: list[Counter[str]] = []
        """Nanoseconds by thread, for each call of `around`."""

    def around(self, run: Callable[[], object]) -> None:
        """Call `run` and note what ran meanwhile."""
        before = self._now()
        run()
        spent = Counter(self._now())
        spent.subtract(before)
        self.trials.append(spent)

    def _now(self) -> dict[str, int]:
        times = dict.fromkeys(WHO, 0)
        # The kernel's figure for a thread that runs is as old as its last tick; ours runs now.
        times[CALLER] = time.thread_time_ns()
        for is_main, name, nanoseconds in _threads(os.getpid()):
            if not is_main:
                times[CLIENT_ZMQ if name.startswith("ZMQ") else CLIENT] += nanoseconds
        for _, name, nanoseconds in _threads(self._server):
            times[SERVER_ZMQ if name.startswith("ZMQ") else SERVER] += nanoseconds
        return times


def _threads(process: int) -> Iterable[tuple[bool, str, int]]:
    """Of each thread: whether it is the main one, its name, and how long it has run so far."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            ran = int((thread / "schedstat").read_text().split()[0])
            yield thread.name == str(process), (thread / "comm").read_text().strip(), ran
        except FileNotFoundError:  # it has ended meanwhile
            continue
