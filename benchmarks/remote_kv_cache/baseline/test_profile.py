"""Transfer profile: where does the time go, at each size of block?

    python -m benchmarks.remote_kv_cache.baseline.test_profile

The same bytes in blocks of five sizes, put and got over both transports, with integrity and
without; beside the time, the CPU time of each thread on both sides. All values are per MiB, so that
sizes compare with each other and with the plain copy.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.harness import machine, options, plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.server.server_cases import SET, STREAM_GET
from benchmarks.remote_kv_cache.baseline.threads.hasher import Hasher
from benchmarks.remote_kv_cache.baseline.threads.thread_times import WHO, ThreadTimes
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import SharedPool, Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    TRANSPORTS,
    FerryWork,
    connect,
    server_for,
)
from benchmarks.remote_kv_cache.work.models import Model
from remote_server.allocator import keep_freed_memory
from remote_server.values import MiB, format_bytes

MODULE = "benchmarks.remote_kv_cache.baseline.test_profile"

SIZES = (64 << 10, 512 << 10, MiB, 2 * MiB, 4 * MiB)
COPY = "plain copy"
COPY_AND_HASH = "copy and hash"
BESIDE = "copy and hash, while another process hashes"
"""The bound of a checked put over shared memory: the server handles one message while the client
hashes the next."""
TIME = "time"

_BATCH_BYTES = 16 * MiB  # two outstanding, at every size of block
_TOKENS_BYTES = 16 * 8 * 128 * 2 * 2  # a layer's part of a block of 16 tokens, 8 heads of 128


class Way(NamedTuple):
    """A timed operation. A plain copy has no transport."""

    operation: str
    transport: str = ""
    integrity: bool | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "where the time of a transfer goes")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="SIZES",
                        help="sizes of blocks (default: 64KiB,512KiB,1MiB,2MiB,4MiB)")  # fmt: skip
    parser.add_argument("--total", type=options.size, default=256 * MiB, metavar="SIZE",
                        help="bytes moved by each trial (default: 256MiB)")  # fmt: skip
    arguments = parser.parse_args(argv)
    keep_freed_memory()  # as every engine with the client does
    record = Record.begin(MODULE, argv)
    total = float(arguments.total * len(arguments.sizes))
    with Runner(arguments.trials, arguments.warm_ups, total=total) as runner:
        for block_bytes in arguments.sizes:
            measure(runner, record, work_of(block_bytes, arguments.total), arguments.memory)
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    show(record)
    return options.finish(record, runner)


def work_of(block_bytes: int, total: int) -> Work:
    """`total` bytes, or at least one batch, in blocks of `block_bytes`."""
    model = Model(f"blocks of {format_bytes(block_bytes)}", block_bytes // _TOKENS_BYTES, 8, 128)
    per_batch = max(1, _BATCH_BYTES // block_bytes)
    return blocks.plan(model, max(1, total // (per_batch * block_bytes)), per_batch)


def measure(runner: Runner, record: Record, work: Work, memory: int | None) -> None:
    """Measure all ways at one size, interleaved, as figures of `record`."""
    name = work.model.name
    try:
        machine.skip_unless_fits(work.num_bytes * 4, memory)
    except Skipped as reason:
        record.parameters[name] = f"skipped: {reason}"
        return
    with ExitStack() as stack:
        source, target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
        server = stack.enter_context(server_for(work.num_bytes, work.block_bytes))
        times: dict[Way, ThreadTimes] = {}

        def timed(
            way: Way, run: Callable[[], object], prepare: Callable[[], object],
            verify: Callable[[], object],
        ) -> Case:  # fmt: skip
            times[way] = ThreadTimes(server.pid)
            return Case(way, partial(times[way].around, run), prepare, verify)

        came = partial(blocks.verify, source.pool, target.pool, work.everything)
        poison = partial(blocks.poison, target.pool)
        copy = partial(blocks.copy_naive, source.pool, target.pool, work)
        copy_and_hash = partial(blocks.copy_checked, source.pool, target.pool, work)
        hasher = stack.enter_context(Hasher(work.num_bytes))
        cases = [
            timed(Way(COPY), copy, poison, came),
            timed(Way(COPY_AND_HASH), copy_and_hash, poison, came),
            timed(Way(BESIDE), partial(hasher.beside, copy_and_hash), poison, came),
        ]
        for transport in TRANSPORTS:
            for integrity in (True, False):
                client = connect(server.endpoint, name, work.block_bytes, transport=transport,
                                 integrity=integrity, rows=(source, target))  # fmt: skip
                stack.callback(client.close)
                ferry = FerryWork(client, name, work)
                cases += [
                    timed(
                        Way(SET, transport, integrity),
                        partial(ferry.put, source.pool, deferred=False), ferry.clear,
                        partial(ferry.verify_kept, source.pool, target.pool),
                    ),
                    timed(
                        Way(STREAM_GET, transport, integrity), partial(ferry.get, target.pool),
                        partial(_be_present, ferry, source, target), came,
                    ),
                ]  # fmt: skip
        samples = runner.measure(name, cases, float(work.num_bytes))
        num_mib = work.num_bytes / MiB
        for way, spent in times.items():
            sample = samples[way]
            if sample.measured:
                values = {TIME: median(sample.values) * 1e6 / num_mib}
                for who in WHO:
                    trials = spent.trials[-len(sample.values) :]
                    values[who] = median(trial[who] for trial in trials) / 1e3 / num_mib
                record.figures.append(Figure(_title(name, way), "µs/MiB", values, way.transport))


def _be_present(ferry: FerryWork, source: SharedPool, target: SharedPool) -> None:
    ferry.make_present(source.pool)
    blocks.poison(target.pool)


def _title(name: str, way: Way) -> str:
    checked = "" if way.integrity is None else ", checked" if way.integrity else ", unchecked"
    return f"{name}: {way.operation}{checked}"


def show(record: Record) -> None:
    """Print one line a way: the time and each thread's CPU time, in microseconds per MiB."""
    lines: list[list[table.Cell]] = []
    copies = {_size_of(figure): figure for figure in record.figures if _is_copy(figure)}
    for figure in record.figures:
        size, _, way = figure.name.partition(": ")
        copied = copies[size].values[TIME]
        lines.append([
            size, way, figure.transport, figure.values[TIME], figure.values[TIME] / copied,
            *(figure.values[who] for who in WHO),
        ])  # fmt: skip
    print("microseconds per MiB: the time, and what each thread ran in it; medians")
    print(table.render(["", "", "transport", TIME, "to copy", *WHO], lines))


def chart(record: Record) -> plot.Chart:
    """Times relative to the plain copy, by size."""
    sizes = list(dict.fromkeys(map(_size_of, record.figures)))
    ways = dict.fromkeys((figure.name.partition(": ")[2], figure.transport)
                         for figure in record.figures if not _is_copy(figure))  # fmt: skip
    found = {(figure.name, figure.transport): figure.values[TIME] for figure in record.figures}
    copies = [found.get((f"{size}: {COPY}", "")) for size in sizes]
    series = {
        f"{way}, {transport}": [
            _ratio(found.get((f"{size}: {way}", transport)), copied)
            for size, copied in zip(sizes, copies, strict=True)
        ]
        for way, transport in ways
    }
    title = titles.of(record, "test_profile")
    return plot.bars(title, "times a plain copy", sizes, series, mark=1.0)


def _ratio(time: float | None, copied: float | None) -> float | None:
    return time / copied if time is not None and copied else None


def _is_copy(figure: Figure) -> bool:
    return figure.name.endswith(f": {COPY}")


def _size_of(figure: Figure) -> str:
    return figure.name.partition(": ")[0]


def _sizes(text: str) -> list[int]:
    sizes = [options.size(word) for word in text.split(",")]
    for size in sizes:
        if size % _TOKENS_BYTES:
            raise argparse.ArgumentTypeError(
                f"{format_bytes(size)} is no multiple of {format_bytes(_TOKENS_BYTES)}"
            )
    return sizes


if __name__ == "__main__":
    sys.exit(main())
