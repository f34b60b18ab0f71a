"""Capacity: how many lookups, puts and gets does one server's loop serve, and how many engines?

    python -m benchmarks.remote_kv_cache.baseline.test_capacity

The loop is one thread, so its CPU time for a call bounds the calls of a second. Measured for calls
of several sizes, and with client processes until the loop or the machine is busy; from the costs
follows the number of engines that one loop carries.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.remote_kv_cache.baseline.capacity import costs, engines, saturation
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import TRANSPORTS

MODULE = "benchmarks.remote_kv_cache.baseline.test_capacity"

CLIENTS = (1, 2, 4, 8)
FOUND = (0.2, 0.5, 0.8)
_CALLS_OF_A_CLIENT = 2
"""Times `--operations`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    record = Record.begin(MODULE, argv)
    load = engines.Load(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens,
        arguments.step_tokens, blocks.BLOCK_SIZE,
    )  # fmt: skip
    record.parameters |= engines.assumptions(load)
    transports = arguments.transport
    try:
        with Runner(arguments.trials, arguments.warm_ups) as runner:
            found = costs.measure(
                runner, record, transports, arguments.operations, arguments.memory
            )
            usable = [one for one in transports if one not in record.parameters]
            if usable:
                record.figures += engines.lines_of(found, usable)
                record.figures += engines.table_of(found, usable, load, arguments.found)
            if usable and not runner.interrupted:
                calls = _CALLS_OF_A_CLIENT * arguments.operations
                saturation.measure(runner, record, usable, arguments.clients, calls)
    except Skipped as reason:
        print(f"{MODULE}: {reason}", file=sys.stderr)
        return 2
    options.write(record, runner, arguments, chart)
    show(record, engines.assumptions(load))
    return options.finish(record, runner)


def show(record: Record, assumptions: dict[str, str]) -> None:
    """Print the costs, the saturation points, and the engines with their assumptions."""
    of_calls = [figure for figure in record.figures if costs.LOOP in figure.values]
    names = (costs.LOOP, costs.ZMQ, costs.MOVERS, costs.MESSAGES, costs.TIME)
    print("CPU of the server for one call, by thread, in microseconds; medians")
    print(_table(of_calls, ["a call", "", "loop", "libzmq", "movers", "messages", "time"], names))
    lines = [figure for figure in record.figures if engines.MESSAGE in figure.values]
    if lines:
        print("\nof these the loop takes, in microseconds")
        parts = (engines.MESSAGE, engines.EACH, engines.OF_BYTES)
        print(_table(lines, ["", "", *parts], parts))
    points = [figure for figure in record.figures if saturation.RATE in figure.values]
    if points:
        print(f"\nclients that make calls back to back, on {record.machine['cores']} cores")
        print(_points(points))
    carried = [figure for figure in record.figures if engines.ENGINES in figure.values]
    if carried:
        print("\nengines of one loop, computed:")
        for name, text in assumptions.items():
            print(f"  {name}: {text}")
        values = (engines.LOOP, engines.SHARE, engines.ENGINES, engines.RATE)
        print(_table(carried, ["", "", *values], values))
    for name, why in record.parameters.items():
        if str(why).startswith(("skipped: ", "FAILED: ")):
            print(f"{name}: {why}")


def _points(points: Sequence[Figure]) -> str:
    heads = ["", "", "calls/s", "loop's share", "us a call", "clients' cores", "cores busy"]
    names = (saturation.RATE, saturation.SHARE, saturation.COST, saturation.CLIENTS,
             saturation.BUSY)  # fmt: skip
    lines: list[list[table.Cell]] = [
        [one.name, one.transport, *(one.values[name] for name in names), saturation.bound_of(one)]
        for one in points
    ]
    return table.render([*heads, "bound by"], lines)


def _table(figures: Sequence[Figure], heads: list[str], names: Sequence[str]) -> str:
    lines: list[list[table.Cell]] = [
        [one.name.removeprefix("engines: "), one.transport, *map(one.values.get, names)]
        for one in figures
    ]
    return table.render(heads, lines)


def chart(record: Record) -> plot.Chart:
    """The loop's time of each call."""
    found = {
        (one.name, one.transport): one.values[costs.LOOP]
        for one in record.figures
        if costs.LOOP in one.values
    }
    names = list(dict.fromkeys(name for name, _ in found))
    transports = list(dict.fromkeys(transport for _, transport in found))
    series = {
        str(transport): [found.get((name, transport)) for name in names] for transport in transports
    }
    return plot.bars(titles.of(record, "test_capacity"), "us of the loop a call", names, series)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(MODULE, "what requests cost the loop of a server")
    parser.add_argument("--transport", type=options.names(TRANSPORTS), default=[*TRANSPORTS],
                        metavar="NAMES", help="of puts and gets (default: tcp,shm)")  # fmt: skip
    parser.add_argument("--operations", type=options.positive, default=200,
                        help="calls of a trial (default: %(default)s)")  # fmt: skip
    parser.add_argument("--clients", type=options.several(options.positive), default=[*CLIENTS],
                        metavar="NUMBERS", help="client processes (default: 1,2,4,8)")  # fmt: skip
    parser.add_argument("--requests", type=options.above_zero, default=1.0, metavar="NUMBER",
                        help="of an engine, a second (default: %(default)g)")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=options.positive, default=8192,
                        help="of a request (default: %(default)s)")  # fmt: skip
    parser.add_argument("--output-tokens", type=options.positive, default=256,
                        help="of its answer (default: %(default)s)")  # fmt: skip
    parser.add_argument("--step-tokens", type=options.positive, default=2048,
                        help="prompt tokens of an engine step (default: %(default)s)")  # fmt: skip
    parser.add_argument("--found", type=options.several(_share), default=[*FOUND],
                        metavar="SHARES", help="of prompts (default: 0.2,0.5,0.8)")  # fmt: skip
    return parser


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
