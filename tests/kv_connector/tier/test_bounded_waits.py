"""Bounded waits: of a request, of a row, of an engine that is to become idle."""

import pytest
from scripted_client import ScriptedClient
from tiered_engine import TieredEngine

from kv_connector.request_options import PREFETCH_KEY
from kv_connector.tier import metrics
from kv_connector.tier.lookup_state import UNTIL_A_QUERY_ENDS_S
from kv_connector.tier.patience import PRIOR_COMPUTE_S
from kv_connector.tier.transfers import OVERDUE_AFTER_CHECKS, OVERDUE_AFTER_S
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState

PRIOR_WAIT_S = 0.1 * PRIOR_COMPUTE_S


@pytest.fixture
def engine() -> TieredEngine:
    return TieredEngine()


def test_one_promotion_serves_every_request_that_waits_for_the_block(engine: TieredEngine):
    first, keys = engine.request("first", range(3))
    second, _ = engine.request("second", range(3))
    assert engine.lookup(first, keys) == engine.lookup(second, keys) == ["RETRY"] * 3
    engine.step()
    engine.client.reply_to_all()
    assert engine.lookup(first, keys) == engine.lookup(second, keys) == ["HIT_PENDING"] * 3
    engine.step()
    third, _ = engine.request("third", range(3))
    assert engine.lookup(third, keys) == ["HIT_PENDING"] * 3, "it does not even ask"
    assert (engine.client.count("get"), engine.client.count("lookup")) == (1, 2)
    engine.client.last("get").landed(0, 1, 2)
    engine.step()
    for context in (first, second, third):
        assert engine.lookup(context, keys) == ["HIT"] * 3
    engine.step()
    engine.check()


def test_a_promotion_that_fails_is_a_miss_for_all_who_waited_and_asked(engine: TieredEngine):
    first, keys = engine.request("first", [0])
    second, _ = engine.request("second", [0])
    late, _ = engine.request("late", [0])
    for context in (first, second):
        engine.lookup(context, keys)
    engine.step()
    engine.client.reply_to_all()
    engine.lookup(first, keys)
    engine.step()
    assert engine.lookup(late, keys) == ["HIT_PENDING"]
    engine.client.last("get").landed()
    engine.step()
    assert engine.lookup(first, keys) == engine.lookup(second, keys) == ["MISS"]
    assert engine.lookup(late, keys) == ["RETRY"], "it had only waited for others; it asks once"
    engine.step()
    engine.client.last("lookup").found(READABLE)
    engine.lookup(late, keys)
    engine.step()
    engine.client.last("get").landed()
    engine.step()
    assert engine.lookup(late, keys) == ["MISS"], "and no more"
    assert engine.client.count("get") == 2
    engine.check()


def test_a_lookup_that_is_never_answered_is_a_miss_when_the_budget_is_spent(engine: TieredEngine):
    context, keys = engine.request("r", range(3))
    for seconds in (0.0, PRIOR_WAIT_S, UNTIL_A_QUERY_ENDS_S):
        engine.clock.now += seconds
        assert engine.lookup(context, keys) == ["RETRY"] * 3
        engine.step()
    engine.clock.now += 0.01
    assert engine.lookup(context, keys) == ["MISS"] * 3
    assert engine.counted(metrics.MISSED_BLOCKS, "budget_spent") == 3
    assert not engine.manager.has_pending_work()


def test_a_request_that_prefetches_waits_for_the_longest_time(engine: TieredEngine):
    waits, keys = engine.request("r", range(3), **{PREFETCH_KEY: True})
    for seconds in (0.0, 2 * PRIOR_WAIT_S, 0.0, 0.0):
        engine.clock.now += seconds
        assert engine.lookup(waits, keys) == ["RETRY"] * 3
        engine.step()
    engine.clock.now += 5.0
    assert engine.lookup(waits, keys) == ["MISS"] * 3, "and no longer"
    engine.check()


@pytest.mark.parametrize("what", ["load", "store", "both"])
def test_a_transfer_that_the_client_never_ends_is_ended_once_the_client_is_gone(
    engine: TieredEngine, what: str
):
    context, keys = engine.request("r", range(2))
    if what != "store":
        engine.lookup(context, keys)
        engine.step()
        engine.client.last("lookup").found(READABLE, READABLE)
        engine.lookup(context, keys)
        engine.step()
    if what != "load":
        engine.compute("s", range(10, 12))
    engine.step()
    stuck = engine.client.asked[-1]
    told_to_close: list[bool] = []
    engine.client.close = lambda: told_to_close.append(True)
    engine.clock.now += 9.9 if what == "store" else PRIOR_COMPUTE_S + PRIOR_WAIT_S - 0.1
    step_for(engine, OVERDUE_AFTER_S)
    assert engine.manager.has_pending_work()
    assert not told_to_close

    step_for(engine, 1.0)
    engine.tier.transfers._closer.join(60)
    assert told_to_close == [True]
    engine.step()
    assert engine.manager.has_pending_work(), "until it has, its rows are nobody else's"

    engine.client.ready, engine.client.closed = False, True
    engine.step()
    assert not engine.manager.has_pending_work()
    assert engine.lookup(context, keys) == ["MISS"] * 2
    # It comes back to life: the job has been reported, and is not again.
    if stuck.operation == "get":
        stuck.landed(0, 1)
    else:
        stuck.found(READABLE, READABLE)
    for _ in range(3):
        engine.step()
    assert engine.hook_errors() == {(metrics.HOOK_ERRORS, "overdue"): 1}


def test_a_client_that_ends_its_jobs_while_it_is_closed_ends_them_once(engine: TieredEngine):
    engine.compute("a", range(3))
    engine.clock.now += 100.0

    def close() -> None:
        engine.client.cancel_all(0)
        ScriptedClient.close(engine.client)

    engine.client.close = close
    engine.client.ready = False
    step_for(engine, OVERDUE_AFTER_S + 1.0)
    engine.tier.transfers._closer.join(60)
    for _ in range(3):
        engine.step()
    assert not engine.manager.has_pending_work()


def test_an_engine_that_was_stopped_for_an_hour_keeps_its_server(engine: TieredEngine):
    """All deadlines have passed when it wakes, and the client has had no chance to meet them."""
    engine.compute("a", range(3))
    engine.step()
    engine.clock.now += 3600.0
    for _ in range(OVERDUE_AFTER_CHECKS):
        engine.step()
    engine.client.last("lookup").found(*[READABLE] * 3)
    step_for(engine, 2 * OVERDUE_AFTER_S)
    assert not engine.client.closed
    assert not engine.hook_errors()
    engine.check()


def step_for(engine: TieredEngine, seconds: float) -> None:
    """Steps of half a second."""
    for _ in range(round(2 * seconds)):
        engine.clock.now += 0.5
        engine.step()
