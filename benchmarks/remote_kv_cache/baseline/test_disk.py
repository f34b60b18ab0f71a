"""Disk: how fast do blocks get there and back, cold, and how near is the disk tier to the device?

The upper bound is one thread that reads or writes whole blocks past the page cache (O_DIRECT), one
after another, in one preallocated file. The same with the tier's number of threads is shown as
well. Every read is cold: past the page cache, or after the file was dropped from it. The caches of
a hypervisor or a device are out of our control, and the same for all.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import machine, options, table
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.remote_kv_cache.baseline.disk.all_ways import close_all, open_ways
from benchmarks.remote_kv_cache.baseline.disk.ways import DiskWay, aligned
from benchmarks.remote_kv_cache.work import blocks, results
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.store.io_threads import NUM_THREADS
from remote_server.values import MiB, format_bytes

MODULE = "benchmarks.remote_kv_cache.baseline.test_disk"

MEMCPY = Variant("memcpy")
SIZES = "64KiB,576KiB,1MiB,2MiB,4MiB"
WALL, TIER = "raw loop", "disk tier"
THREADS = f"{WALL}, {NUM_THREADS} threads"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    record = Record.begin(MODULE, argv)
    record.parameters["total_bytes"] = arguments.total
    with Runner(arguments.trials, arguments.warm_ups) as runner:
        for block_bytes in arguments.sizes:
            record.rows += measure(runner, arguments, block_bytes)
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    show(record, arguments)
    return options.finish(record, runner)


def chart(record: Record) -> Chart:
    """Each way over the disk, by size."""
    return results.chart(_charted(record), record)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(MODULE, "how fast blocks get to a disk and back")
    options.add_sizes(parser, SIZES)
    parser.add_argument(
        "--total", type=options.size, default=256 * MiB, metavar="SIZE",
        help="bytes of blocks that each way keeps (default: 256MiB); the disk needs eight times "
        "as much",
    )  # fmt: skip
    options.add_directory(parser)
    return parser


def measure(runner: Runner, arguments: argparse.Namespace, block_bytes: int) -> list[Row]:
    """All ways for one size of blocks, interleaved."""
    name = format_bytes(block_bytes)
    num_blocks = max(1, arguments.total // block_bytes)
    num_bytes = num_blocks * block_bytes
    try:
        machine.skip_unless_fits(2 * num_bytes, arguments.memory)
        _skip_unless_disk_fits(arguments.directory, 8 * num_bytes)
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvferry-") as folder:
            samples = _samples(runner, name, Path(folder), num_blocks, block_bytes)
    except Skipped as reason:
        return [Row(name, WALL, num_bytes, Sample(skipped=str(reason)))]
    rows = [
        Row(name, variant.operation, num_bytes, samples[variant])
        for variant in samples
        if isinstance(variant, Variant)
    ]
    seconds = {row.operation: row.seconds for row in rows}
    for row in rows:
        row.ratio_to_memcpy = _ratio(row.seconds, seconds[MEMCPY.operation])
        wall = f"{WALL}: {row.operation.rpartition(' ')[2]}"
        if wall in seconds and row.operation != wall:
            row.wall, row.ratio_to_wall = wall, _ratio(row.seconds, seconds[wall])
    return rows


def _samples(
    runner: Runner, name: str, folder: Path, num_blocks: int, block_bytes: int
) -> dict[object, Sample]:
    source = aligned(num_blocks, block_bytes)
    target = aligned(num_blocks, block_bytes)
    blocks.fill(source)
    in_place = np.arange(num_blocks)
    verify = partial(blocks.verify, source, target, blocks.Batch(in_place, in_place))
    ways = open_ways(folder, num_blocks, block_bytes)
    cases = [
        Case(MEMCPY, partial(np.copyto, target, source), partial(blocks.poison, target), verify)
    ]
    for way_name, way in ways.items():

        def prepare(way: DiskWay = way) -> None:
            way.make_cold()
            blocks.poison(target)

        # A round may begin at a read: then it reads the blocks of the round before.
        cases += [
            Case(Variant(f"{way_name}: write"), partial(way.write, source)),
            Case(Variant(f"{way_name}: read"), partial(way.read, target), prepare, verify),
        ]
    for way in ways.values():
        runner.show(f"{name}: first touch")
        way.write(source)
    try:
        return {**runner.measure(name, cases)}
    finally:
        close_all([*ways.values()])


def _skip_unless_disk_fits(directory: Path, needed: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        raise Skipped(f"needs {format_bytes(needed)} of disk, {format_bytes(free)} are free")


def _ratio(seconds: float | None, other: float | None) -> float | None:
    return seconds / other if seconds and other else None


def _charted(record: Record) -> list[Variant]:
    names = dict.fromkeys(row.operation for row in record.rows)
    return [Variant(name) for name in names if name != MEMCPY.operation]


def show(record: Record, arguments: argparse.Namespace) -> None:
    """Print GB/s of each way, then all details."""
    sizes = list(dict.fromkeys(row.model for row in record.rows))
    found = {(row.model, row.operation): row for row in record.rows}
    lines: list[list[table.Cell]] = []
    for operation in dict.fromkeys(row.operation for row in record.rows):
        rows = [found.get((size, operation)) for size in sizes]
        lines.append([operation, *(row.gb_per_s if row else None for row in rows)])
    print(f"{format_bytes(arguments.total)} a round; GB/s, medians of {arguments.trials} trials")
    print(table.render(["", *sizes], lines))
    print(f"\n{results.details(record.rows)}")
    for size in sizes:
        for direction in ("write", "read"):
            names = (f"{way}: {direction}" for way in (THREADS, TIER))
            raw_s, tier_s = (
                found[size, name].seconds if (size, name) in found else None for name in names
            )
            if raw_s and tier_s:
                print(f"{size}: {direction} at {100 * raw_s / tier_s:.0f} % of the {THREADS}")


if __name__ == "__main__":
    sys.exit(main())
