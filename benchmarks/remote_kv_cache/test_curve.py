"""The live curve: how far is it from full replays, and what does it cost?

The requests of a trace and of made-up workloads run through a cache of one level at each capacity,
with the follower of a server beside it. Its estimates for an eighth to eight times the size, under
the learned rule and under LRU, are compared with replays of the whole requests at these sizes. The
cost is CPU a key and memory, for caches of up to a million blocks.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.harness import options
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.curve import cost as curve_cost
from benchmarks.remote_kv_cache.replay.curve import study as curve_study
from benchmarks.remote_kv_cache.replay.curve.cost import Cost
from benchmarks.remote_kv_cache.replay.curve.study import Cell
from benchmarks.remote_kv_cache.replay.eviction.one_level_report import Make, Room
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.remote_kv_cache.replay.requests.flags import ANY, add_requests, add_trace
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE
from benchmarks.remote_kv_cache.work.models import MODELS
from remote_server.traces import Request, TraceError
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

MODULE = "benchmarks.remote_kv_cache.test_curve"

TRACE = "trace"
"""The name of its rows."""

WORKLOADS = ["zipf", "chat", "rag", "agents", "mixture"]
ACCURACY, COST = PARTS = "accuracy", "cost"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        makers = makers_of(arguments) if ACCURACY in arguments.parts else {}
    except TraceError as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    model = MODELS[1]
    block_bytes = model.block_bytes(TOKENS_PER_BLOCK)
    rooms = [Room(size, max(1, size // block_bytes)) for size in arguments.capacity]
    record = Record.begin(MODULE, argv)
    record.parameters |= {"model": model.name, "block_bytes": block_bytes}
    cells: list[Cell] = []
    costs: list[Cost] = []
    with Runner(arguments.trials, 0) as runner:
        curve_study.run(cells, makers, rooms, block_bytes, runner)
        for number in arguments.blocks if COST in arguments.parts else ():
            if not runner.interrupted:
                costs.append(
                    curve_cost.measure(
                        number, arguments.prompt_keys, arguments.trials, arguments.prompts, runner
                    )
                )
    runner.show("")
    record.figures += curve_study.figures(cells)
    if costs:
        record.parameters["keys of a new prompt"] = arguments.prompt_keys
        record.figures += curve_cost.figures(costs)
    options.write(record, runner, arguments, charts)
    if cells:
        print(curve_study.describe(cells))
    if costs:
        print(curve_cost.describe(costs))
    return options.finish(record, runner)


def charts(record: Record) -> Mapping[str, Chart]:
    """One of each workload."""
    return curve_study.charts(record)


def makers_of(arguments: argparse.Namespace) -> dict[str, Make]:
    """Makes the requests of each source for a cache of so many blocks. Raises `TraceError`."""
    made: dict[str, Make] = {}
    if arguments.trace is not None:
        requests = recorded.read(arguments.trace, limit=arguments.requests)
        made[TRACE] = lambda places: requests
    for name in arguments.workload:
        made[name] = partial(_made, name, arguments.requests)
    return made


def _made(name: str, limit: int | None, places: int) -> Sequence[Request]:
    return MADE[name](places, 1)[:limit]


def _parser() -> argparse.ArgumentParser:
    made = options.bare_parser(
        MODULE, "the live miss-ratio curve beside full replays, and its cost"
    )
    add = made.add_argument
    add_trace(add, f"{ANY} (default: only the workloads)")
    add("--workload", type=options.names(MADE), default=WORKLOADS, metavar="NAMES",
        help="requests made up with a seed for a cache of each capacity: some of "
        f"{', '.join(MADE)} (default: {','.join(WORKLOADS)})")  # fmt: skip
    add_requests(add, "of each")
    add("--capacity", type=options.several(options.size), default="24GiB,48GiB,96GiB,192GiB,384GiB",
        metavar="SIZES",
        help=f"of the cache, with the KV cache of {MODELS[1].name} (default: %(default)s)",
        )  # fmt: skip
    add("--parts", type=options.names(PARTS), default=[*PARTS], metavar="NAMES",
        help=f"some of {', '.join(PARTS)} (default: both)")  # fmt: skip
    add("--blocks", type=options.several(options.positive), default="4000,64000,1000000",
        metavar="NUMBERS",
        help="of the caches whose curve's cost is measured (default: %(default)s)")  # fmt: skip
    add("--prompt-keys", type=options.positive, default=512, metavar="NUMBER",
        help="of a new prompt there; a continued one has half as many behind its beginning "
        "(default: %(default)s)")  # fmt: skip
    add("--prompts", type=options.positive, default=2000, metavar="NUMBER",
        help="of a chunk there (default: %(default)s)")  # fmt: skip
    add("--trials", type=options.positive, default=7, help="chunks there (default: %(default)s)")
    options.add_files(made, "charts")
    return made


if __name__ == "__main__":
    sys.exit(main())
