"""After a reset nothing that the old weights computed reaches the pool or the server."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from modelless_engine import Make, ModellessEngine
from modelless_runner import TOKENS, right
from scripted_client import Clock
from tiered_engine import TieredEngine

from kv_connector.hooks.resets import ResetFlush
from kv_connector.tier import remote_tier
from kv_connector.vllm.features import let_promotions_go_on
from remote_server.protocol import KeyState

PROMPT = list(range(1, 4 * TOKENS + 2))
ELSE = list(range(5001, 5001 + 4 * TOKENS + 1))


@pytest.fixture
def engine(make: Make) -> Iterator[ModellessEngine]:
    engine = make()
    yield engine
    assert not engine.hook_errors()


def new_weights(engine: ModellessEngine) -> None:
    """An operator loads them and resets; the engine answers that it could not."""
    engine.load(2)
    assert not engine.reset()


def test_a_request_that_ran_at_a_reset_leaves_nothing_until_it_ends(engine: ModellessEngine):
    engine.add("one", PROMPT)
    engine.start("one")
    new_weights(engine)
    asked = len(engine.client.asked)
    engine.step(2 * TOKENS)
    engine.finish("one")
    assert engine.pool() == {}
    assert len(engine.client.asked) == asked


def test_a_request_that_waited_at_a_reset_is_stored_like_any_other(make: Make):
    engine = make(arguments={"max_num_seqs": 1})
    engine.add("one", PROMPT)
    two = engine.add("two", ELSE)
    engine.start("one")
    new_weights(engine)
    engine.finish("one")
    engine.start("two")
    engine.finish("two")
    assert engine.stored(two) == right(2, two.all_token_ids)
    assert len(engine.pool()) == 4


def test_a_block_that_was_computed_behind_an_old_one_is_as_old(engine: ModellessEngine):
    """Two mixes the weights; three finds the mixture and nothing of one's."""
    engine.add("one", PROMPT)
    engine.start("one")
    new_weights(engine)
    two = engine.add("two", PROMPT + ELSE)
    engine.start("two")
    mixed = engine.block(two, 6)
    engine.finish("one", "two")
    three = engine.add("three", PROMPT + ELSE + [9] * 70)
    engine.start("three")
    assert engine.block(three, 6) == mixed not in right(2, PROMPT + ELSE)
    engine.finish("three")
    assert engine.pool() == {}


def test_a_block_that_is_filled_anew_is_no_longer_old(make: Make):
    engine = make(num_blocks=14)
    engine.add("one", PROMPT)
    engine.start("one")
    new_weights(engine)
    engine.finish("one")
    for name in ("two", "three"):  # between them they take every block of the engine
        engine.add(name, [len(name)] * (6 * TOKENS + 1))
        engine.start(name)
        engine.finish(name)
    pool = engine.pool()
    four = engine.add("four", [len("two")] * (6 * TOKENS + 1) + ELSE)
    engine.start("four")
    engine.finish("four")
    assert len(pool) == 12
    assert engine.stored(four) == right(2, four.all_token_ids)
    assert not engine.connector._resets.kept_back._old


def test_a_request_that_is_preempted_is_computed_anew_and_stored(engine: ModellessEngine):
    one = engine.add("one", PROMPT)
    engine.start("one")
    new_weights(engine)
    assert engine.reset(running=True), "it takes the blocks from the request"
    engine.step(3)
    engine.finish("one")
    assert engine.stored(one) == right(2, one.all_token_ids)


def test_what_a_request_asked_for_itself_holds_again_once_it_is_not_old(engine: ModellessEngine):
    engine.add("one", PROMPT, kvferry={"store": False})
    engine.start("one")
    new_weights(engine)
    engine.reset(running=True)
    engine.step(3)
    engine.finish("one")
    assert engine.pool() == {}


def test_a_reset_that_emptied_the_engine_keeps_nobody_back(engine: ModellessEngine):
    engine.add("one", PROMPT)
    engine.start("one")
    engine.finish("one")
    engine.load(2)
    assert engine.reset()
    two = engine.add("two", PROMPT)
    engine.start("two")
    engine.finish("two")
    assert engine.stored(two) == right(2, two.all_token_ids)
    assert ("kvferry_kept_back_requests", "old_kv") not in engine.totals()


def test_requests_that_are_kept_back_are_counted_once(engine: ModellessEngine):
    engine.add("one", PROMPT)
    engine.add("two", ELSE)
    engine.start("one", "two")
    new_weights(engine)
    new_weights(engine)
    assert engine.totals()["kvferry_kept_back_requests", "old_kv"] == 2


# ── copies under way at a reset ──────────────────────────────────────────────────────────────


def test_a_copy_that_a_reset_found_under_way_does_not_land_in_a_promoted_row(make: Make):
    """Two batches are under way, as with pipeline stages: one has the order to end the copies,
    when the next one is scheduled."""
    engine = make(watched=False)
    engine.add("one", PROMPT)
    engine.start("one")
    engine.abort("one")
    assert engine.connector.scheduler._jobs, "its blocks are copied in the next step"
    engine.load(2)
    assert engine.reset()
    two = engine.add("two", ELSE)
    flushing = engine.schedule()
    engine.client.last("lookup").found(*[KeyState.READABLE] * 4)
    ahead = engine.schedule()
    send_what_is_asked_for(engine)
    engine.execute(flushing)
    engine.execute(ahead)
    while not two.num_output_tokens:
        send_what_is_asked_for(engine)
        engine.step()
    assert [engine.block(two, i) for i in range(4)] == right(2, ELSE)
    assert engine.client.count("get") == 1


def send_what_is_asked_for(engine: ModellessEngine) -> None:
    contents = engine.runner.computed_elsewhere(ELSE, 2)
    for asked in engine.client.open:
        if asked.operation == "get":
            for row, content in zip(asked.rows, contents, strict=True):
                row[:] = content.to_bytes(8, "little") * (len(row) // 8)
            asked.landed(*range(4))


def test_loads_wait_a_bounded_time_for_copies_of_before_a_reset(make: Make, clock: Clock):
    """A worker that does not report them must not defer requests for ever."""
    engine = make(max_wait_ms=1000, patience=1000, watched=False)
    engine.add("one", PROMPT)
    engine.start("one")
    engine.abort("one")
    assert engine.reset()
    two = engine.add("two", ELSE)
    engine.schedule()
    engine.client.last("lookup").found(*[KeyState.READABLE] * 4)
    clock.now += 1.1
    engine.execute(engine.schedule())
    assert two.num_output_tokens and engine.client.count("get") == 0
    assert engine.totals()["kvferry_missed_blocks", "pool_busy"] == 1


def test_an_operator_may_reset_again_before_the_next_step(engine: ModellessEngine):
    """After `false` that is what one does. vLLM asserts that its order to end copies has left."""
    engine.add("one", PROMPT)
    engine.start("one")
    new_weights(engine)
    new_weights(engine)
    meta: Any = engine.schedule().kv_connector_metadata
    assert meta.jobs_to_flush


def test_a_bare_tier_loads_again_when_every_step_that_was_scheduled_ahead_has_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """It does not learn what the workers report. With one stage two steps are under way at most."""
    monkeypatch.setattr(remote_tier, "bare_facts", lambda *_: ("mine", {}))
    engine = TieredEngine(bare=True)
    engine.manager.reset_cache()
    let_promotions_go_on(engine.manager)  # vLLM 0.33 holds them itself, and sees the reports
    one, keys = engine.request("one", [1])
    looks = []
    for _ in range(4):
        looks += engine.lookup(one, keys)
        engine.step()
        engine.client.reply_to_all()
    assert looks == ["RETRY", "RETRY", "RETRY", "HIT_PENDING"]


def test_copies_from_before_a_reset_have_ended_when_every_worker_has_reported_each():
    """Workers run at their own pace: one may still copy when another one has reported."""
    flush = ResetFlush()
    scheduler: Any = SimpleNamespace(
        _jobs={3: SimpleNamespace(pending_count=2), 4: SimpleNamespace(pending_count=1)}
    )
    flush.begin(scheduler)
    assert not flush.completed({3: 1, 9: 2}) and flush
    scheduler._jobs = {5: SimpleNamespace(pending_count=2)}
    flush.begin(scheduler)  # reset again
    assert not flush.completed({3: 1, 4: 1}) and flush
    assert flush.completed({5: 2}) and not flush
    assert not flush.completed({5: 2}), "no loads are held any more"
