"""Saturation: calls a second of several client processes, and how much of a core the loop takes."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, in_words
from benchmarks.remote_kv_cache.baseline.capacity.worker import (
    CALLS_OF_ONE,
    GO,
    LOOKUPS,
    NUM_KEYS,
    TRANSFERS,
    Done,
    Worker,
)
from benchmarks.remote_kv_cache.baseline.threads.thread_times import SERVER, ThreadTimes
from benchmarks.remote_kv_cache.work.ferry_client import server_for
from remote_server.values import KiB

RATE, SHARE, COST, CLIENTS, BUSY = (
    "calls a second", "loop's share of a core", "loop, us a call", "clients' cores",
    "part of all cores busy",
)  # fmt: skip
FULL = 0.9
"""A part from which on the loop's core, or all cores, count as saturated."""

_POLL_S = 0.005


def measure(
    runner: Runner, record: Record, transports: Sequence[str], clients: Sequence[int], calls: int
) -> None:
    """A figure of `record` for each number of clients, which make `calls` calls each, once."""
    for kind in (LOOKUPS, TRANSFERS):
        for transport in transports if kind == TRANSFERS else transports[:1]:
            for number in clients:
                runner.show(f"{number} clients: {kind}, {transport}")
                name = f"{number} client{'s' * (number > 1)}: {kind}"
                try:
                    values = _point(transport, kind, number, calls)
                except Exception as error:  # the other points are worth having
                    record.parameters[f"{name}, {transport}"] = f"FAILED: {in_words(error)}"
                    runner.num_failed += 1
                    continue
                record.figures.append(Figure(name, "", values, transport))


def bound_of(figure: Figure) -> str:
    """What kept the clients from more calls a second; other programs may have used cores."""
    if figure.values[SHARE] >= FULL:
        return "the loop"
    return "the machine's cores" if figure.values[BUSY] >= FULL else "round trips"


def _point(transport: str, kind: str, number: int, calls: int) -> dict[str, float]:
    with ExitStack() as stack:
        num_bytes = number * calls * NUM_KEYS[kind] * KiB
        server = stack.enter_context(server_for(num_bytes, KiB))
        workers = [
            stack.enter_context(Worker(server.endpoint, transport, kind, calls, each))
            for each in range(number)
        ]
        times = ThreadTimes(server.pid)
        done: list[Done] = []
        before = machine.cpu_times()
        times.around(lambda: done.extend(_run(workers)))
        after = machine.cpu_times()
        (spent,) = times.trials
    total, idle = after.total - before.total, after.idle - before.idle
    window = max(one.ended for one in done) - min(one.began for one in done)
    num_calls = number * calls * CALLS_OF_ONE[kind]
    return {
        RATE: num_calls / window * 1e9,
        SHARE: spent.ran[SERVER] / window,
        COST: spent.ran[SERVER] / num_calls / 1e3,
        CLIENTS: sum(one.cpu for one in done) / window,
        BUSY: 1 - idle / total if total else 0.0,
    }


def _run(workers: Sequence[Worker]) -> list[Done]:
    """Let all begin, and wait until each has ended."""
    for worker in workers:
        worker.send_signal(GO)
    while True:
        done = [worker.done for worker in workers]
        if all(done):
            return [one for one in done if one is not None]
        time.sleep(_POLL_S)
