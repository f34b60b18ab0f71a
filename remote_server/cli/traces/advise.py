"""`kvferry advise`: what a cache would find in recorded requests, and what it would cost."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from remote_server.cli.exit_status import NO, YES
from remote_server.cli.flags import add_json
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.progress import Progress
from remote_server.errors import ConfigError
from remote_server.values import float_or_nan, parse_bytes

if TYPE_CHECKING:
    from remote_server.traces import Trace
    from remote_server.traces.advice import Given

_DTYPES = ("fp8", "int8", "fp16", "bf16", "fp32")
_S3 = (0.023, 0.005, 0.0004)
_GB = 10**9


def add_flags(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE",
                        help="a file of Mooncake, Qwen-Bailian, BurstGPT or kvferry, plain or "
                        "gzipped")  # fmt: skip
    model = parser.add_argument_group("the model and its engine")
    shape = model.add_mutually_exclusive_group()
    shape.add_argument("--model", type=_known_model, metavar="NAME",
                       help="a known model, or a config.json; a recording of kvferry has the bytes "
                       "of its blocks")  # fmt: skip
    shape.add_argument("--kv-bytes-per-token", type=_size, metavar="SIZE",
                       help="of the KV cache, all layers and ranks, as 56KiB")  # fmt: skip
    model.add_argument("--kv-dtype", choices=_DTYPES, default="bf16",
                       help="of --model's KV cache (default: %(default)s)")  # fmt: skip
    model.add_argument("--prefill-tokens-per-s", type=_rate, default=10_000.0, metavar="NUMBER",
                       help="prompt tokens that an engine computes (default: 10000)")  # fmt: skip
    server = parser.add_argument_group("one server")
    server.add_argument("--server-memory", type=_size, default="512GiB", metavar="SIZE",
                        help="at most, for blocks (default: %(default)s)")  # fmt: skip
    server.add_argument("--link", type=_rate, default=3.0, metavar="GB/S",
                        help="speed of its network, in GB/s (default: 3, of 25 Gb/s)")  # fmt: skip
    server.add_argument("--disk-writes", type=_size, default="500MiB", metavar="SIZE",
                        help="bytes a second that its disk may be written, for years "
                        "(default: %(default)s)")  # fmt: skip
    prices = parser.add_argument_group("prices, in dollars a month")
    prices.add_argument("--memory-price", type=_price, default=3.0, metavar="PRICE",
                        help="of a GiB (default: %(default)s)")  # fmt: skip
    prices.add_argument("--disk-price", type=_price, default=0.08, metavar="PRICE",
                        help="of a GB (default: %(default)s)")  # fmt: skip
    prices.add_argument("--bucket-price", type=_bucket_prices, default=_S3,
                        metavar="GB,PUTS,GETS",
                        help="of a GB, of 1,000 PUTs and of 1,000 GETs "
                        "(default: 0.023,0.005,0.0004, those of S3 Standard)")  # fmt: skip
    add_json(parser)


def run(flags: argparse.Namespace) -> int:
    """1 when a cache would give nothing."""
    from remote_server.cli.traces.advise_lines import lines_of
    from remote_server.traces import TraceError, read
    from remote_server.traces.advice import advise

    with Progress() as progress:
        progress.show(f"reading {flags.trace}")
        trace = read(flags.trace)
        given = _given(flags, trace)
        try:
            advice = advise(trace, given, progress.show)
        except TraceError as error:
            raise TraceError(f"{flags.trace}: {error}") from None
    if flags.json:
        print_lines(json.dumps({
            "trace": str(flags.trace), "format": trace.format,
            "problems": [problem._asdict() for problem in trace.problems],
            "assumptions": list(trace.assumptions), "given": _as_json(given), **asdict(advice),
            "serve": advice.best and advice.best.serve(given.disk_writes),
        }))  # fmt: skip
    else:
        print_lines(*lines_of(flags.trace, trace, given, advice))
    return NO if advice.why_none else YES


def _as_json(given: "Given") -> dict[str, object]:
    return given._asdict() | {"bucket_prices": given.bucket_prices._asdict()}


def _given(flags: argparse.Namespace, trace: "Trace") -> "Given":
    """Raises `ConfigError`."""
    from remote_server.traces.advice import Given
    from remote_server.traces.models import bytes_of_model
    from remote_server.traces.prices import Prices

    if flags.kv_bytes_per_token is not None:
        kv_bytes = flags.kv_bytes_per_token
    elif flags.model is not None:
        kv_bytes = bytes_of_model(flags.model, flags.kv_dtype)
    elif trace.block_bytes is not None:
        kv_bytes = math.ceil(trace.block_bytes / trace.block_tokens)
    else:
        raise ConfigError("--model or --kv-bytes-per-token is missing: the trace has no bytes")
    storage, put, get = flags.bucket_price
    return Given(
        kv_bytes, flags.prefill_tokens_per_s, flags.server_memory, flags.link * _GB,
        flags.disk_writes, flags.memory_price, flags.disk_price, Prices(get, put, storage),
    )  # fmt: skip


# ── kinds of values, for argparse ────────────────────────────────────────────────────────


def _known_model(text: str) -> str:
    from remote_server.traces.models import bytes_of_model

    if text.startswith(("/", ".")) or text.endswith(".json"):
        return text  # a file, read when the command runs
    try:
        bytes_of_model(text, "bf16")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}".removeprefix("--model: ")) from None
    return text


def _size(text: str) -> int:
    try:
        num_bytes = parse_bytes(text, "size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no room at all")
    return num_bytes


def _number(text: str) -> float:
    value = float_or_nan(text)
    if not math.isfinite(value) or not 0 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number from 0 on")
    return value


def _rate(text: str) -> float:
    if not (value := _number(text)):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not above zero")
    return value


_price = _number


def _bucket_prices(text: str) -> tuple[float, ...]:
    prices = tuple(_number(part) for part in text.split(","))
    if len(prices) != len(_S3):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80}: three prices, as 0.023,0.005,0.0004: of a GB, 1,000 PUTs, 1,000 GETs"
        )
    return prices


COMMAND = Command(
    add_flags,
    run,
    description="Replay recorded requests against the cache's own policies, and print what is "
    "found with how much memory, disk or bucket, what that costs, and the setting to start with. "
    "It needs no server and no GPU.",
    notes="The exit status is 1 when a cache would give nothing.",
    examples="""\
kvferry advise conversation_trace.jsonl --model qwen2.5-7b
kvferry advise trace.jsonl.gz --model /models/mine/config.json --kv-dtype fp8
kvferry advise trace.jsonl --kv-bytes-per-token 56KiB --prefill-tokens-per-s 20000 --link 12
kvferry advise recorded.jsonl --server-memory 256GiB --memory-price 2.5 --json | jq .serve
""",
)
