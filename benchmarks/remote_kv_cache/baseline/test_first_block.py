"""The first block: how long does one block alone take there and back, and a short prompt's way?

A short prompt's first token waits for a lookup and for one get, whose cost is that of messages and
not of bytes. One block is put and got over each transport, in turns with memcached, Redis and two
floors: an echo of a small message, and the block over a bare connection. Then a prompt of 64 blocks
is looked up and got.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.harness import machine, options, plot, table, titles
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.remote_kv_cache.baseline.latency import in_rounds, one_block, whole_way
from benchmarks.remote_kv_cache.baseline.latency.block_stores import FerryStore
from benchmarks.remote_kv_cache.baseline.latency.in_rounds import MEDIAN, P99, TIMES
from benchmarks.remote_kv_cache.baseline.latency.one_block import GET, PUT
from benchmarks.remote_kv_cache.baseline.peers import versions
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import OVER_ZMQ, server_for
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.values import GiB, format_bytes

MODULE = "benchmarks.remote_kv_cache.baseline.test_first_block"

SIZES = "64KiB,2MiB"
NUM_BLOCKS = 64
"""Of the prompt: 1,024 tokens."""

WAYS = ("shm", "tcp", OVER_ZMQ)
A_PROMPT = 5
"""Repeats of one block for each of a prompt."""

_CHARTED = (
    ("shm", PUT, GET, "shm"), ("lanes", PUT, GET, "tcp"), ("ZeroMQ", PUT, GET, OVER_ZMQ),
    ("memcached, TCP", one_block.SET_MEMCACHED, one_block.GET_MEMCACHED, "tcp"),
    ("Redis, TCP", one_block.SET_REDIS, one_block.GET_REDIS, "tcp"),
    ("bare connection", None, one_block.RAW.operation, "tcp"),
)  # fmt: skip
"""Series: the name, the operations of the put and of the get, the transport."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.prompts = max(1, arguments.repeats // A_PROMPT)
    record = Record.begin(MODULE, argv)
    record.parameters |= {
        "operations of a round": arguments.repeats,
        "prompts of a round": arguments.prompts,
        "blocks of a prompt": NUM_BLOCKS,
    }
    versions.note(record)
    with Runner(arguments.trials, arguments.warm_ups, rounds_a_line=arguments.repeats) as runner:
        for block_bytes in arguments.sizes:
            measure(runner, record, arguments, block_bytes)
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    show(record, arguments)
    return options.finish(record, runner)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(MODULE, "how long one block alone, and a short prompt, take")
    options.add_sizes(parser, SIZES)
    parser.add_argument(
        "--repeats", type=options.positive, default=NUM_BLOCKS,
        help="operations of each way in a round, and a fifth as many prompts "
        "(default: %(default)s, each block once)",
    )  # fmt: skip
    return parser


def measure(
    runner: Runner, record: Record, arguments: argparse.Namespace, block_bytes: int
) -> None:
    """One block, then the prompt, for one size of blocks, into `record`."""
    size = format_bytes(block_bytes)
    num_bytes = NUM_BLOCKS * block_bytes
    with ExitStack() as stack:
        try:
            # Rows on both sides, and the blocks in the sender, kvferry, Redis and two memcached.
            machine.skip_unless_fits(8 * num_bytes + GiB, arguments.memory)
        except Skipped as reason:
            record.rows.append(Row(size, GET, block_bytes, Sample(skipped=str(reason))))
            return
        runner.show(f"{size}: starting servers")
        server = stack.enter_context(server_for(num_bytes + len(WAYS) * block_bytes, block_bytes))
        pools = blocks.filled_pools(stack, NUM_BLOCKS, block_bytes)
        source, target = (each.pool for each in pools)
        cases, turns = one_block.Cases([], [], []), one_block.Turns(source, target)
        kept = _add_ours(cases, stack, server.endpoint, pools, turns)
        one_block.add_peers(cases, stack, turns)
        one_block.add_floors(cases, stack, turns)
        samples = _measured(runner, arguments, arguments.repeats, f"{size}, one block", cases.all)
        _keep(record, size, samples, arguments.repeats, block_bytes)
        if runner.interrupted:
            return
        ways = whole_way.ways_of(kept, source, target)
        prompts = [whole_way.case_of(key, way) for key, way in ways.items()]
        samples = _measured(runner, arguments, arguments.prompts, f"{size}, a prompt", prompts)
        _keep(record, size, whole_way.samples_of(samples, ways), arguments.prompts, block_bytes)


def _add_ours(
    cases: one_block.Cases, stack: ExitStack, endpoint: str, pools: tuple[blocks.SharedPool, ...],
    turns: one_block.Turns,
) -> dict[str, FerryStore]:  # fmt: skip
    """Returns the kept blocks by transport. The client that is ready first has put them."""
    kept: dict[str, FerryStore] = {}
    for transport in WAYS:
        names = Variant(PUT, transport, True), Variant(GET, transport, True)
        try:
            puts, gets = FerryStore.pair(stack, endpoint, transport, pools)
        except Skipped as reason:
            cases.skip(names, reason)
            continue
        if not kept:
            one_block.fill(gets, turns.source)
        cases.add(names, puts, gets, turns)
        kept[transport] = gets
    return kept


def _measured(
    runner: Runner,
    arguments: argparse.Namespace,
    repeats: int,
    title: str,
    cases: Sequence[Case],
) -> dict[Variant, Sample]:
    """Every operation is a trial of the runner, so that all ways take turns at each."""
    runner.trials, runner.warm_ups = arguments.trials * repeats, arguments.warm_ups * repeats
    samples = runner.measure(title, cases)
    return {key: sample for key, sample in samples.items() if isinstance(key, Variant)}


def _keep(
    record: Record, size: str, samples: Mapping[Variant, Sample], repeats: int, block_bytes: int
) -> None:
    """Rows with the median of each round, and figures of all operations."""
    rows = []
    for variant, sample in samples.items():
        num_blocks = whole_way.blocks_of(variant.operation, NUM_BLOCKS)
        num_bytes = 0 if variant == one_block.ECHO else num_blocks * block_bytes
        rows.append(
            Row(size, variant.operation, num_bytes, in_rounds.folded(sample, repeats),
                variant.transport, variant.integrity)
        )  # fmt: skip
    record.rows += rows
    record.figures += in_rounds.figures(size, samples, repeats, one_block.BASES)


def chart(record: Record) -> plot.Chart:
    """The medians of one block, there and back."""
    found = {(one.name, one.transport): one.values[MEDIAN] for one in record.figures}
    sizes = list(dict.fromkeys(row.model for row in record.rows))
    series = {
        name: [
            found.get((f"{size}: {operation}", transport))
            for size in sizes
            for operation in (put, get)
        ]
        for name, put, get, transport in _CHARTED
    }
    groups = [f"{size}: {way}" for size in sizes for way in (PUT, GET)]
    title = titles.of(record, "One block alone, median")
    return plot.bars(title, "us", groups, series, log=True)


def show(record: Record, arguments: argparse.Namespace) -> None:
    """Print a table of one block and one of the prompt."""
    found = {(one.name, one.transport): one.values for one in record.figures}
    alone: list[list[table.Cell]] = []
    prompts: dict[tuple[str, str, str, str], list[table.Cell]] = {}
    for row in record.rows:
        values = found.get((f"{row.model}: {row.operation}", row.transport), {})
        transport = row.transport or ""
        times: list[table.Cell] = [values.get(MEDIAN), values.get(P99)]
        if whole_way.is_part(row.operation):
            way = whole_way.way_of(row.operation)
            line = prompts.setdefault((row.model, way, transport, row.reason), [])
            line += times
        else:
            names = [row.model, row.operation, transport]
            alone.append([*names, *times, values.get(TIMES), row.reason])
    operations = arguments.trials * arguments.repeats
    heads = ["a block", "operation", "transport"]
    print(f"one block alone, us, of {operations} operations of each way")
    print(table.render([*heads, "median", "p99", "x memcached, tcp", ""], alone))
    print(f"\na prompt of {NUM_BLOCKS} blocks, us since its lookup was called")
    parts = [f"{part}{value}" for part in whole_way.PARTS for value in (", median", ", p99")]
    lines = [[*names, *times, reason] for (*names, reason), times in prompts.items()]
    print(table.render([*heads, *parts, ""], lines))


if __name__ == "__main__":
    sys.exit(main())
