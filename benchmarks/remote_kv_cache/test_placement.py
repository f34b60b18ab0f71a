"""A fleet: how many servers does a prompt ask, how even are they, and what does a loss cost?

Replays a trace of chats and made-up sessions of agents against models of servers, under the
placement that clients of a fleet use. No server runs: `test_trace --servers` has real ones.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.fleet import model as fleet_model
from benchmarks.remote_kv_cache.replay.fleet.model import FleetCounts, FleetModel, Run
from benchmarks.remote_kv_cache.replay.levels.progress import Progress
from benchmarks.remote_kv_cache.replay.requests import agent_sessions, recorded
from benchmarks.remote_kv_cache.replay.requests.flags import CHATS, add_requests, add_trace
from benchmarks.remote_kv_cache.work.models import MODELS
from remote_server.fleet.placement import homes
from remote_server.store.eviction.lru import LRU
from remote_server.traces import Request, TraceError
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

MODULE = "benchmarks.remote_kv_cache.test_placement"

NAMESPACE = "replay"
CHAT, AGENTS = "chat", "agents"
PLACEMENTS = {
    "whole runs": {},
    "more room": {"keeps_runs_whole": False},
    "head twice": {"copies_head": True},
}
"""`whole runs`: rows go to the home that has the beginning of their run. `more room`: to the home
with more room. `head twice`: as whole runs, and rows below token 8,192 to both homes."""

COLUMNS = ("asked p50", "asked p99", "stored", "read", "usable, %", "found, %")
JOINED, JOINED_ALONE = "after a join, %", "after a join, new list alone, %"


class Workload(NamedTuple):
    """Requests, and the run of each of their blocks."""

    name: str
    requests: Sequence[Request]
    runs: Mapping[bytes, Run]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        workloads = [*_workloads(arguments)]
    except TraceError as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    record = Record.begin(MODULE, argv)
    for load in workloads:
        record.parameters[f"{load.name}: requests"] = len(load.requests)
        record.parameters[f"{load.name}: distinct blocks"] = len(load.runs)
    cases = [
        (load, placement, number)
        for load in workloads
        for placement in arguments.placements
        for number in arguments.servers
    ]
    with Runner(1, 0) as runner:
        try:
            for done, case in enumerate(cases, 1):
                where = f"replay {done} of {len(cases)}: {_name(*case)}"
                record.figures.append(_measure(*case, arguments, runner, where))
        except KeyboardInterrupt:
            runner.interrupted = True
    runner.show("")
    options.write(record, runner, arguments, chart)
    print(_described(record.figures))
    return options.finish(record, runner)


def _measure(
    load: Workload, placement: str, number: int, arguments: argparse.Namespace, runner: Runner,
    where: str,
) -> Figure:  # fmt: skip
    """The means over all lists of names."""
    values: dict[str, list[float]] = {}
    for names in name_lists(number, arguments.lists):
        fleet = fleet_of(load, names, placement, arguments.capacity)
        counts = fleet_model.replay(
            load.requests, fleet, Progress(runner, where, len(load.requests))
        )
        found = figures_of(counts, fleet)
        if arguments.join:
            found |= {
                head: _found_after_join(load, names, placement, arguments.capacity, ask_previous)
                for head, ask_previous in ((JOINED, True), (JOINED_ALONE, False))
            }
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(each) / len(each) for name, each in values.items()}
    return Figure(_name(load, placement, number), "as named", means)


def figures_of(counts: FleetCounts, fleet: FleetModel) -> dict[str, float]:
    """What the table has of one replay. `stored` and `read`: the most loaded server, relative to
    the mean."""
    stored = [len(server.memory) for server in fleet.servers.values()]
    read = [fleet.read[name] for name in fleet.servers]
    shares = [max(each) * len(each) / sum(each) if any(each) else 1.0 for each in (stored, read)]
    values = (
        percentile(counts.asked, 50), percentile(counts.asked, 99), *shares,
        100 * counts.usable(len(stored)), 100 * counts.reusable / counts.blocks,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def fleet_of(
    load: Workload, names: Sequence[str], placement: str, capacity: int | None
) -> FleetModel:
    """Of servers that share `capacity` bytes evenly; None: room for everything."""
    block_bytes = MODELS[1].block_bytes(TOKENS_PER_BLOCK)
    blocks = len(load.runs)
    if capacity is not None:
        blocks = max(1, capacity // len(names) // block_bytes)
    return FleetModel(
        names, NAMESPACE, load.runs, homes, lambda: ServerModel(blocks, 0, LRU),
        **PLACEMENTS[placement],
    )  # fmt: skip


def _found_after_join(
    load: Workload, names: Sequence[str], placement: str, capacity: int | None, ask_previous: bool
) -> float:
    """Of the blocks of the whole trace, in percent, when a server joins in the middle of it."""
    fleet = fleet_of(load, names, placement, capacity)
    more = [*names, f"{names[0]}-joined"]
    events: dict[int, Callable[[FleetModel], object]] = {
        len(load.requests) // 2: lambda each: each.change_list(more, ask_previous=ask_previous)
    }
    counts = fleet_model.replay(load.requests, fleet, events=events)
    return 100 * counts.reusable / counts.blocks


def name_lists(number: int, lists: int) -> Iterator[list[str]]:
    """`lists` lists of `number` names: few names are hashed evenly only on average."""
    for each in range(lists):
        yield [f"kvferry-{'abcdefghijklmnopqrstuvwxyz'[each]}{place}" for place in range(number)]


def _workloads(arguments: argparse.Namespace) -> Iterator[Workload]:
    if arguments.trace is not None:
        requests = recorded.read(arguments.trace, limit=arguments.requests)
        yield Workload(CHAT, requests, fleet_model.runs_of(requests))
    if arguments.sessions:
        sizes = agent_sessions.Sizes(sessions=arguments.sessions)
        requests = agent_sessions.sessions(sizes)
        yield Workload(AGENTS, requests, fleet_model.runs_of(requests))


def _name(load: Workload, placement: str, number: int) -> str:
    return f"{load.name}, {placement}: {number} server{'s' * (number > 1)}"


def _described(figures: Sequence[Figure]) -> str:
    heads = [*COLUMNS, *(head for head in (JOINED, JOINED_ALONE)
                         if any(head in figure.values for figure in figures))]  # fmt: skip
    lines: list[list[table.Cell]] = [
        [figure.name, *(figure.values.get(head) for head in heads)] for figure in figures
    ]
    return (
        "asked: servers that a prompt asks; stored, read: the most loaded server to the mean; "
        "usable: of the found blocks, when one server is gone\n"
        f"{table.render(['', *heads], lines)}"
    )


def chart(record: Record) -> plot.Chart:
    """The usable part against the number of servers."""
    values: dict[tuple[str, str], float] = {}
    for figure in record.figures:
        name, _, servers = figure.name.partition(": ")
        values[name, servers.split()[0]] = figure.values["usable, %"]
    counts = list(dict.fromkeys(count for _, count in values))
    series: dict[str, list[float | None]] = {
        name: [values.get((name, count)) for count in counts]
        for name in dict.fromkeys(name for name, _ in values)
    }
    title = titles.of(record, "reusable tokens that stay usable when one server is gone")
    return plot.lines(title, "%", counts, series, x_unit="servers")


def _parser() -> argparse.ArgumentParser:
    made = options.bare_parser(MODULE, "the placement of prompts over a fleet of servers")
    add = made.add_argument
    add_trace(add, f"{CHATS} (default: only agents)")
    add_requests(add)
    add("--sessions", type=int, default=4000, metavar="NUMBER",
        help="sessions of agents, 0 for none (default: %(default)s)")  # fmt: skip
    add("--servers", type=options.several(options.positive), default="1,2,4,8,16,100",
        metavar="NUMBERS", help="(default: %(default)s)")  # fmt: skip
    add("--placements", type=options.names(PLACEMENTS), default=[*PLACEMENTS], metavar="NAMES",
        help=f"some of {', '.join(PLACEMENTS)} (default: all)")  # fmt: skip
    add("--capacity", type=options.size, metavar="SIZE",
        help=f"bytes of all servers together, with the KV cache of {MODELS[1].name} (default: room "
        "for everything)")  # fmt: skip
    add("--join", action="store_true",
        help="also with a server that joins in the middle, with and without asking the homes by "
        "the previous list")  # fmt: skip
    add("--lists", type=options.positive, default=1, metavar="NUMBER",
        help="lists of names; results are the means over them (default: %(default)s)")  # fmt: skip
    options.add_files(made)
    return made


if __name__ == "__main__":
    sys.exit(main())
