"""Sessions with a common prefix: blocks stored once, as counted by the server."""

from typing import NamedTuple

from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect, key_of, server_for

NAMESPACE = "shared-prefix"
SESSIONS = 100
COMMON_BLOCKS = 8
OWN_BLOCKS = 5


class Shared(NamedTuple):
    """Blocks and bytes, from the server's `stats`."""

    put: int
    existed: int
    """Those that existed already and were not stored again."""

    logical_bytes: int
    """Bytes put by the sessions, copies included."""

    physical_bytes: int
    """Bytes of it in the server's memory, slots counted whole."""

    blocks: int


def measure(block_bytes: int) -> Shared:
    """Every session puts all of its blocks without a lookup. Each block is stored once."""
    num_blocks = COMMON_BLOCKS + SESSIONS * OWN_BLOCKS
    pool = blocks.allocate(COMMON_BLOCKS + OWN_BLOCKS, block_bytes)
    blocks.fill(pool)
    rows = [memoryview(row) for row in pool]
    with server_for(num_blocks * block_bytes, block_bytes) as server:
        client = connect(server.endpoint, NAMESPACE, block_bytes)
        try:
            for session in range(SESSIONS):
                own = COMMON_BLOCKS + session * OWN_BLOCKS
                places = [*range(COMMON_BLOCKS), *range(own, own + OWN_BLOCKS)]
                keys = [key_of(place) for place in places]
                put = client.put(NAMESPACE, keys, rows, deferred=False, timeout_s=PATIENCE_S)
                if (result := put.result()).error is not None or result.declined:
                    raise AssertionError(f"session {session}: {result}")
            stats = client.stats(timeout_s=PATIENCE_S).result()
        finally:
            client.close()
    counters, space = stats.counters, stats.namespaces[NAMESPACE].share("memory")
    return Shared(
        counters["put_total"], counters["put_existed"], counters["put_total"] * block_bytes,
        space.used_bytes, space.blocks,
    )  # fmt: skip
