"""Eviction that learns, on workloads that shift, are short or have an unusual clock."""

from functools import cache

import pytest

from benchmarks.remote_kv_cache.replay.one_level import replay
from benchmarks.remote_kv_cache.replay.shifting import SHIFTING
from benchmarks.remote_kv_cache.replay.trace_file import check_tree
from remote_server.store.eviction import hazard

SMALL = 300
FIRST = {SMALL: 2500}
"""Requests of a small cache's workloads; the others are as long as they were made."""


@cache
def requests_of(name, capacity):
    return SHIFTING[name](capacity, 1)[: FIRST.get(capacity)]


@cache
def by_lru(name, capacity):
    return replay(requests_of(name, capacity), capacity, "lru").found_percent


def found_by(name, capacity):
    return replay(requests_of(name, capacity), capacity, "learned").found_percent


@pytest.mark.parametrize("name", SHIFTING)
@pytest.mark.parametrize("capacity", [SMALL, pytest.param(1200, marks=pytest.mark.whole)])
def test_what_is_learned_is_never_half_a_point_below_lru(name, capacity):
    check_tree(requests_of(name, capacity))
    more = found_by(name, capacity) - by_lru(name, capacity)
    assert more > -0.5
    if name in ("alternating", "polluted"):
        assert more > 4, "what LRU finds only at times"


@pytest.mark.parametrize("name", ["recent", "alternating", "young"])
def test_a_sabotaged_rule_costs_at_most_a_point_and_a_half(name, monkeypatch):
    gittins = hazard._gittins
    monkeypatch.setattr(hazard, "_gittins", lambda chances: -gittins(chances))
    assert found_by(name, SMALL) > by_lru(name, SMALL) - 1.5
