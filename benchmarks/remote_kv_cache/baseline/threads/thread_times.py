"""CPU times and context switches of the threads of two processes, by their part in a transfer."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

CALLER = "caller"
CLIENT, CLIENT_MOVERS, CLIENT_ZMQ = "client", "client's movers", "client's libzmq"
SERVER, SERVER_MOVERS, SERVER_ZMQ = "server", "server's movers", "server's libzmq"
WHO = (CALLER, CLIENT, CLIENT_MOVERS, CLIENT_ZMQ, SERVER, SERVER_MOVERS, SERVER_ZMQ)
"""The movers are the native threads of lanes and of copies; client and server are their loops."""

SLEPT, PREEMPTED = "slept", "preempted"
"""Context switches: a thread waited, or another one took its core."""

_OF_CLIENT = {"ZMQ": CLIENT_ZMQ, "kvferry-lanes": CLIENT_MOVERS, "kvferry-mover": CLIENT_MOVERS}
_OF_SERVER = {"ZMQ": SERVER_ZMQ, "kvferry-lanes": SERVER_MOVERS, "kvferry-mover": SERVER_MOVERS}
"""By the beginning of a thread's name."""

_SWITCHES = {"voluntary_ctxt_switches": SLEPT, "nonvoluntary_ctxt_switches": PREEMPTED}


class Spent(NamedTuple):
    """What one call took."""

    time_ns: int
    ran: Mapping[str, int]
    """Nanoseconds by the names of `WHO`."""

    switches: Mapping[str, int]
    """Of all threads together: `SLEPT` and `PREEMPTED`."""

    @property
    def cpu_ns(self) -> int:
        return sum(self.ran.values())


class _Thread(NamedTuple):
    is_main: bool
    name: str
    nanoseconds: int
    switches: Counter[str]


class ThreadTimes:
    """Sums what the threads of this process and of another one take during `around`, which the
    main thread calls. Reading the sums is in no figure."""

    def __init__(self, other: int, *, is_client: bool = False) -> None:
        """`other` is the process id of the server; with `is_client` that of the client: this
        process has the server's part then, as the receiver of a put."""
        self._other = other
        self._is_client = is_client
        self.trials: list[Spent] = []
        """One for each call of `around`."""

    def around(self, run: Callable[[], object]) -> None:
        """Call `run` and record what it takes."""
        ran, switches = self._others()
        began, caller = time.perf_counter_ns(), time.thread_time_ns()
        run()
        caller = time.thread_time_ns() - caller
        time_ns = time.perf_counter_ns() - began
        after, switches_after = self._others()
        after.subtract(ran)
        switches_after.subtract(switches)
        # The kernel updates a running thread's figure at ticks; the calling thread is running.
        after[SERVER if self._is_client else CALLER] += caller
        self.trials.append(Spent(time_ns, {who: after[who] for who in WHO}, switches_after))

    def _others(self) -> tuple[Counter[str], Counter[str]]:
        """The CPU time of all threads but the calling one, and the switches of all."""
        ran: Counter[str] = Counter()
        switches: Counter[str] = Counter()
        for is_here in (True, False):
            of_client = is_here is not self._is_client
            known, loop = (_OF_CLIENT, CLIENT) if of_client else (_OF_SERVER, SERVER)
            for thread in _threads(os.getpid() if is_here else self._other):
                switches += thread.switches
                if not (is_here and thread.is_main):
                    ran[_who(thread.name, known, loop)] += thread.nanoseconds
        return ran, switches


def _who(name: str, known: Mapping[str, str], other: str) -> str:
    return next((who for start, who in known.items() if name.startswith(start)), other)


def _threads(process: int) -> Iterator[_Thread]:
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            ran = int((thread / "schedstat").read_text().split()[0])
            name = (thread / "comm").read_text().strip()
            lines = [line.partition(":") for line in (thread / "status").read_text().splitlines()]
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        switches = Counter({_SWITCHES[one]: int(n) for one, _, n in lines if one in _SWITCHES})
        yield _Thread(thread.name == str(process), name, ran, switches)
