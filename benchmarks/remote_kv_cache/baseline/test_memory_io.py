"""Memory: how fast can blocks be copied in it, and which way of copying is the fastest?

Every transfer of KV blocks ends in a copy, so this bounds all other figures. All copies are on one
thread. Ratios are to one flat memcpy of the same bytes.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.harness import machine, options, table
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.work import blocks, results, source_figures
from benchmarks.remote_kv_cache.work.blocks import BLOCK_SIZE, Pool, Work
from benchmarks.remote_kv_cache.work.results import Variant

MODULE = "benchmarks.remote_kv_cache.baseline.test_memory_io"

MEMCPY = Variant("memcpy")
HOST_STORE, HOST_LOAD = Variant("host worker store"), Variant("host worker load")
SWAP_IN, SWAP_OUT = Variant("swap in"), Variant("swap out")
SOURCE_COLUMNS = [
    Variant("l2l naive"), Variant("b2b naive"), Variant("b2b fancy index"),
    Variant("b2b index_copy_"), Variant("b2b compiled memcpy"), SWAP_IN, SWAP_OUT,
]  # fmt: skip
NUMPY_INDEX = Variant("b2b fancy index, numpy")
OWN_COLUMNS = [NUMPY_INDEX, HOST_STORE, HOST_LOAD, MEMCPY]
SWAPS = [SWAP_IN, SWAP_OUT]
NEED_TORCH = [*SOURCE_COLUMNS[2:4], *SWAPS]
CHARTED = [*SOURCE_COLUMNS[:5], HOST_STORE, HOST_LOAD]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "how fast blocks can be copied in memory, by each way")
    blocks.add_options(parser)
    arguments = parser.parse_args(argv)
    record = Record.begin(MODULE, argv)
    record.parameters["memcpy"] = "one flat copy of the same bytes"
    record.parameters["swap"] = _swap_way()

    def measure_model(runner: Runner, work: Work) -> None:
        record.rows += measure(runner, work, arguments.memory)

    runner = results.over_models(arguments, measure_model)
    options.write(record, runner, arguments, chart)
    show(record, results.describe_work(arguments))
    return options.finish(record, runner)


def chart(record: Record) -> Chart:
    """The ways to copy that a reader compares first."""
    return results.chart(CHARTED, record)


def measure(runner: Runner, work: Work, memory: int | None) -> list[Row]:
    """All ways to copy for one model, interleaved."""
    try:
        machine.skip_unless_fits(2 * work.num_bytes, memory)
    except Skipped as reason:
        return results.skipped_rows(work, MEMCPY.operation, str(reason))
    runner.show(f"{work.model.name}: filling {work.num_bytes >> 20} MiB")
    source = blocks.allocate(work.num_blocks, work.block_bytes)
    target = blocks.allocate(work.num_blocks, work.block_bytes)
    blocks.fill(source)
    cases = [*_plain_cases(source, target, work)]
    more, close = _late_cases(source, target, work)
    try:
        samples = runner.measure(work.model.name, [*cases, *more], work.num_bytes)
    finally:
        close()
    return results.rows_of(work, samples, MEMCPY)


def _plain_cases(source: Pool, target: Pool, work: Work) -> list[Case]:
    """Cases that need only numpy and the C library."""
    num_layers, page = work.model.layers, work.model.page_bytes(BLOCK_SIZE)
    from_layers = source.reshape(num_layers, work.num_blocks, page)
    to_layers = target.reshape(num_layers, work.num_blocks, page)

    def layer_to_layer() -> None:
        for batch in work.batches:
            for layer in range(num_layers):
                for first, second in zip(batch.source, batch.target, strict=True):
                    to_layers[layer, second] = from_layers[layer, first]

    def memmove() -> None:
        begin, end = source.ctypes.data, target.ctypes.data
        size, move = work.block_bytes, ctypes.memmove
        for batch in work.batches:
            for first, second in zip(batch.source.tolist(), batch.target.tolist(), strict=True):
                move(end + second * size, begin + first * size, size)

    def fancy_index() -> None:
        for batch in work.batches:
            target[batch.target] = source[batch.source]

    def verify_layers() -> None:
        for layer in range(num_layers):
            blocks.verify(from_layers[layer], to_layers[layer], work.everything)

    verify = partial(blocks.verify, source, target, work.everything)
    in_place = np.arange(work.num_blocks)
    verify_flat = partial(blocks.verify, source, target, blocks.Batch(in_place, in_place))
    poison = partial(blocks.poison, target)
    flat = partial(np.copyto, target.reshape(-1), source.reshape(-1))
    naive = partial(blocks.copy_naive, source, target, work)
    return [
        Case(MEMCPY, flat, poison, verify_flat),
        Case(Variant("l2l naive"), layer_to_layer, poison, verify_layers),
        Case(Variant("b2b naive"), naive, poison, verify),
        Case(Variant("b2b compiled memcpy"), memmove, poison, verify),
        Case(NUMPY_INDEX, fancy_index, poison, verify),
    ]


def _late_cases(source: Pool, target: Pool, work: Work) -> tuple[list[Case], Callable[[], None]]:
    """Cases that need torch, vLLM or a GPU, SKIPPED without them; and a call that ends them."""
    of_worker, close = _host_worker_cases(source, target, work)
    try:
        from benchmarks.remote_kv_cache.baseline.copies import gpu_swaps
    except ImportError as error:
        reason = f"needs torch: {error}"
        return [*of_worker, *(Case.skipped(column, reason) for column in NEED_TORCH)], close
    poison = partial(blocks.poison, target)
    verify = partial(blocks.verify, source, target, work.everything)
    cases = [
        *of_worker,
        *(
            Case(Variant(name), copy, poison, verify)
            for name, copy in gpu_swaps.index_copies(source, target, work).items()
        ),
    ]
    try:
        swaps = gpu_swaps.GpuSwaps(source, work)
    except Skipped as reason:
        return [*cases, *(Case.skipped(column, reason) for column in SWAPS)], close
    check = partial(swaps.verify, work)
    return [
        *cases,
        Case(SWAP_IN, swaps.swap_in, swaps.forget_cache, check),
        Case(SWAP_OUT, swaps.swap_out, swaps.forget_rows, check),
    ], close


def _swap_way() -> str:
    """What moves blocks to a GPU and back."""
    try:
        from benchmarks.remote_kv_cache.baseline.copies import gpu_swaps
    except ImportError as error:
        return f"needs torch: {error}"
    return gpu_swaps.way()


def _host_worker_cases(
    source: Pool, target: Pool, work: Work
) -> tuple[list[Case], Callable[[], None]]:
    """Each direction reads `source` and fills `target`: the layouts swap, not the bytes."""
    try:
        from benchmarks.remote_kv_cache.baseline.copies import host_copies
    except ImportError as error:
        reason = f"needs torch and vLLM: {error}"
        return [Case.skipped(column, reason) for column in (HOST_STORE, HOST_LOAD)], lambda: None
    storing = host_copies.HostWorkerCopies(source, target, work)
    loading = host_copies.HostWorkerCopies(target, source, work)
    poison = partial(blocks.poison, target)

    def close() -> None:
        storing.close()
        loading.close()

    return [
        Case(HOST_STORE, storing.store, poison, storing.verify),
        Case(HOST_LOAD, loading.load, poison, loading.verify),
    ], close


def show(record: Record, heading: str) -> None:
    """Print the source's table with its figures under ours, then all details."""
    lines: list[list[table.Cell]] = []
    for model in dict.fromkeys(row.model for row in record.rows):
        rows = [row for row in record.rows if row.model == model]
        columns = (*SOURCE_COLUMNS, *OWN_COLUMNS)
        lines.append([model, *(results.median_of(rows, column) for column in columns)])
        if (figures := source_figures.MEMORY_IO.get(model)) is not None:
            lines.append([source_figures.LABEL, *figures, *[None] * len(OWN_COLUMNS)])
    names = [column.operation for column in (*SOURCE_COLUMNS, *OWN_COLUMNS)]
    print(heading)
    print(table.render(["model", *names], lines))
    print(f"\n{results.details(record.rows)}")
    for model in dict.fromkeys(row.model for row in record.rows):
        found = [
            (row.seconds, row.operation)
            for row in record.rows
            if row.model == model and row.seconds and row.operation.startswith("b2b")
        ]
        if found:
            print(f"{model}: fastest block to block is {min(found)[1]}")


if __name__ == "__main__":
    sys.exit(main())
