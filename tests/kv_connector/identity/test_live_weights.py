"""Weights that change in a running engine: no block of others is used or stored, and equal weights
have their blocks again."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from modelless_engine import Make, ModellessEngine
from modelless_runner import TOKENS, right

from kv_connector.identity import weight_watch
from kv_connector.identity.weight_epochs import MOST_STEPS_FOR_A_SAMPLE
from remote_server.protocol import KeyState

PROMPT = list(range(1, 4 * TOKENS + 2))
ELSE = list(range(5001, 5001 + 4 * TOKENS + 1))


@pytest.fixture(autouse=True)
def _weights_are_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_watch, "PERIOD_S", 0.0)


@pytest.fixture
def engine(make: Make) -> Iterator[ModellessEngine]:
    engine = make()
    yield engine
    assert not engine.hook_errors()


def used(engine: ModellessEngine, name: str, prompt: list[int]) -> list[int | None]:
    """What lay in the blocks that a request ran on, which found none in the engine's cache."""
    assert engine.scheduler.reset_prefix_cache()
    request = engine.add(name, prompt)
    engine.start(name)
    found = [engine.block(request, i) for i in range(4)]
    engine.finish(name)
    return found


def namespace(engine: ModellessEngine) -> str:
    return engine.client.declared[-1][0]


def test_a_change_without_a_reset_empties_the_pool_and_begins_an_epoch(engine: ModellessEngine):
    assert used(engine, "one", PROMPT) == right(1, PROMPT)
    before = namespace(engine)
    engine.load(2)
    used(engine, "two", ELSE)
    assert namespace(engine) != before
    assert used(engine, "three", PROMPT) == right(2, PROMPT)
    assert engine.totals()["kvferry_weight_changes", ""] == 1


@pytest.mark.parametrize("server", [None, "tcp://127.0.0.1:1"])
def test_whoever_changes_the_weights_and_then_asks_gets_no_block_of_the_old_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch, server: str | None
):
    """The engine's own cache is reset, as by vLLM's default, and no second has passed."""
    monkeypatch.setattr(weight_watch, "PERIOD_S", 3600.0)
    engine = make(server=server)
    used(engine, "one", PROMPT)
    assert used(engine, "again", PROMPT) == right(1, PROMPT), "of the pool"
    engine.load(2)
    assert used(engine, "two", PROMPT) == right(2, PROMPT)


def put(engine: ModellessEngine, tokens: list[int]) -> set[str]:
    """The namespaces in which blocks of this prompt were put."""
    keys = {*engine.keys_of(tokens)}
    puts = [asked for asked in engine.client.asked if asked.operation == "put"]
    return {asked.namespace for asked in puts if not keys.isdisjoint(asked.keys)}


def settle(engine: ModellessEngine) -> None:
    """Step until no block waits to be stored."""
    while engine.connector._remote.transfers.num_unconfirmed:  # type: ignore[union-attr]
        engine.step()


def test_what_new_weights_compute_is_not_stored_under_the_name_of_the_old_ones(
    engine: ModellessEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_watch, "PERIOD_S", 3600.0)
    used(engine, "one", PROMPT)
    settle(engine)
    before = namespace(engine)
    assert put(engine, PROMPT) == {before}
    engine.load(2)
    used(engine, "two", ELSE)
    settle(engine)
    assert before not in put(engine, ELSE)


def test_what_no_sample_confirms_is_declined_and_keeps_no_row(
    engine: ModellessEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_watch.WeightWatch, "step", lambda *_: None)
    used(engine, "one", PROMPT)
    engine.step(2 * MOST_STEPS_FOR_A_SAMPLE)
    assert not put(engine, PROMPT)
    assert engine.totals()["kvferry_declined_blocks", "weights_unknown"] >= 4
    assert not engine.connector._remote.transfers.num_pinned_rows  # type: ignore[union-attr]


def test_a_request_whose_worker_samples_no_weights_any_more_is_computed(
    engine: ModellessEngine, monkeypatch: pytest.MonkeyPatch
):
    assert used(engine, "one", PROMPT) == right(1, PROMPT)
    monkeypatch.setattr(weight_watch.WeightWatch, "step", lambda *_: None)
    assert used(engine, "two", PROMPT) == right(1, PROMPT)
    assert engine.totals()["kvferry_kept_back_requests", "weights_unknown"] == 1


def test_the_pool_alone_is_emptied_too(make: Make):
    engine = make(server=None)
    used(engine, "one", PROMPT)
    engine.load(2)
    used(engine, "two", ELSE)
    assert used(engine, "three", PROMPT) == right(2, PROMPT)


def test_equal_weights_after_sleep_and_wake_have_the_old_name(engine: ModellessEngine):
    """vLLM resets before it sleeps. The first request waits for the name, and then hits."""
    used(engine, "one", PROMPT)
    before = namespace(engine)
    assert engine.reset(running=True)
    sent = len(engine.client.asked)
    two = engine.add("two", PROMPT)
    while not (asked := engine.client.asked[sent:]):
        engine.execute(engine.schedule())
    assert not two.num_computed_tokens, "it waited"
    assert namespace(engine) == before == asked[0].namespace
    asked[0].found(*[KeyState.READABLE] * 4)
    while not (asked := engine.client.asked[sent + 1 :]):
        engine.execute(engine.schedule())
    assert asked[0].operation == "get" and asked[0].namespace == before


def test_a_request_waits_until_the_server_has_welcomed_the_name_that_is_right_again(
    engine: ModellessEngine, monkeypatch: pytest.MonkeyPatch
):
    used(engine, "one", PROMPT)
    before = namespace(engine)
    engine.reset(running=True)
    declare = engine.client.declare

    def declared(name: str, *words: Any) -> None:
        declare(name, *words)
        engine.client.ready = False  # as a real one, until the hello is answered

    monkeypatch.setattr(engine.client, "declare", declared)
    two = engine.add("two", PROMPT)
    while namespace(engine) != before:
        engine.execute(engine.schedule())
    sent = len(engine.client.asked)
    for _ in range(3):
        engine.execute(engine.schedule())
    assert not two.num_computed_tokens, "it waited"
    engine.client.ready = True
    while not (asked := engine.client.asked[sent:]):
        engine.execute(engine.schedule())
    assert asked[0].operation == "lookup" and asked[0].namespace == before


def test_weights_are_touched_in_steps_only_that_the_engine_is_awake_in(engine: ModellessEngine):
    """A step that computes nothing may be one of an engine that sleeps."""
    used(engine, "one", PROMPT)
    settle(engine)
    look = lambda: engine.schedule().kv_connector_metadata.sample_request  # type: ignore[union-attr]  # noqa: E731
    assert look() is None
    engine.reset()
    assert look() is None
    engine.add("two", PROMPT)
    assert (look() or 0) > 0, "a request is looked up"


def test_a_pool_that_cannot_be_emptied_at_once_is_used_by_nobody_until_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    """vLLM asserts that transfers have ended, and some may not have within the time for that."""
    engine = make()
    used(engine, "one", PROMPT)
    empty = engine.manager.reset_cache
    fails = MagicMock(side_effect=AssertionError("jobs"))
    monkeypatch.setattr(engine.manager, "reset_cache", fails)
    engine.load(2)
    engine.add("two", ELSE)
    engine.start("two")
    assert used_beside(engine, "three", PROMPT) == right(2, PROMPT)
    monkeypatch.setattr(engine.manager, "reset_cache", empty)
    engine.step()
    assert engine.pool() == {}
    engine.finish("two", "three")
    assert engine.pool() == {}
    assert used(engine, "four", PROMPT) == right(2, PROMPT)
    assert used(engine, "five", PROMPT) == right(2, PROMPT)


def used_beside(engine: ModellessEngine, name: str, prompt: list[int]) -> list[int]:
    """As `used`, in an engine that runs other requests. Its cache does not know the prompt."""
    engine.scheduler.kv_cache_manager.block_pool.evict_blocks(set(range(1, 64)))
    request = engine.add(name, prompt)
    engine.start(name)
    return [engine.block(request, i) for i in range(4)]
