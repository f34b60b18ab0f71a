"""A plan: how many servers a load takes, with the record that each figure comes from."""

import argparse
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import options
from benchmarks.harness.record import Record, RecordError
from benchmarks.store_sweep import source
from benchmarks.store_sweep.figures import Evenness, read_evenness, read_record, servers_of
from benchmarks.store_sweep.operating import best_within, servers_for
from benchmarks.store_sweep.points import Result, read_csv
from remote_server.errors import ConfigError

RECORDED = Path(__file__).parents[1] / "results"
"""The last records, which are in the repository."""

SWEEP, FLEET, CLIENT = (
    "store_sweep_four.json", "test_trace_fleet_model.json", "test_server_fleet.json"
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-tokens-per-s", type=options.above_zero, required=True,
                        metavar="N")  # fmt: skip
    parser.add_argument(
        "--read-p50-ms", type=options.above_zero, metavar="MS",
        help="use the point with the most tokens whose reads are faster (default: any)",
    )  # fmt: skip
    parser.add_argument(
        "--fleet", type=Path, metavar="FILE",
        help="a record of test_trace --servers: the busiest server carries more than the mean, and "
        "with little room a fleet finds less, as measured there (default: all carry the same)",
    )  # fmt: skip
    parser.add_argument(
        "--client", type=Path, metavar="FILE",
        help="a record of test_server --only fleet: what a fleet costs its clients",
    )  # fmt: skip
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--record", type=Path, metavar="FILE", help="the sweep, from --json")
    add("--csv", type=Path, metavar="FILE", help="the sweep, from --csv")
    add("--source", action="store_true", help="the source's table")
    add("--recorded", action="store_true",
        help="the last records of this repository: the sweep of four servers, --fleet and "
        "--client")  # fmt: skip
    add("--per-server-tokens-per-s", type=options.above_zero, metavar="N",
        help="the load of one server")  # fmt: skip


class Load(NamedTuple):
    """What one server carries."""

    tokens_per_s: float
    where: str
    origin: str
    """The record that has it; empty where the caller gave it."""

    a_core: float | None = None
    """Tokens a second for each core that the servers' processes used; None: not measured."""


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The plan, a fact a line. Raises `ConfigError`."""
    fleet, client = arguments.fleet, arguments.client
    if arguments.recorded:
        fleet, client = fleet or RECORDED / FLEET, client or RECORDED / CLIENT
    load = _load(arguments)
    costs = [] if client is None else _client_costs(client)
    even = Evenness({1: 1.0}) if fleet is None else read_evenness(fleet)
    target: float = arguments.target_tokens_per_s
    count = servers_for(target, load.tokens_per_s, even.of)
    carries = f"each carries {load.tokens_per_s:,.0f} {load.where}"
    yield f"{_servers(count)} for {target:,.0f} tokens/s: {carries}{load.origin}"
    if load.a_core is not None:
        cores = servers_for(target, load.a_core, even.of)
        yield (
            f"by their own CPU time {_servers(cores)} with a core each: {load.a_core:,.0f} "
            f"tokens/s a core, with the clients elsewhere{load.origin}"
        )
    if fleet is not None:
        origin = _origin(fleet)
        busiest = f"the busiest of {count} is read {even.of(count):.2f} times as much as the mean"
        if count > (most := max(even.known)):
            busiest += f", as of {most}, the most measured"
        yield busiest + origin
        for room, number, found, by_one in _found(fleet, count) if count > 1 else ():
            yield (
                f"with {room} in all, {number} servers find {found:.1f} % and one finds "
                f"{by_one:.1f} %{origin}"
            )
    if count > 1:
        yield from costs


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"


def _load(arguments: argparse.Namespace) -> Load:
    if arguments.per_server_tokens_per_s is not None:
        if arguments.read_p50_ms is not None:
            raise ConfigError("read_p50_ms: needs a sweep to choose from, not one server's tokens")
        return Load(arguments.per_server_tokens_per_s, "as given", "")
    limit = math.inf if arguments.read_p50_ms is None else arguments.read_p50_ms
    file = RECORDED / SWEEP if arguments.recorded else arguments.record
    best = best_within(_sweep_of(file, arguments), limit)
    among = 1 if file is None else servers_of(file)
    where = f"at {best.point}, where a read takes {best.read.p50:.3g} ms (p50)"
    where += f", as one of {among}" * (among > 1)
    a_core = None
    if file is not None and best.server_percent:  # measured where they run beside the clients
        where += " on the clients' cores"
        a_core = 100 * best.tokens_per_s / best.server_percent
    origin = f" (from {arguments.csv})" if arguments.csv is not None else ""
    return Load(best.tokens_per_s / among, where, origin if file is None else _origin(file), a_core)


def _sweep_of(file: Path | None, arguments: argparse.Namespace) -> list[Result]:
    if arguments.source:
        return source.results()
    return read_csv(arguments.csv) if file is None else read_record(file)


def _read(file: Path) -> Record:
    try:
        return Record.read(file)
    except RecordError as error:
        raise ConfigError(str(error)) from None


def _origin(file: Path) -> str:
    """The record, when and where it was made, as the end of a line."""
    record = _read(file)
    return f" (from {file.name}, {record.started[:10]}, {record.describe_machine()})"


def _found(file: Path, count: int) -> Iterator[tuple[str, int, float, float]]:
    """Each limited room, a number of servers, and the shares that these and one find in the model.
    The number is `count`, at most that of the largest fleet measured."""
    known: dict[str, dict[int, float]] = {}
    for figure in _read(file).figures:
        words = re.match(r"store: (\d+) servers?, room for ([^,]+), nothing$", figure.name)
        if words and words[2] != "everything" and "found" in figure.values:
            known.setdefault(words[2], {})[int(words[1])] = figure.values["found"]
    for room, found in known.items():
        number = min(count, max(found))
        if 1 in found and number > 1:
            yield room, number, Evenness(found).of(number), found[1]


def _client_costs(file: Path) -> list[str]:
    """A line for each cost of a fleet to a client, relative to one server. Raises `ConfigError`."""
    costs = [
        f"{figure.name} with {name.removesuffix(' to one')}: {value:.2f} times one server's"
        for figure in _read(file).figures
        for name, value in figure.values.items()
        if re.fullmatch(r"\d+ servers to one", name)
    ]
    if not costs:
        raise ConfigError(f"{file}: no cost of a fleet to its client in it")
    return [cost + _origin(file) for cost in costs]
