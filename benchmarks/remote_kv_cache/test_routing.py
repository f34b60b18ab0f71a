"""Routers: what does a prompt gain when the router knows what engines and servers hold?

Replays a trace of chats before several engines and one server that they share, by four rules: round
robin, sticky sessions, the engines' events with their queues, and these with what `locate` answers.
The engines are models in virtual time; `--real` starts two that compute, with a real server, and
sends the trace's first prompts, scaled down, over HTTP.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.replay.levels.progress import Progress
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.remote_kv_cache.replay.requests.flags import CHATS, add_requests, add_trace
from benchmarks.remote_kv_cache.work.models import MODELS
from benchmarks.routing import model
from benchmarks.routing.model import Rooms, Served, Speeds
from benchmarks.routing.rules import RULES, sessions_of
from remote_server.traces import Request, TraceError
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.values import GiB

if TYPE_CHECKING:
    from benchmarks.routing.real_fleet import Replayed

MODULE = "benchmarks.remote_kv_cache.test_routing"

SERVED, ALONE = "with a server", "without"

PERCENTILES = (50, 90)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        requests = recorded.read(arguments.trace, limit=arguments.requests)
    except TraceError as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    record = Record.begin(MODULE, argv)
    with Runner(1, 0) as runner:
        try:
            if arguments.real:
                replay_really(requests, arguments, record, runner)
            else:
                replay_all(requests, arguments, record, runner)
        except KeyboardInterrupt:
            runner.interrupted = True
    runner.show("")
    options.write(record, runner, arguments, chart)
    print(describe(record, arguments))
    return options.finish(record, runner)


def _model() -> Any:
    return MODELS[1]


def replay_all(
    requests: Sequence[Request], arguments: argparse.Namespace, record: Record, runner: Runner
) -> None:
    """Every rule at every speed, with a server and without."""
    sessions = sessions_of(requests)
    record.parameters |= {
        "requests": len(requests), "sessions": len(set(sessions)), "model": _model().name,
        "engines": "in virtual time",
    }  # fmt: skip
    speeds = Speeds(
        arguments.computes, arguments.computes * arguments.pool_ratio,
        arguments.computes * arguments.ratio,
    )  # fmt: skip
    block_bytes = _model().block_bytes(TOKENS_PER_BLOCK)
    cases = [
        (speed_up, place, rule)
        for speed_up in arguments.speed_ups
        for place in (SERVED, ALONE)
        for rule in RULES
    ]
    for number, (speed_up, place, rule) in enumerate(cases, 1):
        name = f"{rule}: {speed_up:g} times the trace's speed, {place}"
        shown = Progress(runner, f"replay {number} of {len(cases)}: {name}", len(requests))
        server_bytes = arguments.server_memory if place == SERVED else 0
        rooms = Rooms(*(n // block_bytes for n in (arguments.cache, arguments.pool, server_bytes)))
        engines, server = model.fleet_of(arguments.engines, speeds, rooms)
        try:
            chosen = RULES[rule]([one.picture for one in engines])
            served = model.replay(requests, sessions, speed_up, engines, server, chosen, shown)
        finally:
            model.close(engines)
        record.figures.append(Figure(name, "as named", values_of(served)))


def replay_really(
    requests: Sequence[Request], arguments: argparse.Namespace, record: Record, runner: Runner
) -> None:
    """Every rule in turns, each as often as `--rounds`, before two engines that compute."""
    from benchmarks.routing import real_fleet

    some = real_fleet.prompts_of(requests, arguments.most_blocks, arguments.prompts)
    sessions = sessions_of(some)
    cores = sorted(os.sched_getaffinity(0))
    rounds: dict[str, list[real_fleet.Replayed]] = {rule: [] for rule in RULES}
    with ExitStack() as stack:
        runner.show("starting a server and two engines")
        fleet = real_fleet.RealFleet(stack, arguments.models, arguments.most_blocks, cores)
        for number in range(arguments.rounds):
            for rule in RULES:
                where = f"round {number + 1} of {arguments.rounds}: {rule}"
                shown = Progress(runner, where, len(some))
                rounds[rule].append(fleet.replay(rule, some, sessions, arguments.every, shown))
        record.parameters |= {
            "requests": len(some), "sessions": len(set(sessions)), "model": real_fleet.MODEL,
            "engines": "two real ones", "tokens of a block": real_fleet.BLOCK_TOKENS,
            "computed tokens/s": round(fleet.computes_per_s),
            "loaded tokens/s": round(fleet.loads_per_s),
        }  # fmt: skip
    for rule, replayed in rounds.items():
        of_rounds = [values_of_real(one) for one in replayed]
        each = {name: [one[name] for one in of_rounds] for name in of_rounds[0]}
        medians = {name: percentile(values, 50) for name, values in each.items()}
        record.figures.append(Figure(f"{rule}: two real engines", "as named", medians, rounds=each))


def values_of_real(replayed: "Replayed") -> dict[str, float]:
    """What the table has of one round."""
    found = {
        f"{level}, %": 100 * tokens / replayed.prompt_tokens
        for level, tokens in replayed.found.items()
    }
    return _values(replayed.first_tokens_s, found, replayed.busiest)


def values_of(served: Sequence[Served]) -> dict[str, float]:
    """What the table has of one replay."""
    seconds = [one.first_token_s for one in served]
    blocks = sum(one.blocks for one in served)
    found = {
        f"{level}, %": 100 * sum(one.found[level] for one in served) / blocks
        for level in (model.ENGINE, model.POOL, model.SERVER)
    }
    return _values(seconds, found, max(model.shares(served)))


def _values(
    seconds: Sequence[float], found: Mapping[str, float], busiest: float
) -> dict[str, float]:
    return {
        **{f"p{percent}, s": percentile(seconds, percent) for percent in PERCENTILES},
        "found, %": sum(found.values()), **found, "busiest, %": 100 * busiest,
    }  # fmt: skip


def describe(record: Record, arguments: argparse.Namespace) -> str:
    """The table of a run."""
    heads = [*record.figures[0].values] if record.figures else []
    lines: list[list[table.Cell]] = [
        [figure.name, *(figure.values[head] for head in heads)] for figure in record.figures
    ]
    computed, loaded = arguments.computes, arguments.computes * arguments.ratio
    number = arguments.engines
    if arguments.real:
        known = record.parameters
        number = 2
        computed, loaded = known.get("computed tokens/s", 0), known.get("loaded tokens/s", 0)
    return (
        f"{number} engines that compute {computed:,.0f} tokens a second and load {loaded:,.0f}; "
        f"p50, p90: of the first token; found: of the prompts, by level\n"
        f"{table.render(['', *heads], lines)}"
    )


def chart(record: Record) -> plot.Chart:
    """The first token's p90 by rule."""
    values: dict[tuple[str, str], float] = {}
    for figure in record.figures:
        rule, _, setting = figure.name.partition(": ")
        values[rule, setting] = figure.values["p90, s"]
    settings = [*dict.fromkeys(setting for _, setting in values)]
    series: Mapping[str, list[float | None]] = {
        rule: [values.get((rule, setting)) for setting in settings] for rule in RULES
    }
    engines = record.parameters.get("engines", "")
    title = titles.of(record, f"p90 of the first token by the router's rule, engines {engines}")
    return plot.bars(title, "s", settings, series, log=True)


def _parser() -> argparse.ArgumentParser:
    made = options.bare_parser(MODULE, "rules of routers before engines that share a server")
    add = made.add_argument
    add_trace(add, CHATS, required=True)
    add_requests(add)
    add("--engines", type=options.positive, default=4, metavar="NUMBER",
        help="(default: %(default)s)")  # fmt: skip
    add("--speed-ups", type=options.several(options.above_zero), default="0.5,1,1.2",
        metavar="NUMBERS", help="how fast requests arrive, in times the trace's speed "
        "(default: %(default)s)")  # fmt: skip
    add("--computes", type=options.above_zero, default=10_000.0, metavar="TOKENS",
        help="that an engine computes in a second (default: %(default)g)")  # fmt: skip
    add(
        "--ratio",
        type=options.above_zero,
        default=12.0,
        metavar="TIMES",
        help="how much faster the server's blocks come (default: %(default)g, the source's)",
    )
    add("--pool-ratio", type=options.above_zero, default=48.0, metavar="TIMES",
        help="how much faster those of the CPU pool come (default: %(default)g)")  # fmt: skip
    for flag, of, size in (
        ("--cache", "an engine's own cache", 32 * GiB),
        ("--pool", "an engine's CPU pool", 64 * GiB),
        ("--server-memory", "the server", 1024 * GiB),
    ):
        add(flag, type=options.size, default=size, metavar="SIZE",
            help=f"room of {of} (default: {size // GiB}GiB)")  # fmt: skip
    add("--real", action="store_true",
        help="two engines that compute and a real server; of the options above only --trace and "
        "--requests count")  # fmt: skip
    add("--prompts", type=options.positive, default=160, metavar="NUMBER",
        help="of the trace, with --real (default: %(default)s)")  # fmt: skip
    add(
        "--most-blocks",
        type=options.positive,
        default=60,
        metavar="NUMBER",
        help="of a prompt, with --real: longer ones are left out (default: %(default)s)",
    )
    add("--every", type=options.above_zero, default=0.2, metavar="SECONDS",
        help="between two prompts, with --real (default: %(default)g)")  # fmt: skip
    add("--rounds", type=options.positive, default=3, metavar="NUMBER",
        help="with --real (default: %(default)s)")  # fmt: skip
    add("--models", type=options.folder, default=Path(tempfile.gettempdir()) / "kvferry-models",
        metavar="FOLDER", help="where the generated model is kept, with --real (default: "
        "%(default)s)")  # fmt: skip
    options.add_files(made)
    return made


if __name__ == "__main__":
    sys.exit(main())
