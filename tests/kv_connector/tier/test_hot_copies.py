"""A run that many engines load gets a second copy, made by one that has its rows in the pool."""

from typing import Any

import pytest
from scripted_client import TOKENS_PER_BLOCK, Clock, Engine
from scripted_fleet import fleet_engine, landed, pool_with

from kv_connector.tier import metrics
from kv_connector.tier.hot_copies import MOST_DUE, REST_S, HotCopies
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.transfer_ends import Ended, failed
from remote_server.client import PutResult
from remote_server.protocol import KeyState, PutOutcome

FIRST, NEXT = 1024 // TOKENS_PER_BLOCK, 2048 // TOKENS_PER_BLOCK
"""The rows that begin the second and the third run of a prompt."""


def engine_of(num_rows: int) -> Engine:
    """It has seen all servers."""
    engine = fleet_engine(num_rows, break_even=False)
    engine.tier.serve_external_requests(pool_with())
    return engine


@pytest.fixture
def engine() -> Engine:
    return engine_of(400)


def loaded(engine: Engine, first: int, last: int, *hot: int, name: str = "r") -> list[Any]:
    """A load of the rows first to last of a long prompt has ended. Gives all keys of the prompt."""
    context, keys = engine.request(name, NEXT + 8)
    engine.tier.submit_load(engine.job(context, keys[first:last], range(first, last)))
    landed(engine.client.last("get"), hot=[row - first for row in hot])
    engine.finished()
    return keys


def served(engine: Engine, *in_pool: bytes) -> None:
    engine.clock.now += 1.0
    engine.tier.serve_external_requests(pool_with(*in_pool))


def put_ends(engine: Engine, outcome: PutOutcome | None) -> None:
    put = engine.client.last("put")
    put.reply.set_result(PutResult(outcomes=[outcome] * len(put.keys)))
    engine.finished()


def test_all_rows_of_a_hot_run_that_are_in_the_pool_are_offered_without_a_lookup(engine: Engine):
    keys = loaded(engine, FIRST - 4, FIRST + 10, FIRST)
    served(engine, *keys[:-20])
    assert engine.client.count("lookup") == 0, "it would find the run"
    put = engine.client.last("put")
    assert put.hot and put.keys == keys[FIRST:-20]
    assert len(put.keys) > 14, "also those that were in the pool before the load"
    assert set(put.anchors) == {keys[FIRST]}
    assert [(one.start, one.rows) for one in put.chain] == [(1024, len(put.keys))]
    put_ends(engine, PutOutcome.CREATED)
    assert engine.counted(metrics.HOT_COPIES, "created") == len(put.keys)
    assert engine.counted(metrics.HOT_COPIES, "left_pool") == len(keys[FIRST:NEXT]) - len(put.keys)
    assert not engine.tier.has_pending_work()


def test_a_run_that_is_not_hot_is_not_copied(engine: Engine):
    keys = loaded(engine, 0, FIRST + 10)
    served(engine, *keys)
    assert engine.client.count("put") == 0 and not engine.tier.has_pending_work()


def test_what_no_server_holds_comes_first(engine: Engine):
    context, lost = engine.request("lost", 3)
    engine.client.ready = False
    engine.tier.submit_store(engine.job(context, lost, range(3)))
    engine.finished()
    engine.client.ready = True
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    assert engine.client.last("lookup").keys == lost
    engine.client.last("lookup").found(*[KeyState.ABSENT] * 3)
    assert engine.client.last("put").keys == lost and not engine.client.last("put").hot
    assert engine.tier.has_pending_work(), "an idle engine goes on with the copies"
    engine.client.last("put").stored()
    engine.finished()
    served(engine, *keys)
    assert engine.client.last("put").keys == keys[FIRST:NEXT]


def test_a_run_that_goes_on_being_hot_is_offered_once_a_minute(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    put_ends(engine, PutOutcome.EXISTED)
    assert engine.counted(metrics.HOT_COPIES, "existed") == NEXT - FIRST
    loaded(engine, FIRST, FIRST + 4, FIRST, name="again")
    served(engine, *keys)
    assert engine.client.count("put") == 1
    engine.clock.now += REST_S
    loaded(engine, FIRST, FIRST + 4, FIRST, name="later")
    served(engine, *keys)
    assert engine.client.count("put") == 2


def test_a_copy_that_fails_is_not_offered_again(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    put_ends(engine, None)
    assert engine.counted(metrics.HOT_COPIES, "failed") == NEXT - FIRST
    for _ in range(3):
        served(engine, *keys)
    assert engine.client.count("put") == 1 and not engine.tier.has_pending_work()


def test_a_long_run_is_copied_in_batches_at_the_pace_of_backfill():
    engine = engine_of(80)
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    sent: list[bytes] = []
    while engine.tier.has_pending_work():
        served(engine, *keys)
        put = engine.client.last("put")
        assert len(put.keys) <= 10, "of 20 rows that puts may pin, half"
        put_ends(engine, PutOutcome.CREATED)
        sent += put.keys
    assert sent == keys[FIRST:NEXT]


def test_a_weight_epoch_ends_all_copies(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    context, _ = engine.request("r2", NEXT)
    engine.tier.submit_load(engine.job(context, keys[:4], range(4)))
    engine.tier.enter_epoch("another")
    landed(engine.client.last("get"), hot=[0])
    engine.finished()
    served(engine, *keys)
    assert engine.client.count("put") == 0 and not engine.tier.has_pending_work()


def test_a_vllm_without_positions_copies_the_first_row_alone(engine: Engine):
    context, keys = engine.request("r", 4)
    del context._offload_key_positions
    context.get_offload_key_position = lambda _: None
    engine.tier.on_new_request(context)
    engine.tier.submit_load(engine.job(context, keys, range(4)))
    landed(engine.client.last("get"), hot=[0])
    engine.finished()
    served(engine, *keys)
    assert engine.client.last("put").keys == keys[:1] and engine.client.last("put").hot


def test_the_rows_that_wait_are_bounded():
    counters = TierCounters()
    hot = HotCopies(counters, Clock())
    anchors: Any = [b"%d" % number for number in range(MOST_DUE + 7)]
    hot.load_ended(Ended(failed(1), hot=anchors, is_load=True))
    assert len(hot) == MOST_DUE and list(hot.take(1)) == [b"7"]
    assert counters.totals()[metrics.HOT_COPIES, "overflow"] == 7
