"""Counters of the tier: vLLM adds up what it is given, so each event is reported once."""

from typing import Any

from kv_connector import metrics
from kv_connector.metrics import TierCounters


def grown(counters: TierCounters) -> dict[str, Any]:
    return dict(counters.take_stats({}).data["data"])


def test_an_event_is_reported_in_one_collection_and_not_again():
    counters = TierCounters()
    counters.count(metrics.HIT_BLOCKS, 5)
    assert grown(counters)[metrics.HIT_BLOCKS][()] == 5
    counters.count(metrics.HIT_BLOCKS, 2)
    assert grown(counters)[metrics.HIT_BLOCKS][()] == 2
    assert metrics.HIT_BLOCKS not in grown(counters)
