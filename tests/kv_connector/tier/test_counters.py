"""Counters of the tier, each event reported once: vLLM adds up what it is given; and the line of
log about prompt tokens, which reports only what is new."""

from typing import Any

from scripted_client import Clock

from kv_connector.hooks.traffic import Traffic
from kv_connector.tier import metrics
from kv_connector.tier.metrics import TierCounters


def grown(counters: TierCounters) -> dict[str, Any]:
    return dict(counters.take_stats({}).data["data"])


def test_an_event_is_reported_in_one_collection_and_not_again():
    counters = TierCounters()
    counters.count(metrics.HIT_BLOCKS, 5)
    assert grown(counters)[metrics.HIT_BLOCKS][()] == 5
    counters.count(metrics.HIT_BLOCKS, 2)
    assert grown(counters)[metrics.HIT_BLOCKS][()] == 2
    assert metrics.HIT_BLOCKS not in grown(counters)


def test_the_line_adds_up_to_the_prompt_tokens():
    clock = Clock()
    clock.now = 0.0
    traffic = Traffic(60, clock)
    traffic.looked_up("a", 1000, 0)
    traffic.looked_up("a", 1000, 100)  # asked again before it was admitted
    traffic.admitted({"host": 300, "external_unspecified": 200})
    totals = {(metrics.PUT_BLOCKS, "created"): 4, (metrics.DECLINED_BLOCKS, "pinned_rows"): 2}
    assert traffic.line(totals) is None
    clock.now = 61
    assert traffic.line(totals) == (
        "1 requests, 1000 prompt tokens: engine 100, CPU pool 300, server 200, computed 400; "
        "put created 4; missed nothing; declined pinned_rows 2"
    )
    clock.now = 122
    assert traffic.line(totals) is None, "nothing new, no line"
    traffic.looked_up("b", 10, 0)
    clock.now = 190
    assert traffic.line(totals) == (
        "1 requests, 10 prompt tokens: engine 0, computed 10; put nothing; missed nothing; "
        "declined nothing"
    )
    assert traffic.prompt_tokens == 1010, "of all lines"
    assert traffic.reused == {"engine": 100, "CPU pool": 300, "server": 200}
