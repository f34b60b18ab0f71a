"""Small blocks beside large ones: the same bytes in blocks of 64 KiB and of 1 MiB."""

from contextlib import ExitStack
from functools import partial

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Row
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.server.server_cases import SET, STREAM_GET
from benchmarks.remote_kv_cache.work import blocks, results
from benchmarks.remote_kv_cache.work.blocks import (
    Work,
)
from benchmarks.remote_kv_cache.work.ferry_client import (
    TRANSPORTS,
    FerryWork,
    connect_to,
)
from benchmarks.remote_kv_cache.work.models import Model
from benchmarks.remote_kv_cache.work.results import Variant
from benchmarks.remote_kv_cache.work.target import ELSEWHERE, Target
from remote_server.values import MiB

SMALL = Model("blocks of 64 KiB", layers=1, kv_heads=8, head_dim=128)
LARGE = Model("blocks of 1 MiB", layers=16, kv_heads=8, head_dim=128)

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
