"""Which level supplied the tokens of a hit, on models with sliding windows too.

vLLM counts tokens that no group loads, those before a window, as `external_unspecified`, which is
our server's source. Nothing of them was sent. They count as the engine's here, as they do where the
engine's own cache hits.
"""

from operator import itemgetter
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

Sources = dict[CacheHitSource, int]
"""Tokens by the level that supplied them."""


def without_what_was_not_sent(sources: Sources, unsent: int) -> Sources:
    """`sources` with `unsent` tokens of the server counted as the engine's. The sum stays: vLLM
    takes no other."""
    counted = dict(sources)
    unspecified = counted.pop(CacheHitSource.EXTERNAL_UNSPECIFIED, 0)
    unsent = min(unspecified, unsent)
    moved = {
        CacheHitSource.EXTERNAL_UNSPECIFIED: unspecified - unsent,
        CacheHitSource.DEVICE: unsent,
    }
    return counted | {source: tokens for source, tokens in moved.items() if tokens}


def tokens_before_windows(scheduler: Any, request_id: str, num_external_tokens: int) -> int:
    """Tokens of a hit of which no group loads anything. `scheduler` is vLLM's half of the
    connector."""
    groups = scheduler.config.kv_group_configs
    if any(group.sliding_window_size_in_chunks is None for group in groups):
        return 0
    status = scheduler._req_status[request_id]
    reached = start = status.num_locally_computed_tokens
    end, unsent = start + num_external_tokens, 0
    for first, last, _ in sorted(status.load_key_ranges, key=itemgetter(0)):
        unsent += max(0, min(first, end) - reached)
        reached = max(reached, min(last, end))
    return int(unsent + end - reached)
