"""Lookups of many keys: latency and throughput of kvferry and of Redis.

Ours have the chain fields of an engine's connector, and each prompt is looked up again within a
second, as by a scheduler that asks while a request waits: eviction counts that once. One row is of
plain clients, whose keys stand alone: eviction learns from each of them.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.baseline.peers import redis_work
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    Client,
    anchors_of,
    chain_of,
    connect_to,
    key_of,
)
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.protocol import Found

NUM_KEYS = 1_000  # a prompt of 16,000 tokens at 16 a block
BATCH_KEYS = 512
ROUND_TRIPS = 60
"""Of a trial. Throughput is the median of the trials."""

OUTSTANDING = 4
"""Lookups in flight, for throughput, as from an engine whose requests arrive together."""

_BLOCK_BYTES = 4096
_NAMESPACE = "lookups"


def measure(runner: Runner, server: Target) -> list[Figure]:
    """Every key has a block; the first round is the warm-up. Raises `Skipped` when a running server
    cannot be used."""
    round_trips = ROUND_TRIPS * runner.trials
    runner.show(f"lookups: {round_trips} round trips of {NUM_KEYS} keys")
    keys = [key_of(number) for number in range(NUM_KEYS)]
    with ExitStack() as stack:
        endpoint = stack.enter_context(
            server.server(_NAMESPACE, NUM_KEYS * _BLOCK_BYTES, _BLOCK_BYTES)
        )
        namespace = server.namespace(_NAMESPACE)
        client = connect_to(endpoint, namespace, _BLOCK_BYTES)
        stack.callback(client.close)
        pool = blocks.allocate(NUM_KEYS, _BLOCK_BYTES)
        rows = [memoryview(row) for row in pool]
        anchors = anchors_of(client, keys, blocks.BLOCK_SIZE)
        client.put(
            namespace, keys, rows, deferred=False, timeout_s=PATIENCE_S,
            chain=chain_of(keys, blocks.BLOCK_SIZE), anchors=anchors,
        ).result()  # fmt: skip
        figures = [
            _latency(
                f"lookup of {NUM_KEYS:,} keys",
                lambda: _lookup(client, namespace, keys),
                round_trips,
            ),
            _rate(client, namespace, keys[:BATCH_KEYS], runner.trials),
            _rate(client, namespace, keys, runner.trials),
            _rate(client, namespace, keys, runner.trials, stand_alone=True),
        ]
        if server.is_elsewhere:
            return figures
        runner.show("lookups: Redis")
        return [*figures, *_redis(stack, keys[:BATCH_KEYS], runner.trials)]


def _lookup(client: Client, namespace: str, keys: list[bytes]) -> None:
    anchors = anchors_of(client, keys, blocks.BLOCK_SIZE)
    chain = chain_of(keys, blocks.BLOCK_SIZE)
    found = client.lookup(
        namespace, keys, timeout_s=PATIENCE_S, chain=chain, anchors=anchors
    ).result()
    if found.prefix != len(keys):
        raise AssertionError(f"{found.prefix} of {len(keys)} keys found")


def _latency(name: str, ask: Callable[[], None], count: int) -> Figure:
    seconds = []
    for number in range(count + count // 5):
        started = time.perf_counter()
        ask()
        if number >= count // 5:
            seconds.append((time.perf_counter() - started) * 1000)
    values = {"median": percentile(seconds, 50), "p99": percentile(seconds, 99)}
    return Figure(f"{name}, one round trip", "ms", values, "tcp")


def _rate(
    client: Client, namespace: str, keys: list[bytes], trials: int, *, stand_alone: bool = False
) -> Figure:
    """With one batch in flight and with several. Without chain fields if keys `stand_alone`."""
    chain = [] if stand_alone else chain_of(keys, blocks.BLOCK_SIZE)
    anchors = anchors_of(client, keys, blocks.BLOCK_SIZE)

    def one_trial(outstanding: int) -> None:
        waiting: deque[Future[Found]] = deque()
        for _ in range(ROUND_TRIPS):
            if len(waiting) == outstanding:
                waiting.popleft().result()
            found = client.lookup(
                namespace, keys, timeout_s=PATIENCE_S, chain=chain, anchors=anchors
            )
            waiting.append(found)
        for future in waiting:
            future.result()

    ways = {f"{number} at a time": partial(one_trial, number) for number in (1, OUTSTANDING)}
    values = _medians(ways, ROUND_TRIPS * len(keys), trials)
    about = ", of a plain client" if stand_alone else ""
    return Figure(f"lookups in batches of {len(keys):,}{about}", "keys/s", values, "tcp")


def _medians(
    ways: Mapping[str, Callable[[], None]], num_keys: int, trials: int
) -> dict[str, float]:
    """Keys a second of each way, whose one call asks for `num_keys`. The ways take turns."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(trials):
        for name, one_trial in ways.items():
            started = time.perf_counter()
            one_trial()
            rates[name].append(num_keys / (time.perf_counter() - started))
    return {name: percentile(of_one, 50) for name, of_one in rates.items()}


def _redis(stack: ExitStack, keys: list[bytes], trials: int) -> list[Figure]:
    """`MGET` of values of one byte: Redis has no command that lists which of many keys exist."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    try:
        server = stack.enter_context(redis_work.RedisServer(folder))
    except Skipped:
        return []  # the rows of the transfers have the reason
    plain = redis_work.PlainRedis(server.unix)
    stack.callback(plain.close)
    for key in keys:
        plain.ask(b"SET", key, b"1")
    ways: dict[str, Callable[[], object]] = {"plain client": lambda: plain.mget(keys)}
    try:
        client = redis_work.redis_py().Redis(unix_socket_path=server.unix)
        stack.callback(client.close)
        ways["redis-py"] = lambda: client.mget(keys)
    except Skipped:
        pass

    def one_trial(ask: Callable[[], object]) -> None:
        for _ in range(ROUND_TRIPS):
            ask()

    for ask in ways.values():
        ask()
    each = {name: partial(one_trial, ask) for name, ask in ways.items()}
    values = _medians(each, ROUND_TRIPS * len(keys), trials)
    return [Figure(f"redis MGET in batches of {BATCH_KEYS}", "keys/s", values, "unix")]
