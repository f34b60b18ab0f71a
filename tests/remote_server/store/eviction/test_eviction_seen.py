"""Eviction that learns, as its server shows it: statistics, metrics and lines of the command."""

import tracemalloc

import pytest
from metrics_helpers import LEARNED, a_snapshot
from wire_peer import Peer

from benchmarks.remote_kv_cache.replay.requests.workloads import WORKLOADS
from remote_server.admin.exposition import families
from remote_server.cli.figures.eviction_lines import eviction_lines
from remote_server.protocol import Hint, StatsReply
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.eviction.hazard import NUM_CLASSES, class_of
from remote_server.store.eviction.hints import mark_of
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.report import CLASSES, WITHIN_S, eviction_stats
from remote_server.traces.model_cache import OneLevel, key_of
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

CAPACITY = 3510


def replayed(workload: str, number: int) -> OneLevel:
    level = OneLevel(CAPACITY, "learned")
    for request in WORKLOADS[workload](CAPACITY, 1)[:number]:
        level.request(request.arrival_s, [key_of(block) for block in request.blocks])
    return level


@pytest.fixture(scope="module")
def loop():
    return replayed("loop", 12_000)


def test_the_rule_that_reigns_is_shown_with_what_both_shadows_find(loop):
    stats = eviction_stats(loop.learner)
    assert stats.rule == "learned" and stats.switches == 1
    assert stats.found["learned"] > 0.5 > stats.found["lru"] == 0.0


def test_chances_grow_with_the_horizon_and_only_classes_that_were_seen_have_some(loop):
    stats = eviction_stats(loop.learner)
    assert stats.returns and len(stats.returns) < 6
    for chances in stats.returns.values():
        assert len(chances) == len(stats.within_s) == len(WITHIN_S)
        assert 0.0 <= chances[0] <= chances[1] <= chances[2] <= 1.0
    assert eviction_stats(Learner(lambda: 0.0)).returns == {}


def test_classes_are_named_by_turn_and_hint_each_once():
    assert len({*CLASSES.values()}) == len(CLASSES) == NUM_CLASSES
    assert CLASSES[class_of(0, mark_of(None))] == "turn 1"
    assert CLASSES[class_of(1, mark_of(Hint(True, 300.0)))] == "turn 2, back in 5 min"
    assert CLASSES[class_of(4, mark_of(Hint(False)))] == "turn 5 and later, not back"


def test_a_chance_within_a_range_of_ages_lies_between_those_at_its_ends(loop):
    hazards = loop.learner.hazards
    kind = int(hazards.seen.argmax())
    chances = [hazards.within(kind, horizon_s) for horizon_s in (64.0, 75.0, 90.50966799187809)]
    assert chances == sorted(chances)
    assert hazards.within(kind, 0.0) == 0.0
    left = 1.0
    for chance in hazards.chances[kind]:
        left *= 1.0 - chance
    assert hazards.within(kind, 1e9) == pytest.approx(1.0 - left)


def test_what_lru_alone_orders_has_nothing_to_show():
    assert eviction_stats(None) is None
    reply = StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=1.0, tiers={}, namespaces={}, counters={}
    )
    assert eviction_lines(reply) == []


def test_the_bytes_of_the_policy_are_about_what_it_takes():
    requests = WORKLOADS["zipf"](CAPACITY, 1)[:1500]
    level = OneLevel(CAPACITY, "learned")
    tracemalloc.start()
    try:
        for request in requests:
            level.request(request.arrival_s, [key_of(block) for block in request.blocks])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    index = 200 * len(level)  # its rows and their keys
    assert eviction_stats(level.learner).policy_bytes == pytest.approx(taken - index, rel=0.3)


def test_metrics_name_the_rule_the_rates_and_the_chances_by_tenant():
    shown = {
        (sample.name.removeprefix("kvferry_server_eviction_"), *sample.labels.values()):
            sample.value
        for family in families(a_snapshot(eviction={"a": LEARNED}), {})
        for sample in family.samples
        if sample.name.startswith("kvferry_server_eviction_")
    }  # fmt: skip
    assert shown == {
        ("rule", "a", "lru"): 0, ("rule", "a", "learned"): 1,
        ("found_ratio", "a", "lru"): 0.25, ("found_ratio", "a", "learned"): 0.375,
        ("switches_total", "a"): 3, ("bytes", "a"): 3 << 20,
        ("return_ratio", "a", "turn 1", "60"): 0.125, ("return_ratio", "a", "turn 1", "300"): 0.25,
        ("return_ratio", "a", "alone", "60"): 0.0, ("return_ratio", "a", "alone", "300"): 0.5,
    }  # fmt: skip


def test_stats_shows_the_rule_in_a_line_and_the_chances_as_a_table():
    reply = StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=1.0, tiers={}, namespaces={}, counters={},
        eviction=LEARNED,
    )  # fmt: skip
    lines = eviction_lines(reply)
    assert lines[0] == (
        "eviction   by learned; shadows find lru 25.0 %, learned 37.5 %; 3 switches; takes 3.0 MiB"
    )
    assert [line.split() for line in lines[1:]] == [
        ["used", "again", "in", "1", "min", "5", "min"],
        ["turn", "1", "12.5", "%", "25.0", "%"],
        ["alone", "0.0", "%", "50.0", "%"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize("eviction", ["lru", "learned"])
def test_a_server_answers_stats_with_what_its_policy_learned(eviction, context):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, admin="off", eviction=eviction
    )
    with Server(config) as server:
        peer = Peer(context, server.endpoint)
        peer.hello()
        peer.put(range(8))
        stats = peer.stats().eviction
        snapshot = server.loop_calls.call(server.snapshot).result(60)
    if eviction == "lru":
        assert stats is None and snapshot.eviction == {}
    else:
        assert stats.rule == "lru", "at the start"
        assert stats.policy_bytes > 0
        assert snapshot.eviction[""].rule == "lru"
