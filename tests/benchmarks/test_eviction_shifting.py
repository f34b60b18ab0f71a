"""Eviction that learns, on workloads that shift, are short or have an unusual clock."""

from functools import cache

import pytest

from benchmarks.remote_kv_cache.replay.one_level import replay
from benchmarks.remote_kv_cache.replay.shifting import SHIFTING
from benchmarks.remote_kv_cache.replay.trace_file import check_tree
from remote_server.store.eviction import hazard

CAPACITIES = [300, 1200]


@cache
def requests_of(name, capacity):
    return SHIFTING[name](capacity, 1)


@cache
def by_lru(name, capacity):
    return replay(requests_of(name, capacity), capacity, "lru").found_percent


def found_by(name, capacity):
    return replay(requests_of(name, capacity), capacity, "learned").found_percent


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", SHIFTING)
def test_what_is_learned_is_never_half_a_point_below_lru(name, capacity):
    check_tree(requests_of(name, capacity))
    assert found_by(name, capacity) > by_lru(name, capacity) - 0.5


@pytest.mark.parametrize("name", SHIFTING)
def test_a_sabotaged_rule_costs_at_most_a_point_and_a_half(name, monkeypatch):
    gittins = hazard._gittins
    monkeypatch.setattr(hazard, "_gittins", lambda chances: -gittins(chances))
    assert found_by(name, 1200) > by_lru(name, 1200) - 1.5


@pytest.mark.parametrize("name", ["alternating", "polluted"])
def test_what_lru_finds_only_at_times_is_found_at_others_too(name):
    assert found_by(name, 1200) > by_lru(name, 1200) + 4
