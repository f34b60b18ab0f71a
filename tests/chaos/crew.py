"""Clients with a proxy each, faults on their ways, and what this process holds for them.

A crew works in rounds. Between two rounds nothing is under way and no fault is active, and it
holds no more files and threads than after its warm-up.
"""

import ctypes
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from actors import SETTLE_S, Actor, Habits, Totals
from chaos_client import LANE_PAUSE_S, eager_lanes
from chaos_server import eventually
from fault_proxy import FaultProxy
from lane_storm import LaneStorm
from sky import Sky
from weather import Weather

from remote_server.client import RemoteClient
from remote_server.native.job import Job, Kind
from remote_server.native.mover import run

_STORM_PAUSE_S = 0.005
"""The longest before a lane is opened again, in a storm."""


class Progress(NamedTuple):
    operations: int
    faulted: int
    faults: int


class Held(NamedTuple):
    """What a process holds."""

    files: int
    threads: int

    @classmethod
    def by(cls, pid: int, *, beside: str = "\0") -> "Held":
        """`beside`: a folder whose files do not count."""
        files = 0
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                files += not os.readlink(f"/proc/{pid}/fd/{name}").startswith(beside)
            except FileNotFoundError:  # closed in the meantime, or that of the listing
                continue
        return cls(files, len(os.listdir(f"/proc/{pid}/task")))

    def fits(self, most: "Held") -> bool:
        return self.files <= most.files and self.threads <= most.threads


@dataclass
class Tally:
    """What became of a crew's operations, and which faults its ways had."""

    totals: Totals = field(default_factory=Totals)
    faults: Counter[str] = field(default_factory=Counter)
    tampered: int = 0
    cuts: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """See `LaneStorm`."""

    operations: int = 0
    faulted: int = 0

    def add(self, other: "Tally") -> None:
        self.totals.add(other.totals)
        self.faults.update(other.faults)
        self.tampered += other.tampered
        self.cuts.update(other.cuts)
        self.operations += other.operations
        self.faulted += other.faulted


class Memory(NamedTuple):
    """Of this process."""

    objects: int
    """Blocks that Python has allocated, garbage included."""

    heap: int
    """Bytes that malloc has handed out: resident memory without what it keeps."""


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallocInfo


@dataclass(frozen=True)
class CrewPlan:
    number: int
    seed: int
    transports: tuple[str, ...]
    habits: Habits = field(default_factory=Habits)
    calm: bool = False
    """Without faults on the way."""

    storm: bool = False
    """Faults of lanes alone, in place of the usual weather."""


class Crew:
    """All but `progress` raise what was wrong with bytes, requests or books."""

    def __init__(self, plan: CrewPlan, endpoint: str, server_sky: Sky) -> None:
        self._plan = plan
        open_once()
        self._before = Held.by(os.getpid())
        self._stack = ExitStack()
        self._stack.enter_context(eager_lanes(_STORM_PAUSE_S if plan.storm else LANE_PAUSE_S))
        number = plan.number * len(plan.transports)
        self._proxies = [
            self._stack.enter_context(FaultProxy(endpoint, plan.seed + number + at))
            for at in range(len(plan.transports))
        ]
        self._skies = [Sky() for _ in self._proxies]
        self._actors = [
            Actor(
                f"{transport} {number + at}", plan.seed, proxy.endpoint, transport, plan.habits,
                (sky, server_sky),
            )
            for at, (transport, proxy, sky) in enumerate(
                zip(plan.transports, self._proxies, self._skies, strict=True)
            )
        ]  # fmt: skip
        self._weather: Weather | LaneStorm | None = None
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._tally = Tally()

    def warm_up(self) -> None:
        """Use everything once. What is open afterwards may be open between rounds."""
        for actor in self._actors:
            actor.warm_up()
        self._most = steady(lambda: Held.by(os.getpid()))

    def begin(self, round_number: int) -> None:
        """Let all work, in the weather of this round, until `stop`."""
        seed = f"{self._plan.seed}/crew {self._plan.number}/round {round_number}"
        self._over.clear()
        if self._plan.storm:
            self._weather = LaneStorm(seed, self._proxies, self._skies)
        else:
            self._weather = Weather(seed, None, self._proxies, skies=self._skies)
        self._threads = [
            threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in self._actors
        ]
        for thread in self._threads:
            thread.start()
        if not self._plan.calm:
            self._weather.start()

    def progress(self) -> Progress:
        """Since the start. Raises the first error of a client."""
        if self._errors:
            raise self._errors[0]
        assert self._weather is not None
        return Progress(
            sum(actor.num_operations for actor in self._actors),
            sum(actor.num_faulted for actor in self._actors),
            self._tally.faults.total() + self._weather.faults.total(),
        )

    def stop(self) -> None:
        """End the round: no fault is left, and every operation has ended."""
        self._over.set()
        if self._weather is not None and not self._plan.calm:
            self._weather.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._weather is not None:
            self._tally.faults.update(self._weather.faults)
            if isinstance(self._weather, LaneStorm):
                self._tally.cuts.update(self._weather.cuts)
            self._weather.faults.clear()
        if self._errors:
            raise self._errors[0]

    def settle(self, patience_s: float = SETTLE_S) -> None:
        """Between two rounds: all are ready and hold nothing, `patience_s` from now at the
        latest."""
        for actor in self._actors:
            actor.settle(patience_s)
        number = self._plan.number
        no_more_than(self._most, lambda: Held.by(os.getpid()), f"crew {number}", patience_s)

    def aim(self, endpoint: str) -> None:
        """New connections lead to this server."""
        for proxy in self._proxies:
            proxy.target = endpoint

    def tally(self) -> Tally:
        """Of all rounds so far; between two rounds."""
        tally = Tally()
        tally.add(self._tally)
        for actor in self._actors:
            tally.totals.add(actor.totals())
            tally.operations += actor.num_operations
            tally.faulted += actor.num_faulted
            tally.faults["attachment lost"] += actor.num_detached
        tally.tampered = sum(sum(proxy.counts.values()) for proxy in self._proxies)
        return tally

    @property
    def clients(self) -> list[RemoteClient]:
        """Until one of them is closed and opened again."""
        return [actor.client for actor in self._actors]

    def memory(self) -> Memory:
        """Any time."""
        info = _mallinfo2()
        return Memory(sys.getallocatedblocks(), int(info.uordblks + info.hblkhd))

    def end(self) -> None:
        """Close every client. Nothing is left of them; the crew does not work again."""
        for actor in self._actors:
            actor.end()
        eventually(
            lambda: not any(proxy.num_connections for proxy in self._proxies),
            "no connection is left",
        )

    def close(self) -> None:
        """End the proxies, and rounds that have failed."""
        self._over.set()
        self._stack.close()

    def _act(self, actor: Actor) -> None:
        try:
            actor.run(lambda: not (self._over.is_set() or self._errors))
        except BaseException as error:
            self._errors.append(error)


def open_once() -> None:
    """Open what a process keeps for the rest of its life once it has had a client or a `Sky`: the
    mover of copies, pyzmq's thread that frees messages, and the file of shared memory."""
    run(Job(Kind.COPY, [], [], []))
    Sky()
    with zmq.Context() as context, context.socket(zmq.PAIR) as to, context.socket(zmq.PAIR) as at:
        at.bind("inproc://once")
        to.connect("inproc://once")
        to.send(bytearray(1 << 20), copy=False)
        at.recv()


def no_more_than(
    most: Held, look: Callable[[], Held], who: str, patience_s: float = SETTLE_S
) -> None:
    """Wait until `look` returns at most `most`. AssertionError after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not (held := look()).fits(most):
        assert time.monotonic() < deadline, f"{who} has {held}, and had {most}"
        time.sleep(0.01)


def steady(look: Callable[[], Held]) -> Held:
    """What `look` returns once it returns the same ten times in a row."""
    seen: list[Held] = []

    def is_steady() -> bool:
        seen.append(look())
        return len(seen) >= 10 and len(set(seen[-10:])) == 1

    eventually(is_steady, "the number of open files and threads stands")
    return seen[-1]


def medians(values: Sequence[float]) -> tuple[float, float]:
    """Of their second quarter and of the last: what has grown meanwhile goes on growing."""
    quarter = len(values) // 4
    return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
