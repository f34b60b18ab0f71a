"""A server that is silent, or late, makes one request wait, and later ones only where it may be in
time for them."""

import pytest
from scripted_client import Clock, Engine

from kv_connector.tier import metrics
from kv_connector.tier.patience import PRIOR_COMPUTE_S
from remote_server.client import GetOutcome, GetResult
from remote_server.client.connection.lookup_breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LookupBreaker,
)
from remote_server.errors import DeadlineExceeded, ServerUnavailable, Stalled
from remote_server.protocol import KeyState

WAIT_S = 0.1 * PRIOR_COMPUTE_S


def ask(engine: Engine, name: str) -> list[str]:
    """A request looks up its two blocks, and the step ends."""
    found = engine.lookup(*engine.request(name, 2))
    engine.step()
    return found


def fail_lookup(engine: Engine) -> None:
    """A lookup that is late, and nothing comes after it."""
    assert ask(engine, "late") == ["RETRY"] * 2
    engine.clock.now += WAIT_S
    engine.client.last("lookup").reply.set_exception(DeadlineExceeded("late"))
    engine.step()


def num_asked(engine: Engine) -> int:
    return engine.client.count("lookup")


def test_after_one_late_lookup_requests_are_misses_at_once(engine: Engine):
    fail_lookup(engine)
    asked = num_asked(engine)
    assert ask(engine, "next") == ["MISS"] * 2
    assert num_asked(engine) == asked, "nothing is sent for it"
    assert engine.counted(metrics.MISSED_BLOCKS, "lookup_paused") == 2
    assert engine.collect()[metrics.LOOKUPS_PAUSED][()] == 1


def test_a_load_for_which_nothing_comes_is_silence_too(engine: Engine):
    context, keys = engine.ask("r", 2, KeyState.READABLE, KeyState.READABLE)
    engine.lookup(context, keys)
    engine.tier.submit_load(engine.job(context, keys, range(2)))
    engine.clock.now += WAIT_S
    late = GetResult([], [GetOutcome.LATE] * 2, error=Stalled("nothing came"))
    engine.client.last("get").reply.set_result(late)
    engine.finished()
    assert ask(engine, "next") == ["MISS"] * 2
    assert engine.counted(metrics.MISSED_BLOCKS, "lookup_paused") == 2
    asked = num_asked(engine)
    engine.clock.now += FIRST_PAUSE_S
    engine.step()
    assert num_asked(engine) == asked + 1, "and a probe ends it"
    engine.client.last("lookup").found(KeyState.READABLE)
    engine.step()
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_load_that_its_caller_cancels_is_no_silence(engine: Engine):
    context, keys = engine.ask("r", 2, KeyState.READABLE, KeyState.READABLE)
    engine.lookup(context, keys)
    engine.tier.submit_load(engine.job(context, keys, range(2)))
    cancelled = GetResult([], [GetOutcome.LATE] * 2, error=DeadlineExceeded("cancelled"))
    engine.client.last("get").reply.set_result(cancelled)
    engine.finished()
    assert ask(engine, "next") == ["RETRY"] * 2


def test_a_burst_that_is_late_is_one_silence(engine: Engine):
    burst = [engine.request(f"late {i}", 2) for i in range(5)]
    for context, keys in burst:
        engine.lookup(context, keys)
    engine.step()
    engine.clock.now += WAIT_S
    questions = [asked for asked in engine.client.asked if asked.operation == "lookup"]
    for question in questions[:-1]:
        question.reply.set_exception(DeadlineExceeded("late"))
    engine.step()
    assert ask(engine, "next") == ["MISS"] * 2
    questions[-1].found(KeyState.ABSENT, KeyState.ABSENT)
    engine.step()
    assert ask(engine, "after a reply") == ["RETRY"] * 2


def test_one_key_is_asked_for_nobody_and_an_answer_in_time_ends_the_pause(engine: Engine):
    fail_lookup(engine)
    assert ask(engine, "paused") == ["MISS"] * 2
    engine.clock.now += FIRST_PAUSE_S
    asked = num_asked(engine)
    assert ask(engine, "still paused") == ["MISS"] * 2, "it does not wait for the answer"
    for _ in range(3):
        engine.step()
    assert num_asked(engine) == asked + 1, "one at a time"
    assert len(engine.client.last("lookup").keys) == 1
    engine.client.last("lookup").found(KeyState.ABSENT)
    engine.step()
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_pause_ends_by_a_probe_also_when_no_request_comes(engine: Engine):
    """An engine that computes answers takes steps. Its next prompt is not a miss for a server that
    has been in time again for long."""
    fail_lookup(engine)
    asked = num_asked(engine)
    engine.clock.now += FIRST_PAUSE_S
    engine.step()
    assert num_asked(engine) == asked + 1
    engine.client.last("lookup").found(KeyState.ABSENT)
    engine.step()
    assert ask(engine, "next") == ["RETRY"] * 2


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), ServerUnavailable("gone")])
def test_a_probe_that_fails_makes_the_pause_longer(engine: Engine, error: Exception):
    fail_lookup(engine)
    ask(engine, "paused")
    engine.clock.now += FIRST_PAUSE_S
    engine.step()
    engine.client.last("lookup").reply.set_exception(error)
    engine.step()
    asked = num_asked(engine)
    engine.clock.now += 1.5 * FIRST_PAUSE_S
    assert ask(engine, "paused again") == ["MISS"] * 2
    assert num_asked(engine) == asked
    engine.clock.now += 0.5 * FIRST_PAUSE_S
    engine.step()
    assert num_asked(engine) == asked + 1


def test_a_reply_that_was_late_has_the_server_probed_at_once(engine: Engine):
    """A server that stood still answers what it was asked as soon as it goes on."""
    fail_lookup(engine)
    (late, *_) = (asked for asked in engine.client.asked if asked.operation == "lookup")
    asked = num_asked(engine)
    late.found(KeyState.ABSENT, KeyState.ABSENT)
    engine.step()
    engine.step()
    assert num_asked(engine) == asked + 1
    engine.client.last("lookup").found(KeyState.ABSENT)
    engine.step()
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_server_that_was_away_and_came_back_is_asked_at_once(engine: Engine):
    fail_lookup(engine)
    engine.client.ready = False
    engine.tier.serve_external_requests(None)  # type: ignore[arg-type]
    engine.client.ready = True
    engine.tier.serve_external_requests(None)  # type: ignore[arg-type]
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_request_that_has_asked_before_the_pause_may_use_its_answer(engine: Engine):
    early, keys = engine.ask("early", 2)
    question = engine.client.last("lookup")
    fail_lookup(engine)
    assert engine.lookup(early, keys) == ["RETRY"] * 2
    question.found(KeyState.READABLE, KeyState.READABLE)
    assert engine.lookup(early, keys) == ["HIT"] * 2


def test_a_server_that_is_late_for_short_prompts_is_asked_for_long_ones():
    clock = Clock()
    breaker = LookupBreaker(clock)
    sent_s, clock.now = clock.now, clock.now + 0.1
    breaker.ended(in_time=False, sent_s=sent_s)
    assert [breaker.left_s(wait_s) for wait_s in (0.1, 5.0)] == pytest.approx([0.0, 4.9])
    clock.now += 0.2
    breaker.replied_late(0.3)
    assert [breaker.left_s(wait_s) for wait_s in (0.1, 0.3, 0.4, 5.0)] == [0.0, 0.0, 0.4, 5.0]
    breaker.probed(in_time=True)
    assert breaker.left_s(0.1) == 0.1


def test_pauses_grow_to_a_limit_and_lookups_that_end_late_meanwhile_change_nothing():
    clock = Clock()
    pause = LookupBreaker(clock)
    pause.ended(in_time=False, sent_s=clock.now - 1)
    lengths = []
    for _ in range(6):
        began = clock.now
        pause.ended(in_time=False, sent_s=clock.now - 1)
        while not pause.take_probe():
            clock.now += FIRST_PAUSE_S / 2
        lengths.append(clock.now - began)
        pause.probed(in_time=False)
    assert lengths == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert lengths[-1] == LONGEST_PAUSE_S
    pause.forget()
    assert not pause.paused and not pause.take_probe()
    pause.probed(in_time=False)
    assert not pause.paused, "a probe of before says nothing about now"
