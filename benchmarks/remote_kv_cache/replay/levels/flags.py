"""The flags of a trace replay."""

import argparse
from collections.abc import Callable

from benchmarks.harness import options
from benchmarks.remote_kv_cache.replay.caches.candidates import IN_STORE, LEARNED, POLICIES
from benchmarks.remote_kv_cache.replay.levels.costs import LISTED, PRICED, PRICES
from benchmarks.remote_kv_cache.replay.levels.points import REPLAYS, STORE, WIRE
from benchmarks.remote_kv_cache.replay.requests.flags import ANY, add_requests, add_trace
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE
from benchmarks.remote_kv_cache.work.models import MODELS, Model, choose
from remote_server.store.stack.admission import Admit
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.traces.prices import Prices

ALL = "all"
BUCKETS = {"none": "", **{str(admit): str(admit) for admit in Admit}}
BOTH = "both"
POOL_POLICIES = ("lru", "arc")
EVICTIONS = ("lru", "learned", "unfloored", "hinted", "partly-hinted", "optimum")
"""In one level. `unfloored`: the learned rule reigns always; `hinted`: hints of which nine in ten
are right; `partly-hinted`: right hints for nine requests in ten; `optimum`: the most that can be
found."""

SERVED = ("lru", "learned")
"""Those of them that are also replayed over the wire."""


def parser(module: str) -> argparse.ArgumentParser:
    made = options.bare_parser(module, "what real requests find on each cache level")
    add = made.add_argument
    source = made.add_mutually_exclusive_group(required=True)
    add_trace(source.add_argument, ANY)
    source.add_argument(
        "--workload",
        type=_workload,
        metavar="NAME",
        help="with --eviction, in place of a trace requests made up with a seed for a cache of "
        f"each capacity: {', '.join(MADE)}; or {ALL} of them, with --replay store",
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
        type=options.names((*POLICIES, LEARNED)),
        default=["lru", "s3-fifo"],
        metavar="NAMES",
        help=f"of the server: {', '.join(POLICIES)} and {LEARNED}; over the wire "
        f"{', '.join(IN_STORE)} (default: lru,s3-fifo)",
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
    add_requests(add, "requests")
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
    _add_fleet(add)
    _add_one_level(add)
    for name, price in PRICES._asdict().items():
        add(
            f"--{name.replace('_', '-')}-price",
            type=float,
            default=price,
            metavar="DOLLARS",
            help=f"{PRICED[name]} (default: %(default)s, {LISTED})",
        )
    options.add_files(made, csv="a CSV line for each replay")
    return made


def _add_fleet(add: Callable[..., object]) -> None:
    add(
        "--servers",
        type=options.several(options.positive),
        default=[],
        metavar="NUMBERS",
        help="fleets of so many servers, as in 1,4,8, beside their model, with --wire-memory in "
        "all; without it one server",
    )
    for flag, dest, text in (
        ("--lose-one", "lose_one", "also with one server that is killed in the middle"),
        ("--join", "join", "also with one more server from the middle on"),
        ("--return", "returns", "also with one server that restarts on its disk in the middle"),
    ):
        add(flag, dest=dest, action="store_true", help=f"with --servers, {text}")
    add(
        "--copies",
        dest="copies_head",
        type=options.names(("head",)),
        default=False,
        metavar="head",
        help="with --servers, store the first 8,192 tokens of a prompt on both homes",
    )


def _add_one_level(add: Callable[..., object]) -> None:
    add(
        "--eviction",
        type=options.names(EVICTIONS),
        default=[],
        metavar="NAMES",
        help=f"eviction in one level without a pool: {', '.join(EVICTIONS)}; with --replay wire "
        f"{' and '.join(SERVED)} alone, each also on a real server (default: none, the levels of "
        "an engine)",
    )
    add(
        "--capacity",
        type=options.several(options.size),
        default="96GiB,160GiB,288GiB,544GiB,1056GiB",
        metavar="SIZES",
        help="of the one level of --eviction (default: %(default)s)",
    )
    add(
        "--seeds",
        type=options.positive,
        default=1,
        metavar="NUMBER",
        help=f"with --workload {ALL}, each is made with the seeds from 1 to this one (default: "
        "%(default)s)",
    )


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse flags that exclude each other: prints why and exits with 2."""
    if LEARNED in arguments.policies and (arguments.servers or arguments.bucket != ["none"]):
        parser.error(f"--policies: {LEARNED} has no --servers and no --bucket")
    if not arguments.eviction:
        if arguments.workload is not None:
            parser.error("--workload: only with --eviction; an engine's levels replay a --trace")
        return
    if arguments.servers or arguments.csv is not None or arguments.bucket != ["none"]:
        parser.error("--eviction: one level has no --servers, no --bucket and no --csv")
    if arguments.replay == WIRE and not {*SERVED}.intersection(arguments.eviction):
        parser.error(f"--eviction: over the wire {' and '.join(SERVED)}; none of them is named")
    if arguments.workload == ALL and (arguments.replay != STORE or arguments.plot is not None):
        parser.error(f"--workload {ALL}: with --replay {STORE}, and without --plot")
    if arguments.seeds > 1 and arguments.workload != ALL:
        parser.error(f"--seeds: only with --workload {ALL}")


def _workload(text: str) -> str:
    if text not in (*MADE, ALL):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MADE)}, {ALL}")
    return text


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
