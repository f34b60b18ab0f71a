"""Eviction judged on one level: made-up workloads, and the trace where it is there."""

import os
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from benchmarks.remote_kv_cache.replay import trace_file
from benchmarks.remote_kv_cache.replay.one_level import POLICIES, replay
from benchmarks.remote_kv_cache.replay.optimum import next_uses, optimum
from benchmarks.remote_kv_cache.replay.workloads import WORKLOADS
from remote_server.store.eviction import hazard, learner, policy

CAPACITY = 3510
SMALL = 700
TRACE = os.environ.get("KVFERRY_TRACE", "")
PROMISED = [(CAPACITY, 13.5), (5851, 18.0), (10532, 24.0), (19894, 31.0), (38619, 36.4)]
"""Places of 96, 160, 288, 544 and 1,056 GiB, and the least per cent found."""

SEEDS = {"uniform": [1, 2], "few": [1, 2]}
"""Chance alone moves a rule of these workloads by half a point: the mean of some counts."""

FIRST = {"uniform": 6000, "chat": 5000, "few": 2500}
"""Requests of the workloads that take longest."""

FIRST_OF_SMALL = {"chat": 1200}
"""Of the others 2,000."""


def found_by(name, policy, capacity=SMALL, seed=1):
    first = FIRST.get(name) if capacity == CAPACITY else FIRST_OF_SMALL.get(name, 2000)
    return replay(WORKLOADS[name](capacity, seed)[:first], capacity, policy).found_percent


soundly_found_by = cache(found_by)
"""Not for a sabotaged rule."""


@pytest.fixture
def sabotaged(monkeypatch):
    """Ranks upside down: the likeliest to return is the victim."""
    gittins = hazard._gittins
    monkeypatch.setattr(hazard, "_gittins", lambda chances: -gittins(chances))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("capacity", [SMALL, pytest.param(CAPACITY, marks=pytest.mark.whole)])
def test_what_is_learned_is_never_half_a_point_below_lru(name, capacity):
    seeds = SEEDS.get(name, [1]) if capacity == CAPACITY else [1]
    lru, learned = (
        mean(soundly_found_by(name, policy, capacity, seed) for seed in seeds)
        for policy in ("lru", "learned")
    )
    assert learned > lru - 0.5
    if name == "loop":
        assert lru == 0 and learned > 75, "a loop that is larger than the cache is mostly found"


@pytest.mark.parametrize("name", ["scan", "zipf"])
def test_a_sabotaged_rule_costs_at_most_a_point_and_a_half(name, sabotaged):
    assert found_by(name, "learned") > soundly_found_by(name, "lru") - 1.5


@pytest.mark.whole
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_sabotaged_rule_costs_at_most_a_point_and_a_half_of_a_large_cache(name, sabotaged):
    lru = soundly_found_by(name, "lru", CAPACITY)
    assert found_by(name, "learned", CAPACITY) > lru - 1.5


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_finds_more_than_the_optimum(policy):
    made = WORKLOADS["zipf"](SMALL, 1)[:600]
    result = replay(made, SMALL, policy)
    assert 0 < result.found <= optimum(made, SMALL, next_uses(made))


@pytest.mark.skipif(not TRACE, reason="KVFERRY_TRACE names no conversation_trace.jsonl")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("capacity", "least"), PROMISED)
def test_conversations_are_found_as_promised(capacity, least, seed, monkeypatch):
    for module in (learner, policy):
        monkeypatch.setattr(module, "SEED", seed)
    result = replay(trace_file.read(Path(TRACE)), capacity, "learned")
    assert result.found_percent >= least
    assert result.written_percent <= 45 or capacity > CAPACITY


def test_the_ranks_are_finite_numbers_before_anything_is_learned():
    ranks = np.array(hazard.Hazards().ranks)
    assert ranks.shape == (hazard.NUM_CLASSES, hazard.NUM_AGES)
    assert np.isfinite(ranks).all()
    assert (ranks > 0).all()
