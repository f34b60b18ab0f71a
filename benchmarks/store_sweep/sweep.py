"""Rounds of a sweep: processes of clients are started, begin together, and are pooled."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import machine
from benchmarks.store_sweep import conversation, slow_server, talkers
from benchmarks.store_sweep.points import Percentiles, Point, Result
from examples.processes import REPOSITORY, LoggedProcess, RemoteServer
from remote_server.sizes import GiB, MiB

NAMESPACE = "store-sweep"

_START_S = 60.0
_LIVE_CONVERSATIONS = 4
"""Of each client, that memory holds: the one it is in, and room so that its blocks stay."""


class Load(NamedTuple):
    """What each client of each point does."""

    block_bytes: int
    seconds: float
    """It goes on for so long, to the end of a conversation."""

    pause_ms: float = 0.0
    """Before each turn, on average."""


class Storage(NamedTuple):
    """What is emulated behind the server."""

    latency_ms: float
    """Of each block, on average."""

    spread_percent: float
    """How much less, or more, one may take."""

    channels: int
    """Blocks at a time."""

    def __str__(self) -> str:
        return (
            f"each block of a read takes {self.latency_ms:g} ms more in the server, give or take "
            f"{self.spread_percent:g} %, {self.channels} blocks at a time; lookups and writes do "
            "not"
        )


class SlowServerProcess(LoggedProcess):
    """`slow_server` in a process of its own."""

    name = "slow-server"

    def __init__(self, memory: int, storage: Storage) -> None:
        super().__init__(
            [sys.executable, "-m", slow_server.MODULE, "--memory", str(memory),
             "--latency-ms", str(storage.latency_ms), "--channels", str(storage.channels),
             "--spread", str(storage.spread_percent)]
        )  # fmt: skip
        self.endpoint = ""

    def is_ready(self) -> bool:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("ready on "):
                self.endpoint = line.split()[-1]
        return bool(self.endpoint)


def server(
    points: Sequence[Point], block_bytes: int, storage: Storage | None
) -> RemoteServer | SlowServerProcess:
    """The server of a whole sweep, not started. Without a storage it is the ordinary one."""
    most = max(point.concurrency for point in points)
    needed = most * _LIVE_CONVERSATIONS * conversation.BLOCKS * (block_bytes + 4096) * 5 // 4
    memory = max(needed, 256 * MiB)
    machine.skip_unless_fits(memory + GiB, None)
    if storage is not None:
        return SlowServerProcess(memory, storage)
    return RemoteServer(memory=str(memory))


class _Talkers:
    """One process of clients. Ends with the block, whatever it was doing."""

    def __init__(
        self, stack: ExitStack, endpoint: str, load: Load, clients: int, speaker: str
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", talkers.MODULE, endpoint, NAMESPACE, str(load.block_bytes),
             str(clients), str(load.seconds), str(load.pause_ms), speaker],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(self._end)
        patience_s = _START_S + 10 * load.seconds + conversation.NUM_TURNS * load.pause_ms / 500
        patience = threading.Timer(patience_s, self._process.kill)
        patience.daemon = True
        patience.start()
        stack.callback(patience.cancel)

    def wait_until_ready(self) -> None:
        if self._line() != "ready":
            raise RuntimeError("a process of clients did not get ready; its error is above")

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> list[dict[str, Any]]:
        line = self._line()
        if not line:
            raise RuntimeError("a process of clients ended without a result; its error is above")
        return list(json.loads(line))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Round(NamedTuple):
    """One time at one point."""

    talks: list[dict[str, Any]]
    """A `talkers.Talk` of each client."""

    cpu_percent: float | None
    server_percent: float | None

    @property
    def errors(self) -> list[str]:
        return [error for talk in self.talks for error in talk["errors"]]


def run_round(server: LoggedProcess, endpoint: str, point: Point, load: Load, name: str) -> Round:
    """`name` is this round's and point's alone."""
    with ExitStack() as stack:
        processes = [
            _Talkers(stack, endpoint, load, point.clients, f"{name} {number}")
            for number in range(point.processes)
        ]
        for process in processes:
            process.wait_until_ready()
        began, before, server_before_s = time.monotonic(), machine.cpu_times(), _cpu_s(server.pid)
        for process in processes:
            process.begin()
        talks = [talk for process in processes for talk in process.result()]
        took_s, now, server_s = time.monotonic() - began, machine.cpu_times(), _cpu_s(server.pid)
    total = now.total - before.total
    busy = round(100 * (1 - (now.idle - before.idle) / total), 1) if total > 0 else None
    of_server = None
    if server_s is not None and server_before_s is not None:
        of_server = round(100 * (server_s - server_before_s) / took_s, 1)
    return Round(talks, busy, of_server)


def pooled(point: Point, rounds: Sequence[Round]) -> Result:
    """What all clients of a point did, all rounds taken together.

    Percentiles are of all samples together: a mean of each client's percentiles, as in the source,
    hides the slowest. The rate is the sum of the clients' own, on average over the rounds.
    """
    talks = [talk for one in rounds for talk in one.talks]

    def all_of(name: str) -> Percentiles:
        return Percentiles.of([sample for talk in talks for sample in talk[name]])

    rates = [talk["conversations"] / talk["seconds"] for talk in talks if talk["seconds"]]
    tps = sum(rates) / len(rounds)
    return Result(
        point, tps, tps * conversation.TOKENS_BOOKED,
        all_of("lookups"), all_of("reads"), all_of("writes"),
        sum(len(one.errors) for one in rounds),
        _mean([one.cpu_percent for one in rounds]), _mean([one.server_percent for one in rounds]),
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None


def _cpu_s(pid: int) -> float | None:
    """What a process has used of all cores. None where /proc does not say."""
    try:
        # After "pid (name)", where a name may hold spaces and parentheses.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
