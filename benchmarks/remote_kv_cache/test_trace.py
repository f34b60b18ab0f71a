"""Traces: what would real requests find, and on which level?

Replays a trace of real requests against the CPU pool and the server, at chosen sizes, and reports
the share of the prompts' blocks found in the pool, in the server's memory and on its disk, beside
the share of the best possible evictions. `--replay wire` is a real server process, the connector's
tier and its client; `store` is the policies alone, which takes seconds. `--eviction` judges the
server's eviction in one level without a pool above.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from benchmarks.harness import options
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.caches.candidates import IN_STORE
from benchmarks.remote_kv_cache.replay.caches.optimum import next_uses, optimum, without_limit
from benchmarks.remote_kv_cache.replay.levels import flags, report
from benchmarks.remote_kv_cache.replay.levels.bucket_watch import tails
from benchmarks.remote_kv_cache.replay.levels.costs import PRICED
from benchmarks.remote_kv_cache.replay.levels.points import REPLAYS, WIRE, Setting
from benchmarks.remote_kv_cache.replay.levels.progress import Progress
from benchmarks.remote_kv_cache.replay.levels.report import BucketStudy, Study
from benchmarks.remote_kv_cache.replay.requests import recorded
from remote_server.errors import ConfigError
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.traces import Request, TraceError, distinct, longest
from remote_server.traces.model_bucket import Shape
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

MODULE = "benchmarks.remote_kv_cache.test_trace"

PUT_SHARE = 4
"""A quarter of the pool's rows is for puts, so a prompt's blocks must fit into it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = flags.parser(MODULE)
    arguments = parser.parse_args(argv)
    flags.check(parser, arguments)
    model = arguments.model
    block_bytes = model.block_bytes(TOKENS_PER_BLOCK)
    try:
        requests = _requests_of(arguments)
        if arguments.workload == flags.ALL:
            return _workloads(arguments, argv)
        if arguments.eviction:
            return _one_level(arguments, argv, requests)
        if arguments.servers:
            return _fleets(arguments, argv, requests)
        settings = settings_of(arguments, block_bytes, requests)
    except (TraceError, ConfigError) as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    from benchmarks.remote_kv_cache.replay.levels.replays import Pace, replay

    shape = Shape(model.bytes_per_token, arguments.row_tokens, arguments.pack)
    limits = Limits(arguments.bucket_bytes, 86_400 * arguments.bucket_days)
    pace = Pace(
        arguments.speed_up, arguments.concurrency, arguments.payload, arguments.transport, shape,
        limits,
    )  # fmt: skip
    record = Record.begin(MODULE, argv)
    study = Study(
        model, len(requests), sum(len(request.blocks) for request in requests),
        distinct(requests), without_limit(requests), {}, [],
    )  # fmt: skip
    if arguments.bucket != ["none"]:
        study.bucket = BucketStudy(
            tails(requests, shape), shape.pack_tokens, flags.prices_of(arguments),
            arguments.bucket_days,
        )  # fmt: skip
    with Runner(1, 0) as runner:
        uses = next_uses(requests)
        places = {setting.places for setting in settings}
        study.optimum = {room: optimum(requests, room, uses) for room in sorted(places)}
        for number, setting in enumerate(settings, 1):
            where = f"replay {number} of {len(settings)}: {setting.replay}"
            progress = Progress(runner, where, len(requests))
            point, complete = replay(requests, setting, pace, progress)
            study.points.append(point)
            if not complete:
                runner.interrupted = True
                break
    runner.show("")
    runner.num_failed += len(study.disagreements())
    record.parameters |= {
        "requests": len(requests), "blocks": study.blocks, "distinct blocks": study.distinct,
        "block_bytes": block_bytes, "tokens per block": TOKENS_PER_BLOCK, "model": model.name,
        "partial blocks": arguments.partial_blocks, "pool blocks": settings[0].pool,
    }  # fmt: skip
    record.figures += report.figures(study)
    if study.bucket is not None:
        record.parameters |= {
            "tokens of a row": shape.row_tokens, "tokens of a pack": shape.pack_tokens,
            **{PRICED[name]: price for name, price in study.bucket.prices._asdict().items()},
        }  # fmt: skip
    write(record, runner, arguments, study)
    print(headline(study, settings[0].pool, arguments))
    print(report.describe(study))
    return options.finish(record, runner)


def write(record: Record, runner: Runner, arguments: argparse.Namespace, study: Study) -> None:
    """Write the chosen files."""
    options.write(record, runner, arguments, charts)
    if arguments.csv is not None:
        report.write_csv(study, arguments.csv)


def charts(record: Record) -> Mapping[str, Chart]:
    """Those of the report that belongs to the record's command."""
    from benchmarks.remote_kv_cache.replay.eviction import one_level_report
    from benchmarks.remote_kv_cache.replay.fleet import report as fleet_report

    words = record.command.split()
    if any(word.partition("=")[0] == "--servers" for word in words):
        return fleet_report.charts(record)
    if any(word.partition("=")[0] == "--eviction" for word in words):
        return one_level_report.charts(record)
    return report.charts(record)


def headline(study: Study, pool: int, arguments: argparse.Namespace) -> str:
    """The settings of the run, in two lines."""
    kept = "all blocks" if arguments.partial_blocks else "full blocks"
    speed = f"at {arguments.speed_up:g} times its speed" if arguments.speed_up else "back to back"
    total = study.size(study.blocks)
    return (
        f"{study.requests:,} requests, {study.blocks:,} {kept} of {TOKENS_PER_BLOCK} tokens "
        f"({total} of {study.model.name}, {study.size(study.distinct)} distinct), {speed}\n"
        f"CPU pool {study.size(pool)}; found: blocks of a prompt, from its first, that were there; "
        "optimum: the same with as many places as all levels have, and the future known"
    )


def settings_of(
    arguments: argparse.Namespace, block_bytes: int, requests: Sequence[Request]
) -> list[Setting]:
    """Every replay to be made, in order. Raises `ConfigError` for a pool that is too small."""
    from benchmarks.remote_kv_cache.replay.levels.replays import rounded

    everything = distinct(requests)
    pool = _pool_of(arguments, block_bytes, requests)
    made: dict[Setting, None] = {}
    buckets = [flags.BUCKETS[name] for name in arguments.bucket]
    both = arguments.replay == flags.BOTH
    for kind in REPLAYS if both else (arguments.replay,):
        option = "--wire-memory" if kind == WIRE and both else "--server-memory"
        sizes = arguments.wire_memory if kind == WIRE and both else arguments.server_memory
        for disk in arguments.server_disk:
            for size in sizes:
                memory = everything if size is None else max(1, size // block_bytes)
                if disk and memory >= everything:
                    continue  # nothing would ever be read from it
                # The policies alone have the size as it is, unless a real server is beside them.
                is_real = kind == WIRE or (both and size in arguments.wire_memory)
                places = pool, memory, disk // block_bytes
                for pool_policy, policy in policies_of(arguments, kind):
                    for bucket in ("",) if kind == WIRE else buckets:
                        setting = Setting(kind, pool_policy, policy, *places, bucket)
                        if is_real:
                            setting = rounded(setting, arguments.payload, everything, option)
                        made[setting] = None
    if not made:
        raise ConfigError("nothing to replay: the server has no such policy, or needs no disk")
    return [*made]


def _pool_of(arguments: argparse.Namespace, block_bytes: int, requests: Sequence[Request]) -> int:
    """Blocks of the pool. Raises `ConfigError` for one that is too small."""
    most = longest(requests)
    pool: int = arguments.pool // block_bytes
    if pool < PUT_SHARE * most:
        raise ConfigError(
            f"--pool: {pool} blocks; the longest prompt has {most}, and a quarter of the pool "
            f"must hold it: {PUT_SHARE * most * block_bytes / (1 << 30):.0f}GiB or more"
        )
    return pool


def _fleets(arguments: argparse.Namespace, argv: Sequence[str], requests: Sequence[Request]) -> int:
    """The replays of `--servers`."""
    from benchmarks.remote_kv_cache.replay.fleet import report as fleet_report

    model = arguments.model
    block_bytes = model.block_bytes(TOKENS_PER_BLOCK)
    pool = _pool_of(arguments, block_bytes, requests)
    settings = fleet_report.settings_of(arguments, pool, block_bytes)
    record = Record.begin(MODULE, argv)
    study = fleet_report.FleetStudy(without_limit(requests), block_bytes)
    with Runner(1, 0) as runner:
        fleet_report.run(requests, settings, study, arguments, runner)
    runner.show("")
    runner.num_failed += len(study.failures())
    record.parameters |= {"requests": len(requests), "model": model.name, "pool blocks": pool}
    record.figures += fleet_report.figures(study)
    options.write(record, runner, arguments, charts)
    print(fleet_report.describe(study))
    return options.finish(record, runner)


def _one_level(
    arguments: argparse.Namespace, argv: Sequence[str], requests: Sequence[Request]
) -> int:
    """The replays of `--eviction`."""
    from benchmarks.remote_kv_cache.replay.eviction import one_level_report as of

    block_bytes = arguments.model.block_bytes(TOKENS_PER_BLOCK)
    record = Record.begin(MODULE, argv)
    study = of.LevelStudy(arguments.workload or arguments.trace.name)
    with Runner(1, 0) as runner:
        make = of.maker_of(arguments, requests)
        of.run(study, make, of.rooms_of(arguments, block_bytes), arguments, runner)
    runner.show("")
    runner.num_failed += len(study.failures())
    record.parameters |= {
        "source": study.source, "requests": max(study.requests.values(), default=0),
        "block_bytes": block_bytes, "model": arguments.model.name, "hints right": of.HINTS_RIGHT,
        "hints' times, s": list(of.HINTS_WITHIN_S),
    }  # fmt: skip
    record.figures += of.figures(study)
    options.write(record, runner, arguments, charts)
    print(of.headline(study))
    print(of.describe(study))
    return options.finish(record, runner)


def _workloads(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """The replays of `--workload all`."""
    from benchmarks.remote_kv_cache.replay.eviction import one_level_report, workload_study

    block_bytes = arguments.model.block_bytes(TOKENS_PER_BLOCK)
    record = Record.begin(MODULE, argv)
    study = workload_study.WorkloadStudy()
    with Runner(1, 0) as runner:
        rooms = one_level_report.rooms_of(arguments, block_bytes)
        workload_study.run(study, rooms, arguments, runner)
    runner.show("")
    runner.num_failed += len(study.above)
    record.parameters |= {
        "seeds": arguments.seeds, "block_bytes": block_bytes, "model": arguments.model.name,
    }  # fmt: skip
    record.figures += workload_study.figures(study)
    options.write(record, runner, arguments, charts)
    print(workload_study.describe(study))
    return options.finish(record, runner)


def _requests_of(arguments: argparse.Namespace) -> tuple[Request, ...]:
    """Of the trace; none for a workload, which is made for each capacity."""
    if arguments.trace is None:
        return ()
    return recorded.read(
        arguments.trace, partial_blocks=arguments.partial_blocks, limit=arguments.requests
    )


def policies_of(arguments: argparse.Namespace, kind: str) -> list[tuple[str, str]]:
    """Policies of pool and server: each of one beside the first of the other. A real server has
    only its own, and over the wire the first of each is enough."""
    pools, servers = arguments.pool_policies, arguments.policies
    if kind == WIRE:
        servers = [name for name in servers if name in IN_STORE]
        if arguments.replay == flags.BOTH:
            pools = pools[:1]
        return [(pool, server) for pool in pools for server in servers]
    beside = [(pool, servers[0]) for pool in pools]
    return [*beside, *((pools[0], server) for server in servers[1:])]


if __name__ == "__main__":
    sys.exit(main())
