"""The cost of a fleet to its client: CPU of puts and gets, and lookups of a long prompt.

The same prompts through one server and through several, in turns. All servers are processes of this
machine, so seconds are not compared: the CPU time of this process, with the client's threads, is.
On loopback the kernel does a part of the servers' receiving in the sender's thread, which is one of
libzmq: the Python threads, whose work is the client's own, are counted beside it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from benchmarks.harness import machine
from benchmarks.harness.machine import process_cpu_s
from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner
from benchmarks.harness.statistics import compare_pairs, percentile
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    Client,
    FerryWork,
    anchors_of,
    connect_to,
    key_of,
)
from benchmarks.remote_kv_cache.work.fleet_servers import FleetServers
from benchmarks.remote_kv_cache.work.models import Model
from remote_server.values import GiB, MiB

NUM_SERVERS = 4
NUM_LOOKED_UP = 8
ROW_TOKENS = 128
PROMPT_TOKENS = 131_072
PROMPT = Model("fleet, rows of 1 MiB", layers=16, kv_heads=8, head_dim=128)

GOAL_CPU = 1.15
"""The most CPU a GiB with `NUM_SERVERS` servers, relative to one."""

GOAL_LOOKUP_MS = 2.0

_TO_ONE = f"{NUM_SERVERS} servers to one"
_ROWS_OF_A_PROMPT = 32
_SMALL_BYTES = 4096
_NAMESPACE = "fleet"


def measure(runner: Runner, memory: int | None, num_bytes: int) -> list[Figure]:
    """CPU seconds a GiB for four times `num_bytes`, and the lookups. Raises `Skipped`."""
    machine.skip_unless_fits(4 * num_bytes * 8, memory)
    return [*_measure_cpu(runner, 4 * num_bytes), _measure_lookups(runner)]


def verdicts(figure: Figure) -> list[str]:
    """Each goal that this figure has, and whether it is met."""
    found = []
    ratio = figure.values.get(_TO_ONE)
    if ratio is not None:
        found.append(_verdict(f"{figure.name}: {ratio:.2f} times", ratio <= GOAL_CPU, GOAL_CPU))
    median = figure.values.get(f"{NUM_LOOKED_UP} servers, median")
    if median is not None:
        met = median <= GOAL_LOOKUP_MS
        found.append(_verdict(f"{figure.name}: {median:.2f} ms", met, GOAL_LOOKUP_MS))
    return found


def _verdict(measured: str, met: bool, goal: float) -> str:
    return f"{measured}, goal {goal:g}: {'met' if met else 'NOT met'}"


def _measure_cpu(runner: Runner, num_bytes: int) -> list[Figure]:
    num_prompts = max(1, num_bytes // (_ROWS_OF_A_PROMPT * PROMPT.block_bytes()))
    work = blocks.plan(PROMPT, num_prompts, _ROWS_OF_A_PROMPT)
    with ExitStack() as stack:
        source = blocks.allocate(work.num_blocks, work.block_bytes)
        target = blocks.allocate(work.num_blocks, work.block_bytes)
        blocks.fill(source)
        ferries = {number: _ferry(stack, number, work) for number in (1, NUM_SERVERS)}
        spent: dict[tuple[str, int], list[_Cpu]] = {}
        for trial in range(runner.warm_ups + runner.trials):
            runner.show(f"a client's CPU, round {trial + 1}")
            for number in sorted(ferries, reverse=trial % 2 == 1):
                ferry = ferries[number]
                ferry.clear()
                put = _spent_in(partial(ferry.put, source, deferred=False))
                blocks.poison(target)
                get = _spent_in(partial(ferry.get, target))
                blocks.verify(source, target, work.everything)
                if trial >= runner.warm_ups:
                    spent.setdefault(("put", number), []).append(put)
                    spent.setdefault(("get", number), []).append(get)
        return [
            _figure(operation, spent[operation, 1], spent[operation, NUM_SERVERS], work)
            for operation in ("put", "get")
        ]


class _Cpu(NamedTuple):
    """CPU seconds of this process."""

    all: float
    """Of all threads, those of libzmq included."""

    python: float
    """Of the threads that run Python: the caller and the client's I/O thread."""

    @classmethod
    def now(cls) -> "_Cpu":
        clocks = (
            time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.ident is not None
        )
        return cls(time.process_time(), sum(map(time.clock_gettime, clocks)))


def _ferry(stack: ExitStack, number: int, work: Work) -> FerryWork:
    """A client of `number` servers, of which each holds everything."""
    room = work.num_bytes + work.num_bytes // 4 + 64 * MiB
    servers = stack.enter_context(FleetServers(number, room))
    client = connect_to(",".join(servers.addresses), _NAMESPACE, work.block_bytes)
    stack.callback(client.close)
    return FerryWork(client, _NAMESPACE, work, ROW_TOKENS)


def _spent_in(run: Callable[[], object]) -> _Cpu:
    before = _Cpu.now()
    run()
    after = _Cpu.now()
    return _Cpu(after.all - before.all, after.python - before.python)


def _figure(operation: str, one: list[_Cpu], several: list[_Cpu], work: Work) -> Figure:
    """Seconds a GiB, and the ratio of each round, of which the median counts."""

    def a_gib(seconds: list[float]) -> float:
        return percentile(seconds, 50) * GiB / work.num_bytes

    ratio = compare_pairs([cpu.all for cpu in several], [cpu.all for cpu in one])
    values = {
        "1 server": a_gib([cpu.all for cpu in one]),
        f"{NUM_SERVERS} servers": a_gib([cpu.all for cpu in several]),
        _TO_ONE: ratio.ratio,
        f"{_TO_ONE}, low": ratio.low,
        f"{_TO_ONE}, high": ratio.high,
        "Python threads, 1 server": a_gib([cpu.python for cpu in one]),
        f"Python threads, {NUM_SERVERS} servers": a_gib([cpu.python for cpu in several]),
    }
    return Figure(f"a client's CPU of a {operation}", "s/GiB", values, "tcp")


def _measure_lookups(runner: Runner) -> Figure:
    """Every row of the prompt is readable."""
    keys = [key_of(number) for number in range(PROMPT_TOKENS // ROW_TOKENS)]
    row = memoryview(bytes(_SMALL_BYTES))
    values: dict[str, float] = {}
    for number in (1, NUM_LOOKED_UP):
        with ExitStack() as stack:
            servers = stack.enter_context(FleetServers(number, 64 * MiB))
            client = connect_to(",".join(servers.addresses), _NAMESPACE, _SMALL_BYTES)
            stack.callback(client.close)
            anchors = anchors_of(client, keys, ROW_TOKENS)
            client.put(
                _NAMESPACE, keys, [row] * len(keys), deferred=False, timeout_s=PATIENCE_S,
                anchors=anchors,
            ).result()  # fmt: skip
            pids = [server.pid for server in servers.servers.values()]
            milliseconds, own_ms, theirs_ms = _lookups(
                client, keys, anchors, 60 * runner.trials, pids
            )
        of = f"{number} server{'s' * (number > 1)}"
        values |= {
            f"{of}, median": percentile(milliseconds, 50),
            f"{of}, p99": percentile(milliseconds, 99),
            f"{of}, CPU of the client": own_ms,
            f"{of}, CPU of the servers": theirs_ms,
        }
    return Figure(f"lookup of a prompt of {PROMPT_TOKENS:,} tokens", "ms", values, "tcp")


def _lookups(
    client: Client, keys: list[bytes], anchors: list[bytes | None], count: int, pids: list[int]
) -> tuple[list[float], float, float]:
    """Milliseconds of each, after a fifth as many to warm up; and the CPU time of one, of this
    process and of the servers together."""
    found = []
    own_s = theirs_s = 0.0
    for number in range(count + count // 5):
        if number == count // 5:
            own_s, theirs_s = time.process_time(), sum(map(process_cpu_s, pids))
        began = time.perf_counter()
        reply = client.lookup(_NAMESPACE, keys, timeout_s=PATIENCE_S, anchors=anchors).result()
        if reply.prefix != len(keys):
            raise AssertionError(f"{reply.prefix} of {len(keys)} rows found")
        if number >= count // 5:
            found.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.001)  # an engine looks up between its steps
    own_s = time.process_time() - own_s
    theirs_s = sum(map(process_cpu_s, pids)) - theirs_s
    return found, 1e3 * own_s / count, 1e3 * theirs_s / count
