"""Six kinds of systems side by side: how fast are blocks written, read again, and read cold?

    python -m benchmarks.six_systems --block-bytes 1MiB --total 256MiB

Every row is the software that it names. What is not installed is SKIPPED with the reason.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import machine, options, plot, table
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped, WrongBytes
from benchmarks.kvbench.ways import Rows
from benchmarks.remote_kv_cache.baseline import blocks, redis_work
from benchmarks.remote_kv_cache.baseline.blocks import shared_pools
from benchmarks.six_systems import shared_prefix
from benchmarks.six_systems.lmcache_server import LmcacheServer
from benchmarks.six_systems.others import Gpu, Hdf5, Redis, VllmFiles
from benchmarks.six_systems.ours import Ours
from benchmarks.six_systems.systems import FilePerBlock, SharedMap, System
from remote_server.malloc import keep_freed_memory
from remote_server.sizes import MiB, format_bytes
from remote_server.store.disk.layout import padded

MODULE = "benchmarks.six_systems"

WRITE, HOT, COLD = "write", "hot read", "cold read"
OURS_SHM = "kvferry, shared memory"
SHARED_MAP = "shared-memory map"
_SERVERS = (
    OURS_SHM, "kvferry, tcp", "kvferry, shared memory, no disk", "kvferry, tcp, no disk",
    "Redis, tcp", "Redis, unix socket", "LMCache, its server",
)  # fmt: skip
_SHARED = "shared prefix:"
_POOLS = 11
"""Source, target, the map, two Redis with their buffers, LMCache, four servers of ours."""


class Key(NamedTuple):
    system: str
    operation: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    keep_freed_memory()
    record = Record.begin(MODULE, argv)
    try:
        record.versions["redis-server"] = redis_work.version()
    except Skipped as reason:
        record.parameters["redis-server"] = str(reason)
    with Runner(arguments.trials, arguments.warm_ups) as runner:
        measure(runner, record, arguments)
        record.figures += _across_processes(record)
        if not runner.interrupted:
            record.figures.append(_shared_prefix(arguments.prefix_block_bytes))
    options.write(record, runner, arguments, chart)
    show(record, arguments)
    return options.finish(record, runner)


def measure(runner: Runner, record: Record, arguments: argparse.Namespace) -> None:
    """Every system, interleaved, into `record`."""
    block_bytes = arguments.block_bytes
    num_blocks = max(1, arguments.total // block_bytes)
    title = f"{num_blocks} x {format_bytes(block_bytes)}"
    num_bytes = num_blocks * block_bytes
    try:
        machine.skip_unless_fits(_POOLS * num_bytes, arguments.memory)
    except Skipped as reason:
        record.rows.append(Row(title, WRITE, num_bytes, Sample(skipped=str(reason)), OURS_SHM))
        return
    with ExitStack() as stack:
        source, target = shared_pools(num_blocks, padded(block_bytes))
        stack.callback(source.close)
        stack.callback(target.close)
        blocks.fill(source.pool)
        rows = Rows(source.pool, target.pool, block_bytes)
        folder = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvferry-six-", dir=arguments.directory.resolve())
        ))  # fmt: skip
        makers: dict[str, Callable[[], System]] = {
            OURS_SHM: partial(Ours, folder / "shm", rows, (source, target), "shm"),
            "kvferry, tcp": partial(Ours, folder / "tcp", rows, (source, target), "tcp"),
            "kvferry, shared memory, no disk": partial(Ours, None, rows, (source, target), "shm"),
            "kvferry, tcp, no disk": partial(Ours, None, rows, (source, target), "tcp"),
            SHARED_MAP: partial(SharedMap, rows),
            "files": partial(FilePerBlock, folder / "files", rows, synced=False),
            "files, fsync": partial(FilePerBlock, folder / "synced", rows, synced=True),
            "HDF5": partial(Hdf5, folder, rows),
            "Redis, tcp": partial(Redis, _made(folder / "redis-tcp"), rows, "tcp"),
            "Redis, unix socket": partial(Redis, _made(folder / "redis"), rows, "unix"),
            "LMCache, its server": partial(LmcacheServer, rows),
            "vLLM's fs tier": partial(VllmFiles, folder, rows),
            "GPU memory": partial(Gpu, rows),
        }
        cases = [case for name, make in makers.items() for case in _cases(stack, name, make, rows)]
        samples = runner.measure(title, cases)
        for key, sample in samples.items():
            assert isinstance(key, Key)
            record.rows.append(Row(title, key.operation, num_bytes, sample, key.system))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _cases(stack: ExitStack, name: str, make: Callable[[], System], rows: Rows) -> list[Case]:
    try:
        system = make()
    except Skipped as reason:
        return [Case.skipped(Key(name, operation), reason) for operation in (WRITE, HOT, COLD)]
    stack.callback(system.close)
    written = False

    def before_write() -> None:
        nonlocal written
        system.clear()
        written = True

    def before_read(*, cold: bool) -> None:
        if not written:
            before_write()
            system.write()
        if cold:
            system.make_cold()
        blocks.poison(rows.target_pool)

    def verify_write() -> None:
        blocks.poison(rows.target_pool)
        system.read()
        _verify(rows)

    return [
        Case(Key(name, WRITE), system.write, before_write, verify_write),
        Case(Key(name, HOT), system.read, partial(before_read, cold=False), partial(_verify, rows)),
        Case(Key(name, COLD), system.read, partial(before_read, cold=True), partial(_verify, rows)),
    ]


def _verify(rows: Rows) -> None:
    for number, (source, target) in enumerate(zip(rows.source_pool, rows.target_pool, strict=True)):
        if not np.array_equal(source, target):
            raise WrongBytes(f"block {number} came back with other bytes")


def _shared_prefix(block_bytes: int) -> Figure:
    shared = shared_prefix.measure(block_bytes)
    return Figure(
        f"{_SHARED} {shared_prefix.SESSIONS} sessions of {shared_prefix.COMMON_BLOCKS} common and "
        f"{shared_prefix.OWN_BLOCKS} own blocks",
        "blocks and bytes, as the server counts them",
        {name: float(value) for name, value in shared._asdict().items()},
        "tcp",
    )


def show(record: Record, arguments: argparse.Namespace) -> None:
    """GB/s of each system, why some have none, their versions, and what sharing saves."""
    found = {(row.transport, row.operation): row for row in record.rows}
    lines: list[list[table.Cell]] = []
    for name in dict.fromkeys(row.transport for row in record.rows):
        rows = [found.get((name, operation)) for operation in (WRITE, HOT, COLD)]
        reasons = dict.fromkeys(row.reason for row in rows if row and row.reason)
        lines.append([name, *(row.gb_per_s if row else None for row in rows), "; ".join(reasons)])
    print(f"GB/s, medians of {arguments.trials} trials of {format_bytes(arguments.total)}")
    print(table.render(["system", WRITE, HOT, COLD, ""], lines))
    print(", ".join(f"{name} {version}" for name, version in record.versions.items()))
    for figure in record.figures:
        values = figure.values
        if figure.name.startswith(_SHARED):
            print(
                f"\n{figure.name}: {values['existed']:.0f} of {values['put']:.0f} blocks were "
                f"there already; {format_bytes(int(values['logical_bytes']))} were put, and "
                f"{format_bytes(int(values['physical_bytes']))} are stored"
            )
        else:
            print(f"{figure.name}: {', '.join(f'{n} {v:.1f}' for n, v in values.items())}")


def _across_processes(record: Record) -> Iterator[Figure]:
    """Of the systems that are a process of their own, the fastest first. All others here leave the
    bytes where they are: one copy, nobody to wait for, and no check."""
    for operation in (WRITE, HOT):
        rows = [row for row in record.rows if row.operation == operation and row.gb_per_s]
        speeds = {row.transport: row.gb_per_s for row in rows if row.transport in _SERVERS}
        ordered = sorted(speeds.items(), key=lambda one: -(one[1] or 0.0))
        if ordered:
            values = {name or "": speed or 0.0 for name, speed in ordered}
            yield Figure(f"{operation}, from process to process", "GB/s, fastest first", values)


def chart(record: Record) -> plot.Chart:
    """GB/s: a group for each system, a bar for each operation."""
    names = [name or "" for name in dict.fromkeys(row.transport for row in record.rows)]
    found = {(row.transport, row.operation): row.gb_per_s for row in record.rows}
    series = {
        operation: [found.get((name, operation)) for name in names]
        for operation in (WRITE, HOT, COLD)
    }
    return plot.bars(f"six systems: {record.describe_machine()}", "GB/s", names, series)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(MODULE, "what would keep these blocks best")
    add = parser.add_argument
    add("--block-bytes", type=options.size, default=MiB, metavar="SIZE", help="(default: 1MiB)")
    add("--total", type=options.size, default=256 * MiB, metavar="SIZE",
        help="bytes that each system keeps (default: 256MiB)")  # fmt: skip
    add("--prefix-block-bytes", type=options.size, default=64 << 10, metavar="SIZE",
        help="of the sessions with a common beginning (default: 64KiB)")  # fmt: skip
    add("--directory", type=Path, default=Path(), metavar="DIR",
        help="on the disk to measure; nothing stays there (default: this one)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
