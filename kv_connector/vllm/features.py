"""Differences between the supported versions of vLLM, by feature and not by number."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from enum import StrEnum
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
except ImportError:

    class CacheHitSource(StrEnum):  # type: ignore[no-redef]
        """vLLM's names for the levels that tokens come from, since 0.32."""

        DEVICE = "device"
        HOST = "host"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


COUNTS_LEVELS = hasattr(OffloadingConnector, "get_external_cache_hit_sources")
"""Whether vLLM knows from which tier each block of a hit came, and counts its tokens by that."""

Sources = dict[CacheHitSource, int]
"""Tokens by the level that supplied them."""


def sources_by_keys(tokens: int, keys: Sequence[Any], from_server: Collection[Any]) -> Sources:
    """The sources of `tokens` below the engine, for a vLLM that does not know them. `keys` are
    those of the hit in groups that hold all of a prefix, `from_server` those that the tier loaded
    for the request. Without such a group a hit with a loaded key counts as the server's."""
    sent = sum(key in from_server for key in keys) if keys else bool(from_server)
    server = tokens * sent // (len(keys) or 1)
    found = {CacheHitSource.EXTERNAL_UNSPECIFIED: server, CacheHitSource.HOST: tokens - server}
    return {source: count for source, count in found.items() if count}


def let_promotions_go_on(manager: Any) -> None:
    """End the time after a reset in which vLLM's `manager` asks no tier.

    vLLM 0.33 and newer hold promotions until the copies that a reset found under way have ended in
    all workers. A request that is looked up meanwhile is a miss, and computes its prompt. The
    caller holds the loads of our tier, the only one, for the same time: its lookups go on, and such
    a request waits.
    """
    flushed = getattr(manager, "on_reset_flushed", None)
    if flushed is not None:
        with getattr(manager, "lock", nullcontext()):
            flushed()
