"""Blocks over a link of 25 ms and 1 % loss: lanes against as many raw connections.

    python -m benchmarks.remote_kv_cache.baseline.links.link_cases BYTES TRIALS

It prints the seconds of each case, as JSON; a process of its own, because it enters a namespace.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.baseline.latency.small_operations import SMALL
from benchmarks.remote_kv_cache.baseline.links import lossy_link
from benchmarks.remote_kv_cache.baseline.sockets import sender
from benchmarks.remote_kv_cache.baseline.sockets.receivers import RawReceiver
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import OVER_ZMQ, FerryWork, connect
from examples.processes import RemoteServer, free_port
from remote_server.client import ClientConfig
from remote_server.values import MiB

ROUND_TRIP_S, LOSS = 0.025, 0.01
NUM_LANES = ClientConfig("tcp://127.0.0.1:1").lanes
NAME = f"link of {ROUND_TRIP_S * 1000:g} ms round trip, {LOSS:.0%} loss"
RAW = f"raw sockets, {NUM_LANES} connections"

_MODULE = "benchmarks.remote_kv_cache.baseline.links.link_cases"
_NAMESPACE = "link"


def measure(runner: Runner, num_bytes: int) -> list[Figure]:
    """MB/s of raw sockets, lanes and ZeroMQ. Raises `Skipped` where no such link can be made."""
    runner.show(NAME)
    command = [sys.executable, "-m", _MODULE, str(num_bytes), str(runner.trials)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Skipped(done.stderr.strip().rpartition("\n")[2])
    seconds: dict[str, list[float]] = json.loads(done.stdout)
    medians = {name: percentile(values, 50) for name, values in seconds.items()}
    work = _work(num_bytes)
    speeds = {name: work.num_bytes / 1e6 / median for name, median in medians.items()}
    ratios = {name: medians[name] / medians[RAW] for name in medians if name != RAW}
    return [
        Figure(NAME, "MB/s", speeds, "tcp"),
        Figure(f"{NAME}, times raw", "times", ratios, "tcp"),
    ]


def congestion_control() -> str:
    """TCP's on this machine, which decides what a loss costs."""
    with suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return "unknown"


def _work(num_bytes: int) -> blocks.Work:
    return blocks.plan(SMALL, 1, max(1, num_bytes // SMALL.block_bytes(blocks.BLOCK_SIZE)))


def main(argv: Sequence[str]) -> int:
    num_bytes, trials = map(int, argv)
    try:
        tun = lossy_link.enter()
    except Skipped as reason:
        print(reason, file=sys.stderr)
        return 1
    with ExitStack() as stack:
        stack.enter_context(lossy_link.link(tun, ROUND_TRIP_S / 2, LOSS))
        seconds = _measure(stack, _work(num_bytes), trials)
    print(json.dumps(seconds))
    return 0


def _measure(stack: ExitStack, work: blocks.Work, trials: int) -> dict[str, list[float]]:
    source = blocks.allocate(work.num_blocks, work.block_bytes)
    target = blocks.allocate(work.num_blocks, work.block_bytes)
    blocks.fill(source)
    listener = socket.create_server((lossy_link.NEAR, 0))
    sender.serve_raw(listener, source)
    port = listener.getsockname()[1]
    raw = stack.enter_context(RawReceiver((lossy_link.FAR, port), NUM_LANES, target, work))
    port = free_port()
    stack.enter_context(
        RemoteServer(
            str(64 * MiB + 2 * work.num_bytes), bind=f"tcp://{lossy_link.NEAR}:{port}",
            args=["--insecure"],
        )
    )  # fmt: skip
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        RAW: (raw.receive, _nothing)
    }
    for transport in ("tcp", OVER_ZMQ):
        client = connect(
            f"tcp://{lossy_link.FAR}:{port}", _NAMESPACE, work.block_bytes, transport=transport
        )
        stack.callback(client.close)
        ferry = FerryWork(client, _NAMESPACE, work)
        way = f"{'lanes' if transport == 'tcp' else 'ZeroMQ'}"
        cases[f"put over {way}"] = partial(ferry.put, source, deferred=False), ferry.clear
        cases[f"get over {way}"] = (
            partial(ferry.get, target), partial(ferry.make_present, source)
        )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(trials):
        for name, (run, prepare) in cases.items():
            prepare()
            if not name.startswith("put"):
                blocks.poison(target)
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
            if not name.startswith("put"):
                blocks.verify(source, target, work.everything)
    return seconds


def _nothing() -> None:
    """Nothing to prepare."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
