"""How many conversations does one server carry, and how many servers does a load take?

    python -m benchmarks.store_sweep --concurrency 1,2,4,8,16 --html sweep.html --csv sweep.csv
    python -m benchmarks.store_sweep --storage-latency-ms 20
    python -m benchmarks.store_sweep plan --target-tokens-per-s 1000000 --read-p50-ms 30 \
        --csv sweep.csv

A sweep (`run`, which may be left out) starts a server, and for each point processes of clients that
hold conversations. `plan` measures nothing: it reads a sweep.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import options, table
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.store_sweep import conversation, page, source, sweep
from benchmarks.store_sweep.operating import best_within, operating_points, servers_for
from benchmarks.store_sweep.points import Percentiles, Point, Result, as_csv, read_csv
from remote_server.errors import ConfigError

MODULE = "benchmarks.store_sweep"

_POINTS = "1,2,4,6,8,16,32,64,80"
_CHANNELS = 16


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
    points = [Point.parse(text) for text in arguments.concurrency.split(",")]
    record = Record.begin(MODULE, argv)
    emulated = ""
    if arguments.storage_latency_ms:
        emulated = (
            f"each block of a read takes {arguments.storage_latency_ms:g} ms more in the server, "
            f"{arguments.storage_channels} blocks at a time; lookups and writes do not"
        )
        record.parameters["emulated storage"] = emulated
    results: list[Result] = []
    with Runner(1, 0) as runner:
        _measure(points, arguments, record, results, runner)
    record.interrupted = runner.interrupted
    record.end()
    _write(record, results, arguments, emulated)
    _show(results, arguments.block_bytes, emulated)
    runner.num_failed = sum(result.errors > 0 for result in results)
    return options.finish(record, runner)


def _measure(
    points: Sequence[Point], arguments: argparse.Namespace, record: Record,
    results: list[Result], runner: Runner,
) -> None:  # fmt: skip
    server = sweep.server(
        points, arguments.block_bytes, arguments.storage_latency_ms, arguments.storage_channels
    )
    with server:
        for number, point in enumerate(points):
            where = f"point {number + 1} of {len(points)}: {point}"
            runner.say(where)
            result, errors = sweep.run_point(
                server.endpoint, point, arguments.block_bytes, arguments.seconds, f"{number}"
            )
            results.append(result)
            record.figures.append(_figure(result))
            for error in dict.fromkeys(errors):
                print(f"{where}: {errors.count(error)} x {error}", file=sys.stderr)
    runner.say("")


def _figure(result: Result) -> Figure:
    values: dict[str, float] = {
        "conversations per second": result.tps,
        "tokens per second": result.tokens_per_s,
        "errors": float(result.errors),
    }
    for operation in ("lookup", "read", "write"):
        percentiles: Percentiles = getattr(result, operation)
        for name, value in zip(Percentiles._fields, percentiles, strict=True):
            if value is not None:
                values[f"{operation} {name}, ms"] = value
    if result.cpu_percent is not None:
        values["cpu, percent"] = result.cpu_percent
    return Figure(f"{result.point.concurrency} at once ({result.point})", "as named", values, "tcp")


def _write(
    record: Record, results: Sequence[Result], arguments: argparse.Namespace, emulated: str
) -> None:
    if arguments.json is not None:
        record.write(arguments.json)
    if arguments.csv is not None:
        arguments.csv.write_text(as_csv(results))
    if arguments.html is not None and results:
        arguments.html.write_text(page.render(record, results, arguments.block_bytes, emulated))


def _show(results: Sequence[Result], block_bytes: int, emulated: str) -> None:
    print(
        f"{conversation.LOOKUPS} lookups, {conversation.READS} reads and {conversation.WRITES} "
        f"writes a conversation; blocks of {block_bytes:,} bytes; milliseconds"
    )
    if emulated:
        print(f"EMULATED storage: {emulated}")
    lines: list[list[table.Cell]] = [
        [str(r.point), r.point.concurrency, r.tps, r.tokens_per_s, *r.lookup[:3], *r.read[:3],
         *r.write[:3], r.errors, r.cpu_percent]
        for r in results
    ]  # fmt: skip
    headers = ["", "at once", "a second", "tokens/s",
               *(f"{name} {p}" for name in ("lookup", "read", "write")
                 for p in Percentiles._fields[:3]), "errors", "CPU %"]  # fmt: skip
    print(table.render(headers, lines))
    recommended: list[list[table.Cell]] = [
        [one.profile, str(one.result.point), one.result.tokens_per_s, one.result.lookup.p50,
         one.result.read.p50, one.rule]
        for one in operating_points(results)
    ]  # fmt: skip
    if recommended:
        headers = ["profile", "at once", "tokens/s", "lookup p50", "read p50", "rule"]
        print(f"\n{table.render(headers, recommended)}")


def _plan(arguments: argparse.Namespace) -> int:
    target = arguments.target_tokens_per_s
    if arguments.per_server_tokens_per_s is not None:
        one = arguments.per_server_tokens_per_s
        where = "as given"
    else:
        if arguments.csv is None and not arguments.source:
            raise ConfigError(
                "plan: give a sweep (--csv FILE), the source's table (--source), or what one "
                "server carries (--per-server-tokens-per-s)"
            )
        results = source.results() if arguments.source else read_csv(arguments.csv)
        best = best_within(results, arguments.read_p50_ms)
        one = best.tokens_per_s
        where = f"at {best.point}, where a read takes {best.read.p50:g} ms (p50)"
    count = servers_for(target, one)
    print(f"{count} servers for {target:,.0f} tokens/s: each carries {one:,.0f} {where}")
    return 0


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
    add("--seconds", type=float, default=5.0, help="of each point (default: %(default)g)")
    add("--block-bytes", type=options.size, default=source.BLOCK_BYTES, metavar="SIZE",
        help="of 128 tokens (default: the source's payload, %(default)s)")  # fmt: skip
    add("--storage-latency-ms", type=float, default=0.0, metavar="MS",
        help="emulate a storage behind the server: what a read of a block takes in it")  # fmt: skip
    add("--storage-channels", type=options.positive, default=_CHANNELS, metavar="N",
        help="and how many blocks it reads at once (default: %(default)s)")  # fmt: skip
    for flag, text in (("--csv", "the points, in the source's columns"), ("--json", "the record"),
                       ("--html", "a page with charts and tables")):  # fmt: skip
        add(flag, type=Path, metavar="FILE", help=f"write {text} there")
    add = commands.add_parser("plan", help="how many servers a load takes").add_argument
    add("--target-tokens-per-s", type=float, required=True, metavar="N")
    add(
        "--read-p50-ms",
        type=float,
        default=float("inf"),
        metavar="MS",
        help="take the point with the most tokens whose reads are faster (default: any)",
    )
    add("--csv", type=Path, metavar="FILE", help="a sweep of yours")
    add("--source", action="store_true", help="use the source's table instead")
    add("--per-server-tokens-per-s", type=float, metavar="N", help="use this instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
