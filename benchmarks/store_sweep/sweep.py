"""Points of a sweep, one after another: processes are started, begin together, and are pooled."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.store_sweep import conversation, slow_server, talkers
from benchmarks.store_sweep.points import Percentiles, Point, Result
from examples.processes import REPOSITORY, LoggedProcess, RemoteServer
from remote_server.config import GiB, MiB

NAMESPACE = "store-sweep"

_START_S = 60.0
_LIVE_CONVERSATIONS = 4
"""Of each client, that memory holds: the one it is in, and room so that its blocks stay."""


class SlowServerProcess(LoggedProcess):
    """`slow_server` in a process of its own."""

    name = "slow-server"

    def __init__(self, memory: int, latency_ms: float, channels: int) -> None:
        super().__init__(
            [sys.executable, "-m", slow_server.MODULE, "--memory", str(memory),
             "--latency-ms", str(latency_ms), "--channels", str(channels)]
        )  # fmt: skip
        self.endpoint = ""

    def is_ready(self) -> bool:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("ready on "):
                self.endpoint = line.split()[-1]
        return bool(self.endpoint)


def server(
    points: Sequence[Point], block_bytes: int, latency_ms: float, channels: int
) -> RemoteServer | SlowServerProcess:
    """The server of a whole sweep, not started. Without a latency it is the ordinary one."""
    most = max(point.concurrency for point in points)
    needed = most * _LIVE_CONVERSATIONS * conversation.BLOCKS * (block_bytes + 4096) * 5 // 4
    memory = max(needed, 256 * MiB)
    machine.skip_unless_fits(memory + GiB, None)
    if latency_ms:
        return SlowServerProcess(memory, latency_ms, channels)
    return RemoteServer(memory=str(memory))


class _Talkers:
    """One process of clients. Ends with the block, whatever it was doing."""

    def __init__(
        self, stack: ExitStack, endpoint: str, block_bytes: int, clients: int, seconds: float,
        speaker: str,
    ) -> None:  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", talkers.MODULE, endpoint, NAMESPACE, str(block_bytes),
             str(clients), str(seconds), speaker],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(self._end)
        patience = threading.Timer(_START_S + 10 * seconds, self._process.kill)
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


def run_point(
    endpoint: str, point: Point, block_bytes: int, seconds: float, name: str
) -> tuple[Result, list[str]]:
    """One point: what it came to, and what went wrong. `name` is this point's alone.

    Percentiles are of the samples of all clients together: a mean of each one's percentiles, as in
    the source, hides the slowest. The rate is the sum of the clients' own, each over its own time.
    """
    with ExitStack() as stack:
        processes = [
            _Talkers(stack, endpoint, block_bytes, point.clients, seconds, f"{name} {number}")
            for number in range(point.processes)
        ]
        for process in processes:
            process.wait_until_ready()
        before = _cpu_ticks()
        for process in processes:
            process.begin()
        talks = [talk for process in processes for talk in process.result()]
        total, idle = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
        busy = round(100 * (1 - idle / total), 1) if total > 0 else None
    return pooled(point, talks, busy), [error for talk in talks for error in talk["errors"]]


def pooled(point: Point, talks: Sequence[dict[str, Any]], cpu_percent: float | None) -> Result:
    """What all clients of a point did, taken together."""

    def all_of(name: str) -> Percentiles:
        return Percentiles.of([sample for talk in talks for sample in talk[name]])

    tps = sum(talk["conversations"] / talk["seconds"] for talk in talks if talk["seconds"])
    return Result(
        point, tps, tps * conversation.TOKENS_BOOKED,
        all_of("lookups"), all_of("reads"), all_of("writes"),
        sum(len(talk["errors"]) for talk in talks), cpu_percent,
    )  # fmt: skip


def _cpu_ticks() -> tuple[int, int]:
    """Of all cores together since the machine started: in all, and idle. Zeros where /proc does
    not say."""
    try:
        words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    except OSError:
        return 0, 0
    ticks = [int(word) for word in words]
    return sum(ticks), ticks[3] + ticks[4]
