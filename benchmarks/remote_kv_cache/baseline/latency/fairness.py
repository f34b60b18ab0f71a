"""Lookups of one client beside others' streams, and beside them the bare round trip of a message:
what the machine's scheduler and ZeroMQ take of a lookup."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import zmq

from benchmarks.harness import machine
from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.baseline.latency.small_operations import LARGE, work_of
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    Client,
    FerryWork,
    connect,
    key_of,
)
from benchmarks.remote_kv_cache.work.target import Target
from examples.processes import LoggedProcess

NUM_STREAMS = 4
_PROBE_KEYS = 64
_PAUSE_S = 0.002  # an engine looks up between its steps

LOOKUP = f"lookup of {_PROBE_KEYS} keys"
ROUND_TRIP = "bare ZeroMQ round trip"


class StreamingClient(LoggedProcess):
    """Another process that streams the same blocks in a loop."""

    name = "streaming-client"

    def __init__(self, endpoint: str, namespace: str, work: Work) -> None:
        module = "benchmarks.remote_kv_cache.baseline.latency.streaming_client"
        super().__init__(
            [sys.executable, "-m", module, endpoint, namespace, str(work.block_bytes),
             str(work.num_blocks)]
        )  # fmt: skip

    def is_ready(self) -> bool:
        return "ready" in self.log.read_text(errors="replace")


class EchoServer(LoggedProcess):
    """Another process that returns messages."""

    name = "echo-server"

    def __init__(self) -> None:
        super().__init__(
            [sys.executable, "-m", "benchmarks.remote_kv_cache.baseline.latency.echo_server"]
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        return self.log.read_text(errors="replace").strip()

    def is_ready(self) -> bool:
        return self.log.read_text(errors="replace").endswith("\n")


class Echo:
    """A client of an `EchoServer`. Owns its process."""

    def __init__(self, stack: ExitStack, message: bytes) -> None:
        server = stack.enter_context(EchoServer())
        self._socket: zmq.Socket[bytes] = stack.enter_context(
            zmq.Context.instance().socket(zmq.DEALER)
        )
        self._socket.linger = 0
        self._socket.connect(server.endpoint)
        self._message = message

    def ask(self) -> None:
        self._socket.send(self._message)
        if not self._socket.poll(int(PATIENCE_S * 1000)):
            raise TimeoutError(f"the echo did not come in {PATIENCE_S} s")
        self._socket.recv()


def measure(runner: Runner, memory: int | None, num_bytes: int, server: Target) -> list[Figure]:
    """Lookups of 64 keys by one client and round trips of as many bytes, in turns, alone and while
    four others stream 1 MiB blocks. The lookups ask for the same prompts again, as those of a
    request that waits. Raises `Skipped` when a running server cannot be used."""
    work = work_of(LARGE, num_bytes)
    try:
        machine.skip_unless_fits(work.num_bytes * (3 + NUM_STREAMS), memory)
    except Skipped as reason:
        runner.show(f"lookups beside streams: {reason}")
        return []
    with ExitStack() as stack:
        endpoint = stack.enter_context(
            server.server(work.model.name, work.num_bytes, work.block_bytes)
        )
        name = server.namespace(work.model.name)
        client = connect(endpoint, name, work.block_bytes)
        stack.callback(client.close)
        source = blocks.allocate(work.num_blocks, work.block_bytes)
        blocks.fill(source)
        ferry = FerryWork(client, name, work)
        ferry.put(source, deferred=False)
        echo = Echo(stack, key_of(0) * _PROBE_KEYS)
        ways: dict[str, Callable[[], object]] = {
            LOOKUP: lambda: ferry.look_up(_PROBE_KEYS),
            ROUND_TRIP: echo.ask,
        }
        figures = _probe(runner, ways, "alone")
        for _ in range(NUM_STREAMS):
            stack.enter_context(StreamingClient(endpoint, name, work))
        sent, started = _bytes_sent(client), time.perf_counter()
        figures += _probe(runner, ways, f"while {NUM_STREAMS} clients stream")
        rate = (_bytes_sent(client) - sent) / (time.perf_counter() - started) / 1e9
        figures.append(
            Figure(f"{NUM_STREAMS} clients streaming", "GB/s", {"all clients": rate}, "tcp")
        )
        return figures


def _probe(runner: Runner, ways: dict[str, Callable[[], object]], when: str) -> list[Figure]:
    runner.show(f"lookups {when}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(100 * runner.trials):
        for name, ask in ways.items():
            started = time.perf_counter()
            ask()
            times[name].append((time.perf_counter() - started) * 1000)
            time.sleep(_PAUSE_S)
    return [
        Figure(
            f"{name}, {when}", "ms",
            {"median": percentile(ms, 50), "p99": percentile(ms, 99), "max": max(ms)}, "tcp",
        )
        for name, ms in times.items()
    ]  # fmt: skip


def _bytes_sent(client: Client) -> int:
    counters = client.stats(timeout_s=PATIENCE_S).result().counters
    return counters["bytes_out"] + counters["lane_bytes_out"]
