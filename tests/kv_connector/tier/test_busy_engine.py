"""An engine that is busy loses no hit, and a server that is late still loses them."""

import pytest
from scripted_client import Engine
from tiered_engine import TieredEngine
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kv_connector.tier import metrics, queries
from kv_connector.tier.lookup_state import MOST_LOADS_OF_A_KEY
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState
SLOW_STEP_S = 0.5


@pytest.mark.parametrize("steps_between_looks", [1, 40])
def test_a_block_that_the_server_holds_is_a_hit_however_late_the_engine_uses_the_answer(
    engine: Engine, steps_between_looks: int
):
    context, keys = engine.ask("r", 3, *[READABLE] * 3)
    for _ in range(MOST_LOADS_OF_A_KEY):
        for _ in range(steps_between_looks):
            engine.clock.now += SLOW_STEP_S
            engine.step()
        assert engine.lookup(context, keys) == ["HIT"] * 3


def test_a_row_that_left_the_pool_of_a_busy_engine_is_loaded_again_but_not_for_ever(engine: Engine):
    context, keys = engine.ask("r", 2, READABLE, READABLE)
    answers = []
    for _ in range(MOST_LOADS_OF_A_KEY + 1):
        engine.step()
        answers.append(engine.lookup(context, keys))
    assert answers == [["HIT"] * 2] * MOST_LOADS_OF_A_KEY + [["MISS"] * 2]
    assert engine.counted(metrics.MISSED_BLOCKS, "evicted_again") == 2


def test_a_block_that_another_engine_is_writing_is_waited_for_in_steps_that_ask(engine: Engine):
    """Half a minute in which the engine had no room, and three looks after it."""
    context, keys = engine.ask("r", 1, PENDING)
    for _ in range(60):
        engine.clock.now += SLOW_STEP_S
        engine.step()
    assert engine.lookup(context, keys) == ["RETRY"]
    engine.step()
    engine.client.last("lookup").found(PENDING)
    engine.clock.now += SLOW_STEP_S
    assert engine.lookup(context, keys) == ["MISS"], "now it was asked for, and owed"
    assert engine.counted(metrics.MISSED_BLOCKS, "budget_spent") == 1


def test_a_preempted_request_asks_again(engine: Engine):
    context, keys = engine.ask("r", 2, ABSENT, ABSENT)
    assert engine.lookup(context, keys) == ["MISS"] * 2
    engine.tier.on_schedule_end(engine.scheduled("r"))
    engine.tier.on_schedule_end(engine.preempted("r"))
    assert engine.lookup(context, keys) == ["RETRY"] * 2
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE)
    assert engine.lookup(context, keys) == ["HIT"] * 2


def test_a_miss_is_counted_once_however_often_the_engine_looks(engine: Engine):
    context, keys = engine.ask("r", 1, ABSENT)
    for _ in range(10):
        assert engine.lookup(context, keys) == ["MISS"]
        engine.step()
    assert engine.counted(metrics.MISSED_BLOCKS, "absent") == 1


def test_an_answer_to_a_question_from_before_a_reset_is_dropped(engine: Engine):
    context, keys = engine.ask("r", 1)
    old = engine.client.last("lookup")
    engine.tier.drain_jobs()
    assert engine.lookup(context, keys) == ["RETRY"]
    engine.step()
    assert engine.client.count("lookup") == 2 and old is not engine.client.last("lookup")
    if not old.reply.done():
        old.found(READABLE)
    assert engine.lookup(context, keys) == ["RETRY"]


# ── a server that was late, or away, for a moment ────────────────────────────────────────────


def be_late(engine: Engine) -> None:
    engine.client.last("lookup").reply.set_exception(DeadlineExceeded("late"))


def late_request(engine: Engine, num_keys: int) -> tuple[ReqContext, list[OffloadKey]]:
    """A request whose lookup has met its deadline since the engine's last step."""
    context, keys = engine.ask("r", num_keys)
    be_late(engine)
    return context, keys


def test_a_request_that_is_not_admitted_is_looked_up_again_after_a_late_answer(engine: Engine):
    """And while it is, an engine that has a place for it waits for nothing."""
    context, keys = late_request(engine, 3)
    assert engine.lookup(context, keys) == ["MISS"] * 3
    engine.step()
    assert engine.client.count("lookup") == 2
    assert not engine.tier.still_waits("r")
    assert engine.lookup(context, keys) == ["MISS"] * 3, "until the answer is here"
    engine.step()
    assert engine.client.count("lookup") == 2, "one is under way"
    engine.client.last("lookup").found(READABLE, READABLE, ABSENT)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "MISS"]
    engine.step()
    assert engine.client.count("lookup") == 2
    assert engine.counted(metrics.MISSED_BLOCKS, "lookup_late") == 3


def test_a_reply_that_came_after_its_deadline_and_before_the_next_lookup_is_used(engine: Engine):
    """The engine was in a step meanwhile: it could not have used a sooner one sooner."""
    context, keys = late_request(engine, 3)
    engine.client.last("lookup").found(READABLE, READABLE, ABSENT)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "MISS"]
    assert (metrics.MISSED_BLOCKS, "lookup_late") not in engine.tier.counters.totals()
    engine.step()
    assert engine.client.count("lookup") == 1


@pytest.mark.parametrize("has_room", [True, False])
def test_a_late_answer_is_asked_for_again_unless_the_request_was_scheduled(
    engine: Engine, has_room: bool
):
    """Without room in the engine's KV cache vLLM has its answer, and schedules nothing."""
    context, keys = late_request(engine, 3)
    assert engine.lookup(context, keys) == ["MISS"] * 3
    engine.tier.admitted("r", [])
    if has_room:
        engine.tier.on_schedule_end(engine.scheduled("r"))
    engine.step()
    assert engine.client.count("lookup") == (1 if has_room else 2)


def test_second_lookups_leave_room_for_first_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "MOST_KEYS_UNDER_WAY", 5)
    late = [engine.request(f"late {number}", 3) for number in range(3)]
    for context, keys in late:
        engine.lookup(context, keys)
        engine.step()
        be_late(engine)
        engine.lookup(context, keys)
    before = engine.client.count("lookup")
    for _ in range(4):
        engine.step()
    assert engine.client.count("lookup") == before + 1, "three keys are under way, five may be"


def test_a_server_that_stays_late_gets_one_lookup_at_a_time_of_a_queued_request(engine: Engine):
    context, keys = engine.request("r", 1)
    engine.lookup(context, keys)
    for number in range(1, 6):
        engine.step()
        assert engine.client.count("lookup") == number
        be_late(engine)
        assert engine.lookup(context, keys) == ["MISS"]
        assert not engine.tier.still_waits("r")


def test_a_queued_request_that_came_during_an_outage_is_served_after_it(engine: Engine):
    context, keys = engine.request("r", 2)
    engine.client.ready = False
    assert engine.lookup(context, keys) == ["MISS"] * 2
    engine.step()
    assert engine.client.count("lookup") == 0
    engine.client.ready = True
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE)
    assert engine.lookup(context, keys) == ["HIT"] * 2


def test_a_block_that_is_written_for_longer_than_the_budget_is_used_once_it_is_there(
    engine: Engine,
):
    context, keys = engine.request("r", 1)
    engine.lookup(context, keys)
    for _ in range(3):
        engine.step()
        engine.client.last("lookup").found(PENDING)
        engine.clock.now += SLOW_STEP_S
        answer = engine.lookup(context, keys)
    assert answer == ["MISS"]
    engine.step()
    engine.client.last("lookup").found(READABLE)
    assert engine.lookup(context, keys) == ["HIT"]


def test_what_was_looked_up_again_before_a_preemption_is_dropped(engine: Engine):
    context, keys = late_request(engine, 1)
    engine.lookup(context, keys)
    engine.step()
    old = engine.client.last("lookup")
    engine.tier.on_schedule_end(engine.preempted("r"))
    old.found(READABLE)
    assert engine.lookup(context, keys) == ["RETRY"]


# ── waiting without a walk over the keys ─────────────────────────────────────────────────


def test_a_request_waits_without_a_walk_until_its_answer_is_here(engine: Engine):
    context, keys = engine.request("r", 3)
    assert not engine.tier.still_waits("r"), "it has not asked yet"
    engine.lookup(context, keys)
    engine.step()
    for _ in range(3):
        assert engine.tier.still_waits("r")
        engine.step()
    engine.client.last("lookup").found(READABLE, READABLE, ABSENT)
    assert not engine.tier.still_waits("r")


def test_a_request_waits_without_a_walk_while_a_load_brings_one_of_its_keys():
    engine = TieredEngine(break_even=False)
    loader, keys = engine.request("loader", range(4))
    sharer, longer = engine.request("sharer", range(6))
    for context, prompt in ((loader, keys), (sharer, longer)):
        engine.lookup(context, prompt)
        engine.tier.deferred(context.req_id, prompt)
    engine.step()
    engine.client.reply_to_all()
    for context, prompt in ((loader, keys), (sharer, longer)):
        assert not engine.tier.still_waits(context.req_id)
        assert set(engine.lookup(context, prompt)) == {"HIT_PENDING"}
        engine.tier.deferred(context.req_id, prompt)
    engine.step()  # vLLM submits the loads of a step at its end
    assert engine.tier.still_waits("loader") and engine.tier.still_waits("sharer")
    engine.client.reply_to_all()
    assert not engine.tier.still_waits("loader") and not engine.tier.still_waits("sharer")
    assert engine.lookup(loader, keys) == ["HIT"] * 4
    assert engine.lookup(sharer, longer) == ["HIT"] * 6
    engine.step("loader", "sharer")
    engine.check()


def test_long_prompts_are_asked_for_in_turn_without_a_walk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "MOST_KEYS_UNDER_WAY", 10)
    engine = Engine(num_rows=100)
    names = [f"r{n}" for n in range(6)]
    for name in names:
        engine.lookup(*engine.request(name, 5))
    asked = []
    for _ in range(3):
        engine.clock.now += 1.0
        engine.step()
        asked.append(engine.client.count("lookup"))
        assert engine.tier.still_waits("r5"), "it has its turn, and the server owes it nothing"
        engine.client.reply_to_all()
    assert asked == [2, 4, 6]
    assert all(not engine.tier.still_waits(name) for name in names)
    assert engine.counted(metrics.MISSED_BLOCKS, "budget_spent") == 0


# ── more prompts than the pool holds ─────────────────────────────────────────────────────


def test_more_prompts_than_the_pool_holds_are_all_served_whole_one_after_the_other():
    """Twelve prompts of ten rows, a pool of forty: 30 rows are for loads. Every prompt has all
    of its rows when it is admitted, and each block crosses the link once."""
    engine = TieredEngine(num_rows=40, break_even=False)
    waiting = {f"r{n}": engine.request(f"r{n}", range(10 * n, 10 * n + 10)) for n in range(12)}
    hits = 0
    for _ in range(200):
        admitted = []
        for name, (context, keys) in list(waiting.items()):
            if engine.tier.still_waits(name):
                continue
            found = engine.lookup(context, keys)
            if {"RETRY", "HIT_PENDING"} & set(found):
                engine.tier.deferred(name, keys)
                continue
            engine.tier.admitted(name, keys)
            hits += found.count("HIT")
            admitted.append(name)
            del waiting[name]
            if len(admitted) == 2:  # the engine takes two at a time
                break
        engine.step(*admitted)
        engine.client.reply_to_all()
        engine.clock.now += SLOW_STEP_S
        if not waiting:
            break
    assert not waiting
    assert hits == 120
    loaded = [
        key for asked in engine.client.asked if asked.operation == "get" for key in asked.keys
    ]
    assert len(loaded) == len(set(loaded)) == 120
