"""Rounds of a sweep: processes of clients are started, begin together, and are pooled."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.harness import machine
from benchmarks.store_sweep.load import conversation, talkers
from benchmarks.store_sweep.load.servers import Servers
from benchmarks.store_sweep.points import PARTS, Percentiles, Point, ReadSplit, Result
from examples.processes import REPOSITORY

_START_S = 60.0


class Load(NamedTuple):
    """The load of each client of each point."""

    block_bytes: int
    seconds: float
    """A client's duration; it ends with a whole conversation."""

    pause_ms: float = 0.0
    """The mean pause before each turn."""


class _Talkers:
    """One process of clients. It ends with the block, in any state."""

    def __init__(
        self, stack: ExitStack, servers: Servers, load: Load, point: Point, number: int, name: str
    ) -> None:
        """Start process `number` of those of `point`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", talkers.MODULE, servers.text, servers.namespace,
             str(load.block_bytes), str(point.clients), str(load.seconds), str(load.pause_ms),
             f"{name} {number}"],
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
    """One measurement of one point."""

    talks: list[dict[str, Any]]
    """The fields of a `talkers.Talk` for each client."""

    cpu_percent: float | None
    server_percent: float | None

    @property
    def errors(self) -> list[str]:
        return [error for talk in self.talks for error in talk["errors"]]


def run_round(servers: Servers, point: Point, load: Load, name: str) -> Round:
    """`name` is unique for this round and point."""
    with ExitStack() as stack:
        processes = [
            _Talkers(stack, servers, load, point, number, name) for number in range(point.processes)
        ]
        for process in processes:
            process.wait_until_ready()
        began, before, server_before_s = time.monotonic(), machine.cpu_times(), _cpu_s(servers.pids)
        for process in processes:
            process.begin()
        talks = [talk for process in processes for talk in process.result()]
        took_s, now, server_s = time.monotonic() - began, machine.cpu_times(), _cpu_s(servers.pids)
    total = now.total - before.total
    busy = round(100 * (1 - (now.idle - before.idle) / total), 1) if total > 0 else None
    of_server = None
    if server_s is not None and server_before_s is not None:
        of_server = round(100 * (server_s - server_before_s) / took_s, 1)
    return Round(talks, busy, of_server)


def pooled(
    point: Point, rounds: Sequence[Round], block_bytes: int, raw_gb_per_s: float | None = None
) -> Result:
    """The results of all clients of a point over all rounds. `raw_gb_per_s` is the fastest pass of
    two raw connections in the run.

    Percentiles are over all samples together: a mean of each client's percentiles, as in the
    source, hides the slowest. The rate is the sum of the clients' own, averaged over the rounds.
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
        _split(talks), tps * conversation.BLOCKS_MOVED * block_bytes / 1e9,
        raw_gb_per_s,
    )  # fmt: skip


def _split(talks: Sequence[dict[str, Any]]) -> ReadSplit | None:
    timed = sum(talk["timed"] for talk in talks)
    if not timed:
        return None
    means = [sum(talk["split_ms"][place] for talk in talks) / timed
             for place in range(len(PARTS) + 1)]  # fmt: skip
    apart = 100 * sum(talk["apart"] for talk in talks) / timed
    return ReadSplit._make([*(round(mean, 4) for mean in means), round(apart, 2)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None


def _cpu_s(pids: Sequence[int]) -> float | None:
    """CPU time of these processes on all cores. None without any, or when one has gone."""
    try:
        total = sum(map(machine.process_cpu_s, pids))
    except OSError:
        return None
    return total if pids else None
