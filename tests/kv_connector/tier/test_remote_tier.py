"""The tier asks once, promises only what landed, and ends every job exactly once."""

from typing import Any

import numpy as np
import pytest
from scripted_client import BLOCK_BYTES, ROW_BYTES, Engine
from vllm.v1.kv_offload.base import ReqContext

from kv_connector.request_options import BYPASS_KEY, Bypass
from kv_connector.tier import lookups, metrics
from remote_server.client import BreakerState
from remote_server.client.results import new_counters
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState


def test_the_first_k_blocks_of_the_server_are_hits_and_the_rest_misses(engine: Engine):
    context, keys = engine.ask("r", 4, READABLE, READABLE, ABSENT, READABLE)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "MISS", "HIT"]


def test_without_a_server_every_lookup_is_an_instant_miss(engine: Engine):
    context, keys = engine.request("r", 3)
    engine.client.ready = False
    assert engine.lookup(context, keys) == ["MISS"] * 3
    engine.client.ready = True
    assert engine.lookup(context, keys) == ["MISS"] * 3, "and stays one for this request"
    assert engine.lookup(*engine.request("next", 1)) == ["RETRY"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("late"), "lookup_late"),
        (ServerUnavailable("gone"), "unavailable"),
        (RuntimeError("odd"), "lookup_failed"),
    ],
)
def test_a_failed_lookup_is_a_miss_counted_by_reason(engine: Engine, error: Exception, reason: str):
    context, keys = engine.ask("r", 2)
    engine.client.last("lookup").reply.set_exception(error)
    assert engine.lookup(context, keys) == ["MISS"] * 2
    assert engine.counted(metrics.MISSED_BLOCKS, reason) == 2


def test_a_prompt_longer_than_the_pool_asks_only_for_what_fits(engine: Engine):
    """40 rows: three quarters are 30."""
    context, keys = engine.request("r", 50)
    assert engine.lookup(context, keys) == ["RETRY"] * 30 + ["MISS"] * 20


def test_a_load_fills_the_rows_without_their_padding_and_is_reported_once(engine: Engine):
    context, keys = engine.request("r", 2)
    engine.tier.submit_load(engine.job(context, keys, [7, 3]))
    asked = engine.client.last("get")
    assert [row.nbytes for row in asked.rows] == [BLOCK_BYTES] * 2
    for value, row in enumerate(asked.rows, 1):
        row[:] = bytes([value]) * BLOCK_BYTES
    assert engine.finished() == []
    asked.landed(0, 1)
    assert engine.finished() == [(1, True, keys)]
    assert engine.finished() == []
    assert np.all(engine.pool[7, :BLOCK_BYTES] == 1) and np.all(engine.pool[3, :BLOCK_BYTES] == 2)
    assert not engine.pool[:, BLOCK_BYTES:ROW_BYTES].any()


def test_a_load_that_stalls_keeps_what_landed_and_the_rest_is_not_asked_again(engine: Engine):
    context, keys = engine.ask("r", 3, READABLE, READABLE, READABLE)
    engine.lookup(context, keys)
    engine.tier.submit_load(engine.job(context, keys, [0, 1, 2]))
    engine.client.last("get").landed(0, 2)
    assert engine.finished() == [(1, False, [keys[0], keys[2]])]
    assert engine.lookup(context, keys[1:2]) == ["MISS"]
    assert engine.counted(metrics.MISSED_BLOCKS, "load_failed") == 1


def test_only_what_the_server_lacks_is_put(engine: Engine):
    context, keys = engine.request("r", 4)
    engine.tier.submit_store(engine.job(context, keys, [4, 5, 6, 7]))
    engine.client.last("lookup").found(READABLE, ABSENT, PENDING, ABSENT)
    put = engine.client.last("put")
    assert put.keys == [keys[1], keys[3]]
    engine.pool[5, 0], engine.pool[7, 0] = 5, 7
    assert [row[0] for row in put.rows] == [5, 7]
    put.stored()
    assert engine.finished() == [(1, True, None)]


def looked_up(engine: Engine, context: ReqContext, keys: list[Any], *states: KeyState) -> None:
    engine.lookup(context, keys)
    engine.step()
    engine.client.last("lookup").found(*states)
    engine.lookup(context, keys)


@pytest.mark.parametrize("finished", [False, True])
def test_blocks_that_the_server_reported_absent_are_put_without_a_second_lookup(
    engine: Engine, finished: bool
):
    context, keys = engine.request("r", 4)
    looked_up(engine, context, keys[:3], READABLE, ABSENT, ABSENT)
    if finished:
        engine.tier.on_request_finished(context)
    engine.tier.submit_store(engine.job(context, keys[1:], [4, 5, 6]))
    assert engine.client.count("lookup") == 1
    assert engine.client.last("put").keys == keys[1:], "with the one that the engine has generated"
    engine.client.last("put").stored()
    assert engine.finished() == [(1, True, None)]


@pytest.mark.parametrize("states", [[READABLE] * 2, [READABLE, ABSENT], [PENDING, ABSENT]])
def test_blocks_that_may_exist_are_looked_up_before_their_bytes_are_sent(
    engine: Engine, states: list[KeyState]
):
    context, keys = engine.request("r", 2)
    looked_up(engine, context, keys, *states)
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert (engine.client.count("lookup"), engine.client.count("put")) == (2, 0)


def test_what_was_absent_under_the_old_weights_is_looked_up(engine: Engine):
    context, keys = engine.request("r", 2)
    looked_up(engine, context, keys, ABSENT, ABSENT)
    engine.tier.on_request_finished(context)
    engine.tier.drain_jobs()
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert (engine.client.count("lookup"), engine.client.count("put")) == (2, 0)


def test_states_of_finished_requests_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookups, "MOST_PAST", 1)
    contexts = []
    for name in ("first", "second"):
        context, keys = engine.request(name, 2)
        looked_up(engine, context, keys, ABSENT, ABSENT)
        engine.tier.on_request_finished(context)
        contexts.append(context)
    for context in contexts:
        engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert [asked.operation for asked in engine.client.asked[2:]] == ["lookup", "put"]


def test_puts_pin_at_most_a_quarter_of_the_pool_and_the_rest_is_declined(engine: Engine):
    """40 rows: puts may pin 10."""
    context, keys = engine.request("r", 16)
    engine.tier.submit_store(engine.job(context, keys[:6], range(6)))
    engine.tier.submit_store(engine.job(context, keys[6:16], range(6, 16)))
    assert [len(a.keys) for a in engine.client.asked] == [6, 4]
    assert engine.counted(metrics.DECLINED_BLOCKS, "pinned_rows") == 6
    engine.tier.submit_store(engine.job(context, keys[:1], [20]))
    assert engine.finished() == [(3, True, None)], "declined at once, nothing stays pinned"
    engine.client.reply_to_all()
    assert [job for job, _, _ in engine.finished()] == [1, 2]
    engine.tier.submit_store(engine.job(context, keys[:1], [20]))
    assert engine.client.last("lookup").keys == keys[:1]


def test_a_request_with_a_lora_adapter_keeps_to_the_pool(engine: Engine):
    context, keys = engine.request("r", 2, **{BYPASS_KEY: Bypass.LORA})
    assert engine.lookup(context, keys) == ["MISS"] * 2
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert engine.finished() == [(1, True, None)]
    assert engine.client.asked == []
    assert engine.counted(metrics.DECLINED_BLOCKS, "lora") == 2


def test_a_reset_ends_every_job_and_leaves_the_old_namespace(engine: Engine):
    context, keys = engine.request("r", 6)
    engine.tier.submit_load(engine.job(context, keys[:2], [0, 1]))
    engine.tier.submit_store(engine.job(context, keys[2:4], [2, 3]))
    engine.tier.submit_store(engine.job(context, keys[4:], [4, 5]))
    engine.client.asked[1].found(ABSENT, ABSENT)  # the first store is being put, the other asks
    before = engine.client.declared[-1]
    engine.tier.drain_jobs()
    assert sorted(job for job, _, _ in engine.finished()) == [1, 2, 3]
    after = engine.client.declared[-1]
    assert after[0] != before[0] and "weight_epoch" in after[2]
    assert engine.client.forgotten == [before[0]]
    engine.lookup(context, keys)
    engine.step()
    assert engine.client.last("lookup").namespace == after[0]


def test_what_came_back_wrong_is_counted_by_reason(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """And every reason is one that the client really counts."""
    counted = {name: n for n, name in enumerate(metrics.INTEGRITY_REASONS, 1)}
    assert counted.keys() <= new_counters().keys()
    monkeypatch.setattr(engine.client, "counters", lambda: new_counters() | counted)
    for _ in range(2):
        engine.collect()
    totals = {
        label: n
        for (name, label), n in engine.tier.counters.totals().items()
        if name == metrics.INTEGRITY
    }
    reasons = ("checksum", "identity", "length", "short", "epoch", "expired")
    assert totals == dict(zip(reasons, range(1, 7), strict=True))


def test_what_a_load_a_put_and_a_lookup_took_and_what_is_under_way_are_metrics(engine: Engine):
    context, keys = engine.ask("r", 2)
    engine.clock.now += 0.25
    engine.client.last("lookup").found(READABLE, READABLE)
    engine.lookup(context, keys)
    engine.step()
    engine.tier.submit_load(engine.job(context, keys, [0, 1]))
    engine.tier.submit_store(engine.job(context, keys, [2, 3]))
    engine.client.queued_bytes = 12
    engine.client.breaker = BreakerState.OPEN
    seen = engine.collect()
    assert seen[metrics.LOOKUP_DURATION][()] == [0.25]
    assert [seen[name][()] for name in (metrics.OPEN_LOADS, metrics.OPEN_PUTS)] == [1, 1]
    assert [seen[name][()] for name in (metrics.PINNED_ROWS, metrics.QUEUED_BYTES)] == [2, 12]
    assert seen[metrics.BREAKER_STATE][("",)] == 2
    engine.clock.now += 0.5
    engine.client.last("get").landed(0, 1)
    engine.clock.now += 1.0
    engine.client.last("lookup").found(ABSENT, ABSENT)
    engine.client.last("put").stored()
    assert len(engine.finished()) == 2
    seen = engine.collect()
    assert seen[metrics.LOAD_DURATION][()] == [0.5]
    assert seen[metrics.PUT_DURATION][()] == [1.5]
    assert [seen[name][()] for name in (metrics.OPEN_LOADS, metrics.OPEN_PUTS)] == [0, 0]
    assert seen[metrics.PINNED_ROWS][()] == 0


def test_every_metric_that_is_reported_is_declared(engine: Engine):
    context, keys = engine.ask("r", 2, READABLE, ABSENT)
    engine.lookup(context, keys)
    engine.step()
    engine.tier.submit_load(engine.job(context, keys, [0, 1]))
    engine.client.last("get").landed(0)
    engine.tier.submit_store(engine.job(context, keys, [2, 3]))
    seen = engine.collect()
    for name, values in seen.items():
        for labels in values:
            assert len(labels) == len(metrics.METRICS[name].labelnames), name
    assert {metrics.HIT_BLOCKS, metrics.LOADED_BYTES} <= set(seen)
