"""`kvferry bench`: a self-test of about a minute that judges the cache's speed on this host.

It starts a server, or uses one that runs, and moves blocks through each transport that reaches it.
Plain copies of the same bytes, and raw sockets that carry them, take turns with the cache, so that
drift of the machine affects all three. `bench_verdict` has the normal values. The benchmarks of the
repository measure more, and more exactly; this needs only the installed package.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from remote_server.cli.checks.bench_verdict import CONNECTIONS, RawSockets, Row, Verdict, advice
from remote_server.cli.connection import client_of
from remote_server.cli.exit_status import NoServer
from remote_server.cli.flags import add_json, seconds_or_none
from remote_server.cli.output import coloured
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import one_server
from remote_server.client import RemoteClient, SharedRegion
from remote_server.errors import ConfigError
from remote_server.protocol import MAX_FRAME_BYTES, SELF_TESTS
from remote_server.values import GiB, MiB, format_bytes, is_loopback, parse_bytes, server_address

_PATIENCE_S = 30.0
_LEAST_BLOCKS, _MOST_BLOCKS = 64, 1024
_LEAST_BYTES = 32 * MiB  # more of small blocks, or the time of one request would dominate
_COLOURS = {Verdict.OK: "green", Verdict.SLOW: "red", Verdict.NOT_JUDGED: "yellow"}


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--server", type=one_server, metavar="ADDRESS", help="measure this one instead"
    )
    parser.add_argument("--block", type=_block_bytes, default="1MiB", metavar="SIZE",
                        help="bytes of a block (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=seconds_or_none, default=40.0, metavar="SECONDS",
                        help="for all measurements together (default: %(default)s)")  # fmt: skip
    parser.add_argument("--no-integrity", dest="integrity", action="store_false",
                        help="without the client's checksums, to measure their cost")  # fmt: skip
    add_json(parser)


def _block_bytes(text: str) -> int:
    """`text` as the size of a block that a server takes; for `argparse`."""
    try:
        num_bytes = parse_bytes(text, "--block")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--block: ")) from None
    if not 0 < num_bytes <= MAX_FRAME_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 B to {format_bytes(MAX_FRAME_BYTES)}")
    return num_bytes


def run(flags: argparse.Namespace) -> int:
    block_bytes = flags.block
    load = os.getloadavg()[0]  # before our own work is in it
    rows: list[Row] = []
    with _a_server(flags.server, block_bytes) as address, RawSockets() as raw:
        for transport in ("shm", "tcp"):
            _progress(f"measuring {transport}")
            rows += _measure(
                address, transport, block_bytes, flags.seconds / 2, raw,
                integrity=flags.integrity,
                incomparable=_why_incomparable(address, transport, same_host=bool(rows)),
            )  # fmt: skip
    _progress("")
    if not rows:
        raise NoServer(f"no connection to {flags.server}; is it running?")
    if flags.json:
        print(json.dumps([_as_json(row) for row in rows]))
    else:
        print("\n".join(_table(rows, block_bytes, integrity=flags.integrity, load=load)))
    return 1 if any(row.verdict is Verdict.SLOW for row in rows) else 0


def _why_incomparable(address: str, transport: str, *, same_host: bool) -> str:
    """The reason why sockets and copies of this host are no measure of that server, or ""."""
    server = server_address(address, "--server")
    if transport == "shm":
        return ""
    if server.keys:
        return "a server with keys encrypts what goes over tcp, and raw sockets do not"
    if not (same_host or is_loopback(server.endpoint)):
        return "the server is on another host, or takes only tcp; raw and copy are of this host"
    return ""


def _num_blocks(block_bytes: int) -> int:
    """The blocks put and got at a time."""
    return min(max(_LEAST_BLOCKS, _LEAST_BYTES // max(block_bytes, 1)), _MOST_BLOCKS)


def _measure(
    address: str, transport: str, block_bytes: int, seconds: float, raw: RawSockets, *,
    integrity: bool, incomparable: str,
) -> list[Row]:  # fmt: skip
    """A put and a get of all blocks. Nothing when shm does not reach the server."""
    num_blocks = _num_blocks(block_bytes)
    region = SharedRegion(2 * num_blocks * block_bytes)
    client = client_of(
        address, client_name="kvferry bench", transport=transport, integrity=integrity
    )
    namespace = f"{SELF_TESTS}bench/{secrets.token_hex(8)}"
    rows = [region.view[at * block_bytes : (at + 1) * block_bytes] for at in range(2 * num_blocks)]
    out, back = rows[:num_blocks], rows[num_blocks:]
    try:
        _fill(region.view)
        client.declare(namespace, block_bytes)
        client.register(region.view, region.fd)
        if not _ready(client, transport):
            return []
        keys = [secrets.token_bytes(32) for _ in range(num_blocks)]

        def put() -> None:
            result = client.put(
                namespace, keys, out, deferred=False, force=True, timeout_s=_PATIENCE_S
            ).result()
            if result.error is not None:
                raise NoServer(f"a put failed: {result.error}") from result.error

        def get() -> None:
            result = client.get(
                namespace, keys, back, stall_s=_PATIENCE_S, timeout_s=_PATIENCE_S
            ).result()
            if len(result.landed) != num_blocks:
                raise NoServer(f"{len(result.landed)} of {num_blocks} blocks came back")

        beside = (_copier(out, back), partial(raw.move, out, back))
        return [
            Row(
                transport, operation, num_blocks * block_bytes, block_bytes,
                *_medians((does, *beside), seconds / 2), incomparable=incomparable,
            )
            for operation, does in (("put", put), ("get", get))
        ]  # fmt: skip
    finally:
        client.forget(namespace)
        client.clear(namespace, forget=True).exception(_PATIENCE_S)
        client.close()
        region.close()


def _medians(
    measured: Sequence[Callable[[], None]], seconds: float
) -> tuple[float, float, float, int]:
    """The median time of each of three, which take turns for `seconds`, and their trials."""
    for does in measured:
        does()  # first touch, connections, caches: not counted
    taken: list[tuple[float, ...]] = []
    ends_by = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < ends_by:
        taken.append(tuple(_time(does) for does in measured))
    ours, copy, raw = (statistics.median(times) for times in zip(*taken, strict=True))
    return ours, copy, raw, len(taken)


def _time(does: Callable[[], None]) -> float:
    began = time.perf_counter()
    does()
    return time.perf_counter() - began


def _copier(out: list[memoryview], back: list[memoryview]) -> Callable[[], None]:
    sources = [np.frombuffer(row, np.uint8) for row in out]
    targets = [np.frombuffer(row, np.uint8) for row in back]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target[:] = source

    return copy


def _fill(view: memoryview) -> None:
    """Touch every page, with different content in each block."""
    pages = np.frombuffer(view, np.uint64)
    pages[:] = np.arange(len(pages), dtype=np.uint64)


def _ready(client: RemoteClient, transport: str) -> bool:
    ends_by = time.monotonic() + (3.0 if transport == "shm" else _PATIENCE_S)
    while not (client.ready and client.transport == transport):
        if client.absent or time.monotonic() > ends_by:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def _a_server(address: str | None, block_bytes: int) -> Iterator[str]:
    """`address`, or that of a new process, which ends with the block."""
    if address is not None:
        yield address
        return
    memory = max(GiB // 4, 4 * _num_blocks(block_bytes) * block_bytes)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "remote_server", "--bind", "tcp://127.0.0.1:*"),
            *("--memory", str(memory), "--log-level", "error", "--admin", "off"),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if "ready" not in words:
            raise NoServer("a server of its own did not start; see the line above")
        yield words[words.index("on") + 1]
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()


def _as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {
        "times_copy": row.times_copy,
        "times_raw": row.times_raw,
        "normal_seconds": row.normal_seconds,
        "verdict": row.verdict,
        "why_not_judged": row.why_not_judged,
    }


def _table(rows: Sequence[Row], block_bytes: int, *, integrity: bool, load: float) -> list[str]:
    lines = [
        f"{'':<4}{'':<5}{'GB/s':>7}{'copy':>8}{'raw':>7}{'x copy':>9}{'x raw':>7}  "
        f"{'normal':<16}  verdict"
    ]
    for row in rows:
        speed, copy, raw = (
            row.num_bytes / s / 1e9 for s in (row.seconds, row.copy_seconds, row.raw_seconds)
        )
        normal = "" if row.why_not_judged else row.normal
        lines.append(
            f"{row.transport:<4}{row.operation:<5}{speed:>7.2f}{copy:>8.2f}{raw:>7.2f}"
            f"{row.times_copy:>9.2f}{row.times_raw:>7.2f}  {normal:<16}  "
            f"{coloured(row.verdict, _COLOURS[row.verdict])}"
        )
    if {row.transport for row in rows} == {"tcp"}:
        lines.append("shm   not reached: the server is on another host, or takes only tcp")
    lines += ["", *(f"{row.transport}: {why}" for row in rows[::2] if (why := row.why_not_judged))]
    lines.append(
        f"{_num_blocks(block_bytes):,} blocks of {format_bytes(block_bytes)}, checksums "
        f"{'on' if integrity else 'off'}, medians of {min(row.trials for row in rows)} and more; "
        f"load {load:.1f} on {os.cpu_count()} cores"
    )
    lines.append(
        f"copy: a plain memory copy of the same bytes; raw: {CONNECTIONS} TCP connections over "
        "this host's loopback"
    )
    if reasons := advice(rows, integrity=integrity, load=load):
        lines += ["", "slower than normal; look at", *(f"  {line}" for line in reasons)]
    return lines


def _progress(text: str) -> None:
    """On stderr, and only on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


COMMAND = Command(
    add_flags,
    run,
    description="Starts a server of its own unless --server names one. Exit status 1 when a "
    "transport is slower than normal; 0 too when it could not be judged.",
    examples="""\
kvferry bench                                # this host, in a minute
kvferry bench --server 10.0.0.7:5757         # a server that runs
kvferry bench --block 128KiB --seconds 20
""",
)
