"""The ratio of the time to compute KV cache to the time to get it from the server, in one run.

This ratio determines the savings of a cache server, and it differs by machine: a small model on
two cores computes far more slowly per byte of KV cache than a large one on a GPU, and it also
fetches more slowly. So every result prints its own ratio beside the source's.
"""

import time
from contextlib import ExitStack

from benchmarks.engine.driver import Engine
from benchmarks.engine.presets import SOURCE_RATIOS
from benchmarks.engine.prompts import distinct
from benchmarks.engine.session import Site
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Skipped
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.work.blocks import filled_pools
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, TRANSPORTS, connect, key_of
from remote_server.client import GetOutcome

NAME = "prefill to transfer"
NAMESPACE = "transfer-ratio"
_ROUNDS = 7
_MOST_BLOCKS = 512


def figures(site: Site, engine: Engine, input_len: int) -> list[Figure]:
    """Medians over rounds: `engine` computes one prompt, and a client gets as many blocks."""
    settings = engine.settings
    blocks = min(_MOST_BLOCKS, input_len // settings.block_tokens)
    tokens = blocks * settings.block_tokens + 1
    prefill = [
        engine.run(distinct(1, tokens, seed=600_000 + turn, max_tokens=1)).seconds
        for turn in range(_ROUNDS)
    ]
    engine.settle()
    prefill_s = summarize(prefill[1:]).median
    values = {}
    for transport in TRANSPORTS:
        try:
            values[transport] = prefill_s / _get_s(site, transport, blocks, settings.block_bytes)
        except Skipped:
            continue
    moved = blocks * settings.block_bytes
    return [
        Figure(NAME, "to 1", values),
        Figure("prefill of such a prompt", "ms", {"median": prefill_s * 1e3}),
        Figure("its KV cache", "MB", {"size": moved / 1e6}),
    ]


def lines(record: Record) -> list[str]:
    """The lines below a table: the ratio, and the source's beside it."""
    return [
        f"{NAME}: {_ratios(figure)} here; {SOURCE_RATIOS}"
        for figure in record.figures
        if figure.name == NAME
    ]


def _ratios(figure: Figure) -> str:
    return ", ".join(f"{value:.1f}:1 over {name}" for name, value in figure.values.items())


def _get_s(site: Site, transport: str, blocks: int, block_bytes: int) -> float:
    assert site.server is not None
    with ExitStack() as stack:
        source, target = filled_pools(stack, blocks, block_bytes)
        client = connect(
            site.server.endpoint, NAMESPACE, block_bytes, transport=transport, rows=(source, target)
        )
        stack.callback(client.close)
        keys = [key_of(number) for number in range(blocks)]
        rows = [memoryview(row) for row in source.pool]
        client.put(NAMESPACE, keys, rows, deferred=False, timeout_s=PATIENCE_S).result()
        times = []
        rows = [memoryview(row) for row in target.pool]
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            got = client.get(
                NAMESPACE, keys, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
            ).result()
            times.append(time.perf_counter() - began)
            assert got.outcomes == [GetOutcome.HIT] * blocks, got
        client.clear(NAMESPACE, timeout_s=PATIENCE_S).result()
        return summarize(times[1:]).median
