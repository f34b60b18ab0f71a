"""Server: how fast do blocks go through it, compared with the bounds of any server?

A real server process; one client; each model's blocks put, got and looked up, over each transport,
with checksums and without, every byte verified. In the same run: a plain copy, two bare TCP
connections, two lanes without a server, a copy between two shared maps, a real Redis and a real
memcached, with the CPU time of both sides. Then with one batch outstanding: to the acknowledgement,
to the first block, to the last. Then small operations: lookups, small blocks, and lookups while
others stream. Ratios are to a plain copy of the same blocks.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.harness import machine, options, table
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.remote_kv_cache.baseline.disk import saturation, tiers
from benchmarks.remote_kv_cache.baseline.latency import fairness, lookups, small_operations
from benchmarks.remote_kv_cache.baseline.links import lane_scaling, link_cases
from benchmarks.remote_kv_cache.baseline.peers import versions
from benchmarks.remote_kv_cache.baseline.server import (
    encryption,
    fleet_cases,
    one_batch,
    server_cases,
)
from benchmarks.remote_kv_cache.work import blocks, results, source_figures
from benchmarks.remote_kv_cache.work.blocks import Work
from benchmarks.remote_kv_cache.work.cpu_cost import CpuCost
from benchmarks.remote_kv_cache.work.ferry_client import TRANSPORTS, WAYS
from benchmarks.remote_kv_cache.work.results import Variant
from benchmarks.remote_kv_cache.work.target import ELSEWHERE, Target
from remote_server.allocator import keep_freed_memory
from remote_server.errors import ConfigError
from remote_server.values import MiB

MODULE = "benchmarks.remote_kv_cache.baseline.test_server"

SECTIONS = (
    "models", "one-batch", "lookups", "sizes", "fairness", "tiers", "keys", "fleet", "scaling",
    "link",
)  # fmt: skip
WITH_OWN_SERVERS = ("tiers", "keys", "fleet", "scaling", "link")
"""Sections that start servers with a disk, with keys, several, or behind a slow link: no running
one replaces them."""

SOURCE_OPERATIONS = (
    server_cases.SET, server_cases.SET_DEFERRED, server_cases.GET, server_cases.STREAM_GET
)  # fmt: skip
OWN_OPERATIONS = (server_cases.SET_READABLE, server_cases.CONTAINS)
CHARTED = [
    Variant(server_cases.SET, "tcp", True), Variant(server_cases.SET_DEFERRED, "tcp", True),
    Variant(server_cases.GET, "tcp", True), Variant(server_cases.STREAM_GET, "tcp", True),
    server_cases.TCP_WALL, Variant(server_cases.REDIS_GET, "tcp"),
    Variant(server_cases.SET, "shm", True), Variant(server_cases.STREAM_GET, "shm", True),
    server_cases.SHM_WALL,
    server_cases.MOVER_WALL,
]  # fmt: skip
COSTED = [
    server_cases.LANES_PUT_WALL, server_cases.LANES_GET_WALL,
    *(
        Variant(operation, "tcp", integrity)
        for operation in (server_cases.SET, server_cases.STREAM_GET)
        for integrity in (True, False)
    ),
    Variant(server_cases.REDIS_SET, "tcp"), Variant(server_cases.REDIS_GET, "tcp"),
    Variant(server_cases.MEMCACHED_SET, "tcp"), Variant(server_cases.MEMCACHED_GET, "tcp"),
]  # fmt: skip
_SIZES_BYTES = 128 * MiB


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "how fast blocks go through the server")
    blocks.add_options(parser)
    parser.add_argument("--only", type=options.names(SECTIONS), default=SECTIONS, metavar="PARTS",
                        help=f"some of {','.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--transport", type=options.names(WAYS), default=[*WAYS], metavar="NAMES",
        help=f"some of {','.join(WAYS)}, for `models` and `one-batch` (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes-bytes", type=options.size, default=_SIZES_BYTES, metavar="SIZE",
        help="bytes of each trial of `sizes`, `fairness`, `tiers`, `keys` and `scaling`, a quarter "
        "of those of `fleet`, 16 times those of `link` (default: 128MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--directory", type=options.folder, default=".", metavar="DIR",
        help="a folder on the disk of `tiers`; written files are removed (default: this one)",
    )  # fmt: skip
    options.add_server(parser)
    arguments = parser.parse_args(argv)
    try:
        server = Target(arguments.server)
    except ConfigError as error:
        parser.error(str(error))
    keep_freed_memory()  # as every engine with the client does
    record = Record.begin(MODULE, argv)
    record.versions |= peer_folder.versions("redis-py")
    record.parameters["memcpy"] = str(server_cases.NAIVE)
    left_out = _leave_out(arguments, server)
    if left_out:
        record.parameters["not measured"] = left_out
    versions.note(record)
    parts = len({"models", "one-batch"}.intersection(arguments.only))
    total = parts * blocks.total_bytes(arguments.models, arguments.batches)  # the rest is short
    with Runner(arguments.trials, arguments.warm_ups, total=total) as runner:
        _measure(runner, record, arguments, server)
    options.write(record, runner, arguments, chart)
    show(record, results.describe_work(arguments))
    for name, why in left_out.items():
        print(f"not measured: {name}: {why}")
    return options.finish(record, runner)


def chart(record: Record) -> Chart:
    """The ways that a reader compares first."""
    return results.chart(CHARTED, record)


def _leave_out(arguments: argparse.Namespace, server: Target) -> dict[str, str]:
    """Take out of `arguments.only` what a running server cannot be measured for. Returns all that
    is not measured, by name, with the reason."""
    if not server.runs_already:
        return {}
    mine = [name for name in arguments.only if name in WITH_OWN_SERVERS]
    arguments.only = [name for name in arguments.only if name not in mine]
    reasons = dict.fromkeys(mine, "needs servers of its own, without --server")
    if server.is_fleet and "fairness" in arguments.only:
        arguments.only = [name for name in arguments.only if name != "fairness"]
        reasons["fairness"] = "its streams come from one server"
    if server.is_elsewhere:
        reasons["copies, raw sockets and Redis"] = ELSEWHERE
    return reasons


def _measure(runner: Runner, record: Record, arguments: argparse.Namespace, server: Target) -> None:
    for model in arguments.models if "models" in arguments.only else ():
        work = blocks.plan(model, arguments.batches)
        measure_model(runner, record, work, arguments.memory, server, arguments.transport)
        if runner.interrupted:
            return
    for model in arguments.models if "one-batch" in arguments.only else ():
        work = blocks.plan(model, arguments.batches)
        one_batch.measure(
            runner, record, work, arguments.memory, server, arguments.transport
        )  # fmt: skip
        if runner.interrupted:
            return
    if "sizes" in arguments.only:
        rows, figures = small_operations.measure_block_sizes(
            runner, arguments.memory, arguments.sizes_bytes, server
        )
        record.rows += rows
        record.figures += figures
    if "lookups" in arguments.only and not runner.interrupted:
        record.figures += _unless_skipped(
            record, "lookups", lambda: lookups.measure(runner, server)
        )
    if "fairness" in arguments.only and not runner.interrupted:
        record.figures += _unless_skipped(
            record,
            "fairness",
            lambda: fairness.measure(runner, arguments.memory, arguments.sizes_bytes, server),
        )
    if "tiers" in arguments.only and not runner.interrupted:
        rows, figures = tiers.measure(
            runner, arguments.memory, arguments.sizes_bytes, arguments.directory
        )
        record.rows += rows
        record.figures += figures
    if "scaling" in arguments.only and not runner.interrupted:
        record.rows += lane_scaling.measure(runner, arguments.memory, arguments.sizes_bytes)
    if "fleet" in arguments.only and not runner.interrupted:
        record.figures += _unless_skipped(
            record, "fleet",
            lambda: fleet_cases.measure(runner, arguments.memory, arguments.sizes_bytes),
        )  # fmt: skip
    if "link" in arguments.only and not runner.interrupted:
        record.parameters["congestion control"] = link_cases.congestion_control()
        record.figures += _unless_skipped(
            record, "link", lambda: link_cases.measure(runner, arguments.sizes_bytes // 16)
        )
    if "keys" in arguments.only and not runner.interrupted:
        encryption.measure(record, runner, arguments.memory, arguments.sizes_bytes)


def _unless_skipped(record: Record, name: str, measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Its figures; the reason for none becomes a parameter of the record."""
    try:
        return measure()
    except Skipped as reason:
        record.parameters[name] = f"SKIPPED: {reason}"
        print(f"{name}: SKIPPED: {reason}", file=sys.stderr)
        return []


def measure_model(
    runner: Runner, record: Record, work: Work, memory: int | None, server: Target,
    transports: Sequence[str] = WAYS,
) -> None:  # fmt: skip
    """Measure all ways to move one model's blocks, interleaved, into `record`. Other systems are
    measured where tcp is one of `transports`."""
    name = work.model.name
    with ExitStack() as stack:
        try:
            # Two shared and two private pools here, one in each sender, those of the three servers.
            machine.skip_unless_fits(work.num_bytes * 10, memory)
            endpoint = stack.enter_context(server.server(name, work.num_bytes, work.block_bytes))
        except Skipped as reason:
            record.rows += results.skipped_rows(work, server_cases.STREAM_GET, str(reason))
            return
        runner.show(f"{name}: filling {work.num_bytes >> 20} MiB")
        source, target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
        cases = [
            *server_cases.wall_cases(stack, server, source, target, work),
            *server_cases.ferry_cases(
                stack, endpoint, server.namespace(name), source, target, work, transports
            ),
        ]
        if "tcp" in transports:
            cases += server_cases.redis_cases(stack, server, source, target, work)
            cases += server_cases.memcached_cases(stack, server, source, target, work)
        cost = CpuCost()
        samples = runner.measure(work.model.name, [cost.of(case) for case in cases], work.num_bytes)
        # Before the servers are stopped, because the stop may be interrupted.
        record.rows += results.rows_of(
            work, samples, server_cases.NAIVE, server_cases.WALLS, {server_cases.CONTAINS}
        )
        if not server.runs_already:
            costed = [variant for variant in COSTED if variant in samples]
            record.figures += cost.figures(
                name, work.num_bytes, samples, costed, server_cases.TCP_WALL
            )


def show(record: Record, heading: str) -> None:
    """Print the source's table with its figures under ours, then all details."""
    operations = (*SOURCE_OPERATIONS, *OWN_OPERATIONS)
    lines: list[list[table.Cell]] = []
    for model in dict.fromkeys(row.model for row in record.rows):
        rows = [row for row in record.rows if row.model == model]
        if not any(row.operation == server_cases.SET_DEFERRED for row in rows):
            continue  # not a model of the source
        if model.endswith(one_batch.SUFFIX):
            continue  # with a table of its own
        ways = dict.fromkeys((row.transport, row.integrity) for row in rows
                             if row.integrity is not None and not row.reason)  # fmt: skip
        for transport, integrity in ways:
            columns = [Variant(operation, transport, integrity) for operation in operations]
            lines.append([
                model, transport, "on" if integrity else "off",
                results.median_of(rows, server_cases.NAIVE),
                *(results.median_of(rows, column) for column in columns),
                *(results.ratio_of(rows, column) for column in columns[: len(SOURCE_OPERATIONS)]),
            ])  # fmt: skip
        if (theirs := source_figures.SERVER.get(model)) is not None:
            lines.append([
                source_figures.LABEL, "tcp", "off", theirs.naive, theirs.set_not_deferred,
                theirs.set_deferred, theirs.get, theirs.stream_get, None, None,
                theirs.delta_set_not_deferred, theirs.delta_set_deferred, theirs.delta_get,
                theirs.delta_stream_get,
            ])  # fmt: skip
    headers = ["model", "transport", "integrity", server_cases.NAIVE.operation, *operations,
               *(f"delta-{operation}" for operation in SOURCE_OPERATIONS)]  # fmt: skip
    if lines:
        print(f"{heading}\n{table.render(headers, lines)}")
    if text := one_batch.describe(record.rows):
        print(f"\n{text}")
    show_tiers(record)
    for verdict in lane_scaling.verdicts(record.rows):
        print(verdict)
    if record.rows:
        print(f"\n{results.details(record.rows)}")
    if record.figures:
        small = [
            [figure.name, figure.transport, name, value, figure.unit]
            for figure in record.figures
            for name, value in figure.values.items()
        ]
        print(f"\n{table.render(['', 'transport', '', 'measured', 'unit'], small)}")
        for verdict in [
            verdict
            for each in record.figures
            for verdict in (*saturation.verdicts(each), *fleet_cases.verdicts(each))
        ]:
            print(verdict)


def show_tiers(record: Record) -> None:
    """Print GB/s of each tier, side by side, and what part of the raw loops the disk reaches."""
    speeds = {
        (row.operation, row.transport): row.gb_per_s
        for row in record.rows
        if row.model == tiers.TIERS.name
    }
    if not speeds:
        return
    ways = [(operation, transport) for operation in ("put", "get") for transport in TRANSPORTS]
    lines: list[list[table.Cell]] = []
    for operation, transport in ways:
        raw = [speeds.get((f"{loop}: {operation}", None)) for loop in tiers.RAW_LOOPS]
        of_tiers = [speeds.get((f"{tier}: {operation}", transport)) for tier in tiers.TIERS_SHOWN]
        disk = of_tiers[-1]
        shares = [f"{100 * disk / bound:.0f}" if disk and bound else None for bound in raw]
        lines.append([operation, transport, *of_tiers, *raw, *shares])
    shares_of = [f"disk, % of {loop}" for loop in tiers.RAW_LOOPS]
    names = ["", "transport", *tiers.TIERS_SHOWN, *tiers.RAW_LOOPS, *shares_of]
    print(f"\nGB/s, integrity on\n{table.render(names, lines)}")


if __name__ == "__main__":
    sys.exit(main())
