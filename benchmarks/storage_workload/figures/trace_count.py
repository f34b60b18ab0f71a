"""The possible hit rate of a trace: a count over its blocks, without a store.

It is the hit rate of an unlimited cache, request after request in their recorded order. A run finds
less where blocks were evicted, or where requests with a common prefix were served at once.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.remote_kv_cache.replay.caches.optimum import without_limit
from benchmarks.storage_workload.figures.samples import RequestSample
from benchmarks.storage_workload.traffic.entries import TraceEntry
from benchmarks.storage_workload.traffic.requests import Request
from remote_server.traces import Request as Prompt


def beside(recorded: Sequence[Request], answered: Sequence[RequestSample]) -> dict[str, Any] | None:
    """The hit rate of a run and that of the count, over the answered requests. None when none of
    them has a full block."""
    served = {(sample.user, sample.number) for sample in answered}
    prompts = [
        Prompt(0.0, entry.tokens, each.generation_tokens, entry.ids)
        for each in recorded
        if (each.user, each.number) in served
        for entry in each.prefix
        if isinstance(entry, TraceEntry)
    ]
    asked = sum(len(prompt.blocks) for prompt in prompts)
    if not asked:
        return None
    findable, here = without_limit(prompts), sum(sample.hit for sample in answered)
    return {
        "requests": len(served),
        "hit_rate": here / asked,
        "findable": findable / asked,
        "off_points": 100 * (here - findable) / asked,
    }
