"""`kvferry bench`: in about a minute, how near this host's cache comes to its own memory copy.

A server of its own, or one that already runs; blocks through each transport that reaches it;
beside each a plain copy of the same bytes in the same process, in turn with it so that drift of
the machine falls on both. The verdict is the ratio of the medians. The benchmarks of the
repository measure more, and more exactly; this needs nothing but the installed package.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from remote_server.client import RemoteClient, SharedRegion
from remote_server.command.connection import NoServer, checked_address, client_of
from remote_server.command.terminal import coloured
from remote_server.config import GiB, format_bytes, parse_bytes

# Times a plain copy. Above these a host is worth a closer look; they are what a shared machine
# of two cores reached, with room (benchmarks/README.md).
_SLOW = {"shm": 6.0, "tcp": 14.0}
_PATIENCE_S = 30.0
_NUM_BLOCKS = 64


@dataclass(frozen=True)
class Row:
    """One transport and direction; seconds are medians for `num_bytes`."""

    transport: str
    operation: str
    num_bytes: int
    seconds: float
    copy_seconds: float
    trials: int

    @property
    def ratio(self) -> float:
        return self.seconds / self.copy_seconds

    @property
    def slow(self) -> bool:
        return self.ratio > _SLOW[self.transport]


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="a self-test: how near the cache comes to this host's own memory copy",
        description="Starts a server of its own unless --server names one. Exit status 1 when "
        "a transport is slower than it should be.",
    )
    parser.add_argument(
        "--server", type=checked_address, metavar="ADDRESS", help="measure this one instead"
    )
    parser.add_argument("--block", default="1MiB", metavar="SIZE", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, metavar="SECONDS",
                        help="for all measurements together (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    block_bytes = parse_bytes(flags.block, "--block")
    rows: list[Row] = []
    with _a_server(flags.server, block_bytes) as address:
        for transport in ("shm", "tcp"):
            _progress(f"measuring {transport}")
            rows += _measure(address, transport, block_bytes, flags.seconds / 2)
    _progress("")
    if flags.json:
        told = [asdict(row) | {"ratio": row.ratio, "slow": row.slow} for row in rows]
        print(json.dumps(told))
    else:
        print("\n".join(_table(rows, block_bytes)))
    return 1 if any(row.slow for row in rows) else 0


def _measure(address: str, transport: str, block_bytes: int, seconds: float) -> list[Row]:
    """A put and a get of all blocks, checksums on. Nothing when shm does not reach the server."""
    region = SharedRegion(_NUM_BLOCKS * block_bytes * 2)
    client = client_of(address, client_name="kvferry bench", transport=transport)
    namespace = f"kvferry/bench/{secrets.token_hex(8)}"
    rows = [region.view[at * block_bytes : (at + 1) * block_bytes] for at in range(2 * _NUM_BLOCKS)]
    out, back = rows[:_NUM_BLOCKS], rows[_NUM_BLOCKS:]
    try:
        _fill(region.view)
        client.declare(namespace, block_bytes)
        client.register(region.view, region.fd)
        if not _ready(client, transport):
            return []
        keys = [secrets.token_bytes(32) for _ in range(_NUM_BLOCKS)]

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
            if len(result.landed) != _NUM_BLOCKS:
                raise NoServer(f"{len(result.landed)} of {_NUM_BLOCKS} blocks came back")

        copy = _copier(out, back)
        return [
            _row(transport, name, _NUM_BLOCKS * block_bytes, does, copy, seconds / 2)
            for name, does in (("put", put), ("get", get))
        ]
    finally:
        client.forget(namespace)
        client.clear(namespace, forget=True).exception(_PATIENCE_S)
        client.close()
        region.close()


def _row(
    transport: str, name: str, num_bytes: int, does: Callable[[], None],
    copy: Callable[[], None], seconds: float,
) -> Row:  # fmt: skip
    does()
    copy()  # first touch, connections, caches: not measured
    taken: list[float] = []
    copied: list[float] = []
    ends_by = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < ends_by:
        taken.append(_time(does))
        copied.append(_time(copy))
    return Row(
        transport, name, num_bytes, statistics.median(taken), statistics.median(copied), len(taken)
    )


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
    """Every page touched, no two blocks alike."""
    pages = np.frombuffer(view, np.uint64)
    pages[:] = np.arange(len(pages), dtype=np.uint64)


def _ready(client: RemoteClient, transport: str) -> bool:
    ends_by = time.monotonic() + (3.0 if transport == "shm" else _PATIENCE_S)
    while not (client.ready and client.transport == transport):
        if time.monotonic() > ends_by:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def _a_server(address: str | None, block_bytes: int) -> Iterator[str]:
    """The one at `address`, or a process of our own that ends with the block."""
    if address is not None:
        yield address
        return
    memory = max(GiB // 4, 4 * _NUM_BLOCKS * block_bytes)
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


def _table(rows: list[Row], block_bytes: int) -> list[str]:
    lines = [f"{'':<4}{'':<5}{'GB/s':>8}{'copy':>8}{'times a copy':>14}  verdict"]
    for row in rows:
        speed, copy = (row.num_bytes / s / 1e9 for s in (row.seconds, row.copy_seconds))
        verdict = coloured("slow", "red") if row.slow else coloured("ok", "green")
        lines.append(
            f"{row.transport:<4}{row.operation:<5}{speed:>8.2f}{copy:>8.2f}{row.ratio:>14.2f}"
            f"  {verdict}"
        )
    if {row.transport for row in rows} == {"tcp"}:
        lines.append("shm   not reached: the server is on another host, or takes only tcp")
    lines.append("")
    lines.append(
        f"{_NUM_BLOCKS} blocks of {format_bytes(block_bytes)}, checksums on, medians; copy is a "
        "plain memory copy of the same bytes"
    )
    return lines


def _progress(told: str) -> None:
    """On stderr, and only where somebody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{told}")
        sys.stderr.flush()
