"""Calibration of the cost of a computed token, from the measured cost of fetching one.

A GPU computes the KV cache of 8,192 tokens of Qwen2.5-7B in twelve times the time that the source
needed to get it from its server, of Qwen2.5-3B in seven. Here fetching is measured on this
machine, with blocks of the model's size; computing is then that many times as long.
"""

import threading
import time
from contextlib import ExitStack
from functools import cache

from benchmarks.harness.runner import Skipped
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.work.blocks import filled_pools
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect, key_of, server_for
from benchmarks.remote_kv_cache.work.models import MODELS
from remote_server.values import MiB

SOURCE_RATIOS = {
    model.bytes_per_token: ratio
    for model in MODELS
    for name, ratio in (("Qwen2.5-7B-Instruct", 12.0), ("Qwen2.5-3B-Instruct", 7.0))
    if model.name == name
}
OTHER_RATIO = 12.0
"""The ratio of a model for which the source has no figure."""

_MOVED = 64 * MiB
_ROUNDS = 9


def ratio_of(kv_bytes_per_token: int) -> float:
    """The source's ratio for a model of this shape."""
    return SOURCE_RATIOS.get(kv_bytes_per_token, OTHER_RATIO)


_one_at_a_time = threading.Lock()


def fetch_s_per_byte(block_bytes: int, transport: str = "auto") -> float:
    """Median seconds to get a byte, in blocks of this size from a server of its own.

    Measured once a process, also when several engines start at once: all engines of one run compute
    at one speed. `auto` is shared memory where available.
    """
    with _one_at_a_time:
        return _measured(block_bytes, transport)


@cache
def _measured(block_bytes: int, transport: str) -> float:
    num_blocks = max(4, _MOVED // block_bytes)
    num_bytes = num_blocks * block_bytes
    for way in ("shm", "tcp") if transport == "auto" else (transport,):
        with ExitStack() as stack:
            server = stack.enter_context(server_for(num_bytes, block_bytes))
            source, target = filled_pools(stack, num_blocks, block_bytes)
            try:
                client = connect(
                    server.endpoint, "calibration", block_bytes, transport=way,
                    rows=(source, target),
                )  # fmt: skip
            except Skipped:
                if way == transport:
                    raise
                continue
            stack.callback(client.close)
            keys = [key_of(number) for number in range(num_blocks)]
            client.put(
                "calibration", keys, [memoryview(row) for row in source.pool], deferred=False,
                timeout_s=PATIENCE_S,
            ).result()  # fmt: skip
            rows = [memoryview(row) for row in target.pool]
            times = []
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                got = client.get(
                    "calibration", keys, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
                ).result()
                times.append(time.perf_counter() - began)
                assert len(got.landed) == num_blocks, got
            return summarize(times[1:]).median / num_bytes
    raise AssertionError("tcp is always available, or the reason was raised")
