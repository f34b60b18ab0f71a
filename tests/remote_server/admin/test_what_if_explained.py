"""What other sizes would find, as the page's /stats has it."""

import pytest
from metrics_helpers import WHAT_IF, a_snapshot
from msgspec.structs import replace

from remote_server.admin.what_if import explained
from remote_server.protocol import EngineState, FoundAt, WhatIf
from remote_server.protocol.what_if_words import LEAST_TOKENS, sentences


def with_asked(asked: int) -> WhatIf:
    """`WHAT_IF` with another number of tokens, and nothing found of them."""
    total = replace(WHAT_IF.total, asked=asked, found={"memory": 0, "disk": 0})
    return replace(WHAT_IF, total=total)


def an_engine(namespace: str, tokens_per_s: float) -> EngineState:
    return EngineState(
        namespace=namespace, client="e", model="m", software="s", prompt_tokens=0, reused={},
        tokens_per_s=tokens_per_s,
    )  # fmt: skip


def test_the_page_gets_the_sentences_of_each_tier_and_its_reasons_in_words():
    one = explained(a_snapshot())[""]
    assert one["tiers"]["memory"]["sentences"] == sentences(WHAT_IF, "memory")
    assert one["tiers"]["disk"]["sentences"] == sentences(WHAT_IF, "disk")
    assert one["total"]["rule"] == WHAT_IF.total.rule and one["concludes"]
    assert one["found"] == 0.5
    assert one["reasons"] == [
        {"share": 0.25, "words": "never seen before"},
        {"share": 0.1875, "words": "evicted: 12.5 % less than a minute before"},
        {"share": 0.0625, "words": "still being written"},
    ]


def test_the_page_marks_the_size_from_which_more_brings_less_than_one_percent():
    tiers = explained(a_snapshot())[""]["tiers"]
    memory, disk = tiers["memory"]["enough"], tiers["disk"]["enough"]
    assert memory["share"] == pytest.approx(0.49) and 2 << 30 < memory["bytes"] < 4 << 30
    assert disk["share"] == pytest.approx(0.49) and 2 << 30 < disk["bytes"] < 4 << 30


def test_the_page_marks_no_size_where_the_largest_one_still_brings_more():
    rising = replace(WHAT_IF.total, rule={"memory": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]})
    rising = replace(WHAT_IF, budgets={"memory": 1 << 30}, total=rising)
    (tier,) = explained(a_snapshot(what_if={"": rising}))[""]["tiers"].values()
    assert tier["enough"] is None
    assert "Up to 8.0 GiB in all, more finds more." in tier["sentences"][0]


def test_the_page_concludes_nothing_from_too_few_tokens():
    one = explained(a_snapshot(what_if={"": with_asked(LEAST_TOKENS - 1)}))[""]
    assert not one["concludes"]
    for tier in one["tiers"].values():
        assert tier["enough"] is None and len(tier["sentences"]) == 1
    assert explained(a_snapshot(what_if={"": with_asked(LEAST_TOKENS)}))[""]["concludes"]


def test_a_tenant_saves_the_time_of_its_own_engines():
    engines = [an_engine("slow/llama", 100.0), an_engine("fast/llama", 10_000.0)]
    tenants = explained(a_snapshot(what_if={"slow": WHAT_IF, "fast": WHAT_IF}, engines=engines))
    for name, speed in (("slow", 100.0), ("fast", 10_000.0)):
        told = tenants[name]["tiers"]["memory"]["sentences"]
        assert told == sentences(WHAT_IF, "memory", speed)


def test_a_server_without_requests_has_no_reasons():
    nothing = FoundAt(asked=0, found={}, rule=WHAT_IF.total.rule, lru=WHAT_IF.total.lru)
    one = explained(a_snapshot(what_if={"": replace(WHAT_IF, total=nothing)}))[""]
    assert one["reasons"] == [] and one["found"] == 0.0
