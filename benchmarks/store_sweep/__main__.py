"""How many conversations does one server carry, and how many servers does a load take?

    python -m benchmarks.store_sweep --concurrency 1,2,4,8,16 --html sweep.html --csv sweep.csv
    python -m benchmarks.store_sweep --storage-latency-ms 20 --json sweep.json
    python -m benchmarks.store_sweep plan --target-tokens-per-s 1000000 --read-p50-ms 30 \
        --record sweep.json

A sweep (`run`, which may be left out) starts a server, and for each point processes of clients that
hold conversations, in rounds. `plan` measures nothing: it reads a sweep.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import options, table
from benchmarks.harness.files import why_not_written
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.store_sweep import conversation, page, source, spare, sweep
from benchmarks.store_sweep.figures import as_figure, read_record
from benchmarks.store_sweep.operating import best_within, operating_points, servers_for
from benchmarks.store_sweep.points import (
    Percentiles,
    Point,
    Result,
    as_csv,
    in_rounds,
    read_csv,
)
from remote_server.errors import ConfigError

MODULE = "benchmarks.store_sweep"

_POINTS = "1,2,4,6,8,16,32,64,80"
_CHANNELS = 16
_SPREAD_PERCENT = 20.0  # about what the source's reads vary by at one at once


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 2 for what was asked wrongly or cannot run, 1 with errors in a point, else 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["run", *argv]
    arguments = _parser().parse_args(argv)
    try:
        return _plan(arguments) if arguments.command == "plan" else _run(arguments, argv)
    except (ConfigError, Skipped) as error:
        print(f"store_sweep: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    points = {Point.parse(text) for text in arguments.concurrency.split(",")}
    storage = _storage(arguments)
    _check_files(arguments)
    record = Record.begin(MODULE, argv)
    if storage is not None:
        record.parameters["emulated storage"] = str(storage)
    load = sweep.Load(arguments.block_bytes, arguments.seconds, arguments.pause_ms)
    rounds: dict[Point, list[sweep.Round]] = {
        point: [] for point in sorted(points, key=lambda point: (point.concurrency, point))
    }
    with Runner(arguments.rounds, 0) as runner:
        _measure(rounds, arguments.rounds, load, storage, runner)
    record.interrupted = runner.interrupted
    record.end()
    results = [sweep.pooled(point, of_point) for point, of_point in rounds.items() if of_point]
    record.figures += [as_figure(result) for result in results]
    verdicts = spare.verdicts(results, record.machine["cores"])
    record.parameters["conclusion"] = spare.conclusion(verdicts)
    _write(record, verdicts, arguments, storage)
    _show(verdicts, load, storage)
    runner.num_failed = sum(result.errors > 0 for result in results)
    return options.finish(record, runner)


def _measure(
    rounds: dict[Point, list[sweep.Round]], num_rounds: int, load: sweep.Load,
    storage: sweep.Storage | None, runner: Runner,
) -> None:  # fmt: skip
    with sweep.server([*rounds], load.block_bytes, storage) as server:
        for number, point in in_rounds([*rounds], num_rounds):
            where = f"round {number + 1} of {num_rounds}: {point}"
            runner.say(where)
            measured = sweep.run_round(server, server.endpoint, point, load, f"{number} {point}")
            rounds[point].append(measured)
            for error in dict.fromkeys(measured.errors):
                print(f"{where}: {measured.errors.count(error)} x {error}", file=sys.stderr)
    runner.say("")


def _storage(arguments: argparse.Namespace) -> sweep.Storage | None:
    channels, spread = arguments.storage_channels, arguments.storage_spread_percent
    if arguments.storage_latency_ms is None:
        if channels is not None or spread is not None:
            raise ConfigError("no storage is emulated without --storage-latency-ms")
        return None
    spread = _SPREAD_PERCENT if spread is None else spread
    if not 0 <= spread <= 100:
        raise ConfigError(f"storage_spread_percent: {spread:g} is not from 0 to 100")
    return sweep.Storage(arguments.storage_latency_ms, spread, channels or _CHANNELS)


def _check_files(arguments: argparse.Namespace) -> None:
    """Now, because a sweep takes minutes."""
    for file in filter(None, (arguments.csv, arguments.json, arguments.html)):
        if why := why_not_written(file):
            raise ConfigError(why)
    if arguments.block_bytes < 1:
        raise ConfigError("block_bytes: a block has at least one byte")
    if arguments.html is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("html: the charts need matplotlib")


def _write(
    record: Record, verdicts: Sequence[spare.Verdict], arguments: argparse.Namespace,
    storage: sweep.Storage | None,
) -> None:  # fmt: skip
    if arguments.json is not None:
        record.write(arguments.json)
    if arguments.csv is not None:
        arguments.csv.write_text(as_csv([one.result for one in verdicts]))
    if arguments.html is not None and verdicts:
        emulated = "" if storage is None else str(storage)
        arguments.html.write_text(page.render(record, verdicts, arguments.block_bytes, emulated))


def _show(
    verdicts: Sequence[spare.Verdict], load: sweep.Load, storage: sweep.Storage | None
) -> None:
    print(
        f"{conversation.LOOKUPS} lookups, {conversation.READS} reads and {conversation.WRITES} "
        f"writes a conversation; blocks of {load.block_bytes:,} bytes; milliseconds"
    )
    if load.pause_ms:
        print(f"before each turn a pause of {load.pause_ms:g} ms on average")
    if storage is not None:
        print(f"EMULATED storage: {storage}")
    lines: list[list[table.Cell]] = []
    for verdict in verdicts:
        result = verdict.result
        lines.append([
            str(result.point), result.point.concurrency, result.tps, result.tokens_per_s,
            *result.lookup[:3], *result.read[:3], *result.write[:3], result.errors,
            result.cpu_percent, result.server_percent, *verdict.words,
        ])  # fmt: skip
    headers = ["", "at once", "a second", "tokens/s",
               *(f"{name} {p}" for name in ("lookup", "read", "write")
                 for p in Percentiles._fields[:3]),
               "errors", "CPU %", "server's %", "cores to spare", "lookups"]  # fmt: skip
    print(table.render(headers, lines))
    print(spare.conclusion(verdicts))
    recommended: list[list[table.Cell]] = [
        [one.profile, str(one.result.point), one.result.tokens_per_s, one.result.lookup.p50,
         one.result.read.p50, one.rule]
        for one in operating_points([one.result for one in verdicts])
    ]  # fmt: skip
    if recommended:
        headers = ["profile", "at once", "tokens/s", "lookup p50", "read p50", "rule"]
        print(f"\n{table.render(headers, recommended)}")


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.per_server_tokens_per_s is not None:
        if arguments.read_p50_ms is not None:
            raise ConfigError("read_p50_ms: needs a sweep to choose from, not one server's tokens")
        one = arguments.per_server_tokens_per_s
        where = "as given"
    else:
        limit = math.inf if arguments.read_p50_ms is None else arguments.read_p50_ms
        best = best_within(_sweep_of(arguments), limit)
        one = best.tokens_per_s
        where = f"at {best.point}, where a read takes {best.read.p50:.3g} ms (p50)"
    target = arguments.target_tokens_per_s
    count = servers_for(target, one)
    servers = "1 server" if count == 1 else f"{count} servers"
    print(f"{servers} for {target:,.0f} tokens/s: each carries {one:,.0f} {where}")
    return 0


def _sweep_of(arguments: argparse.Namespace) -> list[Result]:
    if arguments.source:
        return source.results()
    if arguments.record is not None:
        return read_record(arguments.record)
    return read_csv(arguments.csv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("run", help="measure").add_argument
    add("--concurrency", default=_POINTS, metavar="N,N",
        help="conversations at once; up to 8 a process each, beyond it 8 processes, or as in 3x4 "
        "(default: %(default)s)")  # fmt: skip
    add("--seconds", type=options.above_zero, default=2.0,
        help="of each point in each round (default: %(default)g)")  # fmt: skip
    add("--rounds", type=options.positive, default=3, metavar="N",
        help="times that each point is measured, all together (default: %(default)s)")  # fmt: skip
    add("--pause-ms", type=options.above_zero, default=0.0, metavar="MS",
        help="before each turn, on average, as people and models take (default: none)")  # fmt: skip
    add("--block-bytes", type=options.size, default=source.BLOCK_BYTES, metavar="SIZE",
        help="of 128 tokens (default: the source's payload, %(default)s)")  # fmt: skip
    add("--storage-latency-ms", type=options.above_zero, metavar="MS",
        help="emulate a storage behind the server: what a read of a block takes in it, on "
        "average")  # fmt: skip
    add("--storage-spread-percent", type=float, metavar="PERCENT",
        help=f"how much less or more a block may take (default: {_SPREAD_PERCENT:g})")  # fmt: skip
    add("--storage-channels", type=options.positive, metavar="N",
        help=f"and how many blocks it reads at once (default: {_CHANNELS})")  # fmt: skip
    for flag, text in (("--csv", "the points, in the source's columns"), ("--json", "the record"),
                       ("--html", "a page with charts and tables")):  # fmt: skip
        add(flag, type=Path, metavar="FILE", help=f"write {text} there")
    plan = commands.add_parser("plan", help="how many servers a load takes")
    plan.add_argument("--target-tokens-per-s", type=options.above_zero, required=True, metavar="N")
    plan.add_argument(
        "--read-p50-ms", type=options.above_zero, metavar="MS",
        help="take the point with the most tokens whose reads are faster (default: any)",
    )  # fmt: skip
    add = plan.add_mutually_exclusive_group(required=True).add_argument
    add("--record", type=Path, metavar="FILE", help="a sweep of yours, from --json")
    add("--csv", type=Path, metavar="FILE", help="or from --csv")
    add("--source", action="store_true", help="or the source's table")
    add("--per-server-tokens-per-s", type=options.above_zero, metavar="N",
        help="or what one server carries")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
