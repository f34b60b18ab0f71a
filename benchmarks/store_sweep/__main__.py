"""A sweep: how many conversations does one server carry, and how many servers does a load take?

    python -m benchmarks.store_sweep --concurrency 1,2,4,8,16 --html sweep.html --csv sweep.csv
    python -m benchmarks.store_sweep --storage-latency-ms 20 --json sweep.json
    python -m benchmarks.store_sweep --servers 2            two servers under one load
    python -m benchmarks.store_sweep --server tcp://10.0.0.7:5757
    python -m benchmarks.store_sweep --server tcp://10.0.0.7:5757 --bucket az://container
    python -m benchmarks.store_sweep plan --target-tokens-per-s 1000000 --read-p50-ms 30 \
        --record sweep.json

`run`, which may be omitted, starts a server, and for each point processes of clients that hold
conversations, in rounds. With --server it starts none. `plan` measures nothing: it reads a sweep.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import options
from benchmarks.harness.files import why_not_written
from benchmarks.harness.journal import Journal
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.remote_kv_cache.work import object_stores
from benchmarks.store_sweep import plan, source, spare
from benchmarks.store_sweep.figures import as_figure
from benchmarks.store_sweep.load import blob, measuring, network, sweep
from benchmarks.store_sweep.load.servers import (
    Bucket,
    Servers,
    Storage,
    Wanted,
    running,
)
from benchmarks.store_sweep.operating import WithinSla, slas_for, within_slas
from benchmarks.store_sweep.pages import page, printed
from benchmarks.store_sweep.pages.pictures import chart as chart
from benchmarks.store_sweep.points import BLOB_ALONE, Point, as_csv
from remote_server.errors import ConfigError

MODULE = "benchmarks.store_sweep"

_POINTS = "1,2,4,6,8,16,32,64,80"
_CHANNELS = 16
_ALONE = 100
"""Reads of the object store without a server."""
_SPREAD_PERCENT = 20.0  # about the variation of the source's reads with one client


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 2 for wrong options or when it cannot run, 1 with errors in a point, else 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["run", *argv]
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "run" and arguments.resume and arguments.json is None:
            raise ConfigError("resume: only with --json, beside whose file the rounds are kept")
        if arguments.command == "plan":
            print("\n".join(plan.lines(arguments)))
            return 0
        return _run(arguments, argv)
    except (ConfigError, Skipped) as error:
        print(f"store_sweep: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    points = {Point.parse(text) for text in arguments.concurrency.split(",")}
    wanted = Wanted(arguments.servers, _storage(arguments), given=tuple(arguments.server))
    wanted.check()
    _check_files(arguments)
    if arguments.bucket is None:
        return _sweep(arguments, argv, wanted, points)
    if wanted.given and arguments.bucket in object_stores.NAMES:
        raise ConfigError(
            "bucket: with --server, the address of the server's own bucket, as az://container"
        )
    with object_stores.opened(arguments.bucket, arguments.directory) as store:
        bucket = Bucket(store, arguments.block_bytes, of_given=bool(wanted.given))
        wanted = wanted._replace(bucket=bucket)
        wanted.check()
        return _sweep(arguments, argv, wanted, points)


def _sweep(
    arguments: argparse.Namespace, argv: Sequence[str], wanted: Wanted, points: set[Point]
) -> int:
    record = Record.begin(MODULE, argv)
    if wanted.bucket is not None:
        record.parameters["bucket"] = str(wanted.bucket)
    if wanted.storage is not None:
        record.parameters["emulated storage"] = str(wanted.storage)
    load = sweep.Load(arguments.block_bytes, arguments.seconds, arguments.pause_ms)
    rounds: dict[Point, list[sweep.Round]] = {
        point: [] for point in sorted(points, key=lambda point: (point.concurrency, point))
    }
    journal = Journal.open(record, arguments.json, resume=arguments.resume)
    alone: list[float] = []
    measured = measuring.NOTHING
    described, here = "it ended while servers were started", True
    with (
        Runner(arguments.rounds, 0, journal=journal) as runner,
        running(wanted, [*rounds], load.block_bytes) as servers,
    ):
        described, here = _described(servers), servers.here
        measured = measuring.measure(rounds, arguments.rounds, load, servers, runner, wanted)
        if (bucket := wanted.bucket) is not None and not runner.interrupted:
            runner.show("reads of the object store without a server")
            read_alone = partial(blob.read_alone, bucket.store, load.block_bytes, _ALONE)
            alone = measuring.kept(journal, ("blob alone",), read_alone)
    if wanted.bucket is not None:
        record.parameters["objects"] = blob.in_words(measured.objects, measured.blocks_read)
    journal.end(complete=not runner.interrupted)
    raw = measured.raw_gb_per_s
    record.interrupted = runner.interrupted
    record.end()
    results = [
        sweep.pooled(point, of_point, load.block_bytes, raw)
        for point, of_point in rounds.items() if of_point
    ]  # fmt: skip
    record.figures += [
        as_figure(
            result,
            [sweep.pooled(result.point, [one], load.block_bytes) for one in rounds[result.point]],
        )
        for result in results
    ]
    if alone:
        record.figures.append(blob.as_figure(alone))
    verdicts = spare.verdicts(results, record.machine["cores"])
    record.parameters["servers"] = described
    record.parameters["conclusion"] = spare.conclusion(verdicts)
    record.parameters["network"] = network.conclusion(results, here)
    slas = within_slas(results, arguments.sla_ms or slas_for(results))
    _write(record, verdicts, slas, arguments)
    _show(record, verdicts, slas, load, wanted)
    runner.num_failed = sum(result.errors > 0 for result in results)
    return options.finish(record, runner)


def _described(servers: Servers) -> str:
    number = len(servers.addresses)
    how = "started for the sweep" if servers.pids else "running already"
    where = "on this machine" if servers.here else "on another machine"
    return f"{number} server{'s' * (number > 1)} {where}, {how}"


def _storage(arguments: argparse.Namespace) -> Storage | None:
    channels, spread = arguments.storage_channels, arguments.storage_spread_percent
    if arguments.storage_latency_ms is None:
        if channels is not None or spread is not None:
            raise ConfigError("no storage is emulated without --storage-latency-ms")
        return None
    spread = _SPREAD_PERCENT if spread is None else spread
    if not 0 <= spread <= 100:
        raise ConfigError(f"storage_spread_percent: {spread:g} is not from 0 to 100")
    return Storage(arguments.storage_latency_ms, spread, channels or _CHANNELS)


def _check_files(arguments: argparse.Namespace) -> None:
    """Checked before the sweep, which takes minutes."""
    for file in filter(None, (arguments.csv, arguments.json, arguments.html)):
        if why := why_not_written(file):
            raise ConfigError(why)
    if arguments.block_bytes < 1:
        raise ConfigError("block_bytes: a block has at least one byte")
    if arguments.html is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("html: the charts need matplotlib")


def _write(
    record: Record, verdicts: Sequence[spare.Verdict], slas: Sequence[WithinSla],
    arguments: argparse.Namespace,
) -> None:  # fmt: skip
    if arguments.json is not None:
        record.write(arguments.json)
    if arguments.csv is not None:
        arguments.csv.write_text(as_csv([one.result for one in verdicts]))
    if arguments.html is not None and verdicts:
        arguments.html.write_text(page.render(record, verdicts, slas, arguments.block_bytes))


def _show(
    record: Record, verdicts: Sequence[spare.Verdict], slas: Sequence[WithinSla],
    load: sweep.Load, wanted: Wanted,
) -> None:  # fmt: skip
    results = [one.result for one in verdicts]
    print(printed.header(load, record.parameters["servers"], wanted.storage))
    if wanted.bucket is not None:
        print(f"object store: {wanted.bucket}: {record.parameters['objects']}")
    print(printed.points(verdicts))
    print(record.parameters["conclusion"])
    print(record.parameters["network"])
    for figure in record.figures:
        if figure.name == BLOB_ALONE:
            times = ", ".join(f"{name} {value:.2f}" for name, value in figure.values.items())
            print(f"{BLOB_ALONE} of {load.block_bytes:,} bytes, no server, ms: {times}")
    tables = (printed.split, printed.three_parts, printed.recommended)
    for text in (*(make(results) for make in tables), printed.slas(slas)):
        if text and results:
            print(f"\n{text}")


def _limits(text: str) -> list[float]:
    return sorted({options.above_zero(word) for word in text.split(",")})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring_parser = commands.add_parser("run", help="measure", allow_abbrev=False)
    add = measuring_parser.add_argument
    add("--concurrency", default=_POINTS, metavar="N,N",
        help="conversations at once; up to 8 one a process, beyond that in 8 processes, or as in "
        "3x4 (default: %(default)s)")  # fmt: skip
    add("--seconds", type=options.above_zero, default=2.0,
        help="length of each point in each round (default: %(default)g)")  # fmt: skip
    add("--rounds", type=options.positive, default=3, metavar="N",
        help="rounds over all points (default: %(default)s)")  # fmt: skip
    add("--pause-ms", type=options.above_zero, default=0.0, metavar="MS",
        help="mean pause before each turn, for users and models (default: none)")  # fmt: skip
    add("--block-bytes", type=options.size, default=source.BLOCK_BYTES, metavar="SIZE",
        help="size of a block of 128 tokens (default: the source's, %(default)s)")  # fmt: skip
    add("--servers", type=options.positive, default=1, metavar="N",
        help="servers to start; two or more are a fleet, which every client uses "
        "(default: %(default)s)")  # fmt: skip
    options.add_server(measuring_parser)
    add("--sla-ms", type=_limits, metavar="MS,MS",
        help="limits on reads (p50) to find the best configuration for (default: the source's, "
        "25,30,45,60, and in proportion to the fastest read)")  # fmt: skip
    add("--bucket", metavar="STORE",
        help="an object store behind the server, from which every read comes: "
        f"{', '.join(object_stores.NAMES)} (of S3, moto), or an address as s3://bucket or "
        "az://container, with that store's variables in the environment; with --server, the "
        "address of its bucket, of which reads without the server are measured too")  # fmt: skip
    add("--directory", type=options.folder, default=".", metavar="DIR",
        help="with --bucket disk, a folder on that disk (default: this one)")  # fmt: skip
    add("--storage-latency-ms", type=options.above_zero, metavar="MS",
        help="emulate a storage behind the server: the mean time to read a block "
        "there")  # fmt: skip
    add("--storage-spread-percent", type=float, metavar="PERCENT",
        help=f"the variation of that time, either way (default: {_SPREAD_PERCENT:g})")  # fmt: skip
    add("--storage-channels", type=options.positive, metavar="N",
        help=f"blocks that it reads at once (default: {_CHANNELS})")  # fmt: skip
    for flag, text in (("--csv", "the points in the source's columns"), ("--json", "the record"),
                       ("--html", "a page with charts and tables")):  # fmt: skip
        add(flag, type=Path, metavar="FILE", help=f"write {text} to this file")
    options.add_resume(measuring_parser)
    plan.add_options(commands.add_parser("plan", help="how many servers a load takes"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
