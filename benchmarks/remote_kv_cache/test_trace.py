"""Traces: what would real requests find, and on which level?

Replays a trace of real requests against the CPU pool and the server, at chosen sizes, and reports
the share of the prompts' blocks found in the pool, in the server's memory and on its disk, beside
the share of the best possible evictions. `--replay wire` is a real server process, the connector's
tier and its client; `store` is the policies alone, which takes seconds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import options
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.models import MODELS, Model, choose
from benchmarks.remote_kv_cache.replay import report, trace_file
from benchmarks.remote_kv_cache.replay.bucket_model import Shape, tails
from benchmarks.remote_kv_cache.replay.candidates import IN_STORE, POLICIES
from benchmarks.remote_kv_cache.replay.costs import LISTED, PRICED, PRICES, Prices
from benchmarks.remote_kv_cache.replay.optimum import next_uses, optimum, without_limit
from benchmarks.remote_kv_cache.replay.points import REPLAYS, WIRE, Setting
from benchmarks.remote_kv_cache.replay.progress import Progress
from benchmarks.remote_kv_cache.replay.report import BucketStudy, Study
from benchmarks.remote_kv_cache.replay.trace_file import TOKENS_PER_BLOCK, TraceError
from remote_server.errors import ConfigError
from remote_server.store.bucket.sweep import Limits
from remote_server.store.policies import Admit

MODULE = "benchmarks.remote_kv_cache.test_trace"

ALL = "all"
BUCKETS = {"none": "", **{str(admit): str(admit) for admit in Admit}}
BOTH = "both"
POOL_POLICIES = ("lru", "arc")
PUT_SHARE = 4
"""A quarter of the pool's rows is for puts, so a prompt's blocks must fit into it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    arguments = parser.parse_args(argv)
    model = arguments.model
    block_bytes = model.block_bytes(TOKENS_PER_BLOCK)
    try:
        requests = trace_file.read(
            arguments.trace, partial_blocks=arguments.partial_blocks, limit=arguments.requests
        )
        settings = settings_of(arguments, block_bytes, requests)
    except (TraceError, ConfigError) as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    from benchmarks.remote_kv_cache.replay.replays import Pace, replay

    shape = Shape(model.bytes_per_token, arguments.row_tokens, arguments.pack)
    limits = Limits(arguments.bucket_bytes, 86_400 * arguments.bucket_days)
    pace = Pace(
        arguments.speed_up, arguments.concurrency, arguments.payload, arguments.transport, shape,
        limits,
    )  # fmt: skip
    record = Record.begin(MODULE, argv)
    study = Study(
        model, len(requests), sum(len(request.blocks) for request in requests),
        trace_file.distinct(requests), without_limit(requests), {}, [],
    )  # fmt: skip
    if arguments.bucket != ["none"]:
        study.bucket = BucketStudy(
            tails(requests, shape), shape.pack_tokens, prices_of(arguments), arguments.bucket_days
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
    """Write the chosen files; a chart for each size of disk, the first at `--plot`."""
    first, *others = report.disks(study) or [0]
    machine = record.describe_machine()
    options.write(record, runner, arguments, lambda _: report.chart(study, first, machine))
    if arguments.plot is not None:
        for disk in others:
            name = f"{arguments.plot.stem}_disk_{disk * study.block_bytes >> 30}GiB"
            report.chart(study, disk, machine).write(arguments.plot.with_name(name))
    if arguments.csv is not None:
        report.write_csv(study, arguments.csv)


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
    arguments: argparse.Namespace, block_bytes: int, requests: Sequence[trace_file.Request]
) -> list[Setting]:
    """Every replay to be made, in order. Raises `ConfigError` for a pool that is too small."""
    from benchmarks.remote_kv_cache.replay.replays import rounded

    everything = trace_file.distinct(requests)
    longest = trace_file.longest(requests)
    pool = arguments.pool // block_bytes
    if pool < PUT_SHARE * longest:
        raise ConfigError(
            f"--pool: {pool} blocks; the longest prompt has {longest}, and a quarter of the pool "
            f"must hold it: {PUT_SHARE * longest * block_bytes / (1 << 30):.0f}GiB or more"
        )
    made: dict[Setting, None] = {}
    buckets = [BUCKETS[name] for name in arguments.bucket]
    for kind in REPLAYS if arguments.replay == BOTH else (arguments.replay,):
        sizes = arguments.server_memory
        if kind == WIRE and arguments.replay == BOTH:
            sizes = arguments.wire_memory
        for disk in arguments.server_disk:
            for size in sizes:
                memory = everything if size is None else max(1, size // block_bytes)
                if disk and memory >= everything:
                    continue  # nothing would ever be read from it
                places = pool, memory, disk // block_bytes
                for pool_policy, policy in policies_of(arguments, kind):
                    for bucket in ("",) if kind == WIRE else buckets:
                        setting = Setting(kind, pool_policy, policy, *places, bucket)
                        made[rounded(setting, arguments.payload)] = None
    if not made:
        raise ConfigError("nothing to replay: the server has no such policy, or needs no disk")
    return [*made]


def policies_of(arguments: argparse.Namespace, kind: str) -> list[tuple[str, str]]:
    """Policies of pool and server: each of one beside the first of the other. A real server has
    only its own, and over the wire the first of each is enough."""
    pools, servers = arguments.pool_policies, arguments.policies
    if kind == WIRE:
        servers = [name for name in servers if name in IN_STORE]
        if arguments.replay == BOTH:
            pools = pools[:1]
        return [(pool, server) for pool in pools for server in servers]
    beside = [(pool, servers[0]) for pool in pools]
    return [*beside, *((pools[0], server) for server in servers[1:])]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="what real requests find on each cache level"
    )
    add = made.add_argument
    add(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="a trace in the format of the Mooncake paper, JSON lines, plain or gzipped",
    )
    add(
        "--replay",
        choices=(*REPLAYS, BOTH),
        default=BOTH,
        help="store: the policies alone; wire: a real server and the connector's tier "
        "(default: %(default)s, the second at --wire-memory only)",
    )
    add(
        "--model",
        type=_model,
        default=MODELS[1],
        metavar="NAME",
        help="the model of the KV cache (default: Qwen2.5-7B-Instruct)",
    )
    add(
        "--pool",
        type=options.size,
        default=options.size("32GiB"),
        metavar="SIZE",
        help="size of the CPU pool (default: 32GiB)",
    )
    add(
        "--server-memory",
        type=options.several(_size_or_all),
        default="128GiB,256GiB,512GiB,1TiB,all",
        metavar="SIZES",
        help="(default: 128GiB,256GiB,512GiB,1TiB,all)",
    )
    add(
        "--wire-memory",
        type=options.several(_size_or_all),
        default="256GiB,all",
        metavar="SIZES",
        help="with --replay both, the sizes also replayed over the wire (default: 256GiB,all)",
    )
    add(
        "--server-disk",
        type=options.several(options.size),
        default="0,1TiB",
        metavar="SIZES",
        help="sizes of the server's disk; 0: none (default: 0,1TiB)",
    )
    add(
        "--pool-policies",
        type=options.names(POOL_POLICIES),
        default=["lru", "arc"],
        metavar="NAMES",
        help="policies of vLLM's pool (default: lru,arc)",
    )
    add(
        "--policies",
        type=options.names(POLICIES),
        default=["lru", "s3-fifo"],
        metavar="NAMES",
        help=f"of the server: {', '.join(POLICIES)}; a real server has {', '.join(IN_STORE)} "
        "(default: lru,s3-fifo)",
    )
    add(
        "--speed-up",
        type=_speed,
        default=0.0,
        metavar="FACTOR",
        help="over the wire: speed of arrivals relative to the trace; 0 or max: each when "
        "the one before has ended (default: max)",
    )
    add(
        "--concurrency",
        type=options.positive,
        default=1,
        metavar="NUMBER",
        help="requests served at a time, at a --speed-up (default: %(default)s)",
    )
    add(
        "--payload",
        type=_payload,
        default=1024,
        metavar="BYTES",
        help="bytes of a block on the wire; hit rates do not depend on it (default: %(default)s)",
    )
    add("--transport", choices=("tcp", "shm"), default="tcp", help="(default: %(default)s)")
    add("--requests", type=options.positive, metavar="NUMBER", help="only the first requests")
    add(
        "--partial-blocks",
        action="store_true",
        help="keep the last block of a prompt also when it is not full, as in the trace; an engine "
        "does not",
    )
    add(
        "--bucket",
        type=options.names(BUCKETS),
        default=["none"],
        metavar="NAMES",
        help="a bucket below: none, or what is written there, as a server's --bucket-admit: twice, "
        "all; not over the wire (default: none)",
    )
    add(
        "--pack",
        type=options.size,
        default=options.size("16MiB"),
        metavar="SIZE",
        help="the most bytes of an object of the bucket (default: 16MiB)",
    )
    add(
        "--row-tokens",
        type=_row_tokens,
        default=64,
        metavar="NUMBER",
        help="tokens of a row, of which packs are made (default: %(default)s)",
    )
    add(
        "--bucket-bytes",
        type=options.size,
        default=0,
        metavar="SIZE",
        help="budget of the bucket, 0 for no limit (default: 0)",
    )
    add(
        "--bucket-days",
        type=float,
        default=7.0,
        metavar="DAYS",
        help="packs older than this are removed, 0 for never (default: 7)",
    )
    for name, price in PRICES._asdict().items():
        add(
            f"--{name.replace('_', '-')}-price",
            type=float,
            default=price,
            metavar="DOLLARS",
            help=f"{PRICED[name]} (default: %(default)s, {LISTED})",
        )
    add("--json", type=options.result, metavar="FILE", help="write the record to this file")
    add("--csv", type=options.result, metavar="FILE", help="a CSV line for each replay")
    add("--plot", type=options.drawing, metavar="FILE", help="write a chart to this file")
    return made  # fmt: skip


def _model(text: str) -> Model:
    try:
        (model,) = choose(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return model


def _row_tokens(text: str) -> int:
    value = options.positive(text)
    if TOKENS_PER_BLOCK % value:
        raise argparse.ArgumentTypeError(f"{text} does not divide {TOKENS_PER_BLOCK}")
    return value


def prices_of(arguments: argparse.Namespace) -> Prices:
    return Prices(*(getattr(arguments, f"{name}_price") for name in Prices._fields))


def _size_or_all(text: str) -> int | None:
    """A size in bytes; None for `all`."""
    return None if text == ALL else options.size(text)


def _speed(text: str) -> float:
    value = 0.0 if text == "max" else float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _payload(text: str) -> int:
    """Bytes of a block: at least two numbers of 8 bytes, at both ends of its row."""
    value = options.size(text)
    if value < 16 or value % 8:
        raise argparse.ArgumentTypeError(f"{text}: at least 16 bytes, and a multiple of 8")
    return value


if __name__ == "__main__":
    sys.exit(main())
