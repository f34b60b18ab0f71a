"""Small operations: small blocks beside large ones, lookups beside other clients' streams."""

import sys
import time
from contextlib import ExitStack
from functools import partial

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Row
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.baseline import blocks, results
from benchmarks.remote_kv_cache.baseline.blocks import (
    Work,
)
from benchmarks.remote_kv_cache.baseline.ferry_client import (
    PATIENCE_S,
    TRANSPORTS,
    FerryWork,
    connect,
    connect_to,
    key_of,
)
from benchmarks.remote_kv_cache.baseline.results import Variant
from benchmarks.remote_kv_cache.baseline.server_cases import SET, STREAM_GET
from benchmarks.remote_kv_cache.baseline.target import ELSEWHERE, Target
from benchmarks.remote_kv_cache.models import Model
from examples.processes import LoggedProcess
from remote_server.values import MiB

SMALL = Model("blocks of 64 KiB", layers=1, kv_heads=8, head_dim=128)
LARGE = Model("blocks of 1 MiB", layers=16, kv_heads=8, head_dim=128)

NUM_STREAMS = 4
_PROBE_KEYS = 64


# A load of 256 blocks of 64 KiB. Batches of equal bytes: only the size of the blocks differs.
_BATCH_BYTES = 16 * MiB


def work_of(model: Model, num_bytes: int) -> Work:
    """At least one batch of the model's blocks, about `num_bytes` in all."""
    num_batches = max(1, num_bytes // _BATCH_BYTES)
    return blocks.plan(model, num_batches, _BATCH_BYTES // model.block_bytes())


def measure_block_sizes(
    runner: Runner, memory: int | None, num_bytes: int, server: Target
) -> tuple[list[Row], list[Figure]]:
    """The same bytes in blocks of 64 KiB and of 1 MiB, put and got, interleaved."""
    works = [work_of(model, num_bytes) for model in (SMALL, LARGE)]
    try:
        machine.skip_unless_fits(sum(work.num_bytes for work in works) * 4, memory)
        with ExitStack() as stack:
            cases = [case for work in works for case in _size_cases(stack, work, server)]
            samples = runner.measure("block sizes", cases)
    except Skipped as reason:
        return [row for work in works
                for row in results.skipped_rows(work, STREAM_GET, str(reason))], []  # fmt: skip
    rows: list[Row] = []
    for work in works:
        # The keys of these cases include the model, because one measurement has both sizes.
        mine = {key[1]: sample for key, sample in samples.items()
                if isinstance(key, tuple) and key[0] == work.model.name}  # fmt: skip
        rows += results.rows_of(work, mine, Variant("b2b naive"))
    return rows, _shares(rows)


def _size_cases(stack: ExitStack, work: Work, server: Target) -> list[Case]:
    name = work.model.name
    endpoint = stack.enter_context(server.server(name, work.num_bytes, work.block_bytes))
    namespace = server.namespace(name)
    source, target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
    came = partial(blocks.verify, source.pool, target.pool, work.everything)
    poison = partial(blocks.poison, target.pool)
    naive = partial(blocks.copy_naive, source.pool, target.pool, work)
    copy = name, Variant("b2b naive")
    cases = [
        Case.skipped(copy, ELSEWHERE) if server.is_elsewhere else Case(copy, naive, poison, came)
    ]
    for transport in TRANSPORTS:
        try:
            client = connect_to(endpoint, namespace, work.block_bytes, transport=transport,
                             rows=(source, target))  # fmt: skip
        except Skipped:
            continue  # the rows of the models have the reason
        stack.callback(client.close)
        ferry = FerryWork(client, namespace, work)

        def prepare(ferry: FerryWork = ferry) -> None:
            ferry.make_present(source.pool)
            blocks.poison(target.pool)

        put = partial(ferry.put, source.pool, deferred=False)
        kept = partial(ferry.verify_kept, source.pool, target.pool)
        cases += [
            Case((name, Variant(SET, transport, True)), put, ferry.clear, kept),
            Case(
                (name, Variant(STREAM_GET, transport, True)),
                partial(ferry.get, target.pool), prepare, came,
            ),
        ]  # fmt: skip
    return cases


def _shares(rows: list[Row]) -> list[Figure]:
    """The small blocks' throughput as a part of the large ones'."""
    speeds = {(row.model, row.operation, row.transport): row.gb_per_s for row in rows}
    figures = []
    for transport in TRANSPORTS:
        values = {}
        for operation in (SET, STREAM_GET):
            small = speeds.get((SMALL.name, operation, transport))
            large = speeds.get((LARGE.name, operation, transport))
            if small and large:
                values[operation] = 100 * small / large
        figures.append(Figure("64 KiB blocks, of the throughput of 1 MiB", "%", values, transport))
    return figures


class StreamingClient(LoggedProcess):
    """Another process that streams the same blocks in a loop."""

    name = "streaming-client"

    def __init__(self, endpoint: str, namespace: str, work: Work) -> None:
        module = "benchmarks.remote_kv_cache.baseline.streaming_client"
        super().__init__(
            [sys.executable, "-m", module, endpoint, namespace, str(work.block_bytes),
             str(work.num_blocks)]
        )  # fmt: skip

    def is_ready(self) -> bool:
        return "ready" in self.log.read_text(errors="replace")


def measure_fairness(
    runner: Runner, memory: int | None, num_bytes: int, server: Target
) -> list[Figure]:
    """Lookups of 64 keys by one client, alone and while four others stream 1 MiB blocks. Raises
    `Skipped` when a running server cannot be used."""
    work = work_of(LARGE, num_bytes)
    probes = 100 * runner.trials
    try:
        machine.skip_unless_fits(work.num_bytes * (3 + NUM_STREAMS), memory)
    except Skipped as reason:
        runner.show(f"lookups beside streams: {reason}")
        return []
    with ExitStack() as stack:
        endpoint = stack.enter_context(
            server.server(work.model.name, work.num_bytes, work.block_bytes)
        )
        name = server.namespace(work.model.name)
        client = connect(endpoint, name, work.block_bytes)
        stack.callback(client.close)
        source = blocks.allocate(work.num_blocks, work.block_bytes)
        blocks.fill(source)
        FerryWork(client, name, work).put(source, deferred=False)
        keys = [key_of(number) for number in range(_PROBE_KEYS)]

        def probe(when: str) -> Figure:
            runner.show(f"lookups {when}")
            seconds = []
            for _ in range(probes):
                started = time.perf_counter()
                client.lookup(name, keys, timeout_s=PATIENCE_S).result()
                seconds.append((time.perf_counter() - started) * 1000)
                time.sleep(0.002)  # an engine looks up between its steps
            values = {"median": percentile(seconds, 50), "p99": percentile(seconds, 99),
                      "max": max(seconds)}  # fmt: skip
            return Figure(f"lookup of {_PROBE_KEYS} keys, {when}", "ms", values, "tcp")

        alone = probe("alone")
        for _ in range(NUM_STREAMS):
            stack.enter_context(StreamingClient(endpoint, name, work))
        before, started = client.stats(timeout_s=PATIENCE_S).result(), time.perf_counter()
        beside = probe(f"while {NUM_STREAMS} clients stream")
        after = client.stats(timeout_s=PATIENCE_S).result()
        seconds = time.perf_counter() - started
        ways = ("bytes_out", "lane_bytes_out")
        sent = sum(after.counters[way] - before.counters[way] for way in ways)
        streamed = sent / seconds / 1e9
        rate = {"all clients": streamed}
        return [alone, beside, Figure(f"{NUM_STREAMS} clients streaming", "GB/s", rate, "tcp")]
