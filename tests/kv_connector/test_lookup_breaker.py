"""A server that answers, but lookups always too late, makes a few requests wait and no more."""

import pytest
from scripted_client import Clock, Engine

from kv_connector import metrics
from kv_connector.patience import PRIOR_COMPUTE_S
from remote_server.client.lookup_breaker import (
    FIRST_PAUSE_S,
    LATE_IN_A_ROW,
    LONGEST_PAUSE_S,
    LookupBreaker,
)
from remote_server.client.session import ONE_STALL_S
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import KeyState

WAIT_S = 0.1 * PRIOR_COMPUTE_S


def ask(engine: Engine, name: str) -> list[str]:
    """A request looks up its two blocks, and the step ends."""
    found = engine.lookup(*engine.request(name, 2))
    engine.step()
    return found


def fail_lookups(engine: Engine, number: int = LATE_IN_A_ROW, *, silent: bool = False) -> None:
    """Lookups that are late, one after the other. Their replies come afterwards, unless the server
    is `silent`."""
    for i in range(number):
        assert ask(engine, f"late {i}") == ["RETRY"] * 2
        late = engine.client.last("lookup")
        engine.clock.now += WAIT_S
        late.reply.set_exception(DeadlineExceeded("late"))
        engine.step()
        if not silent:
            engine.clock.now += 0.01
            late.found(KeyState.ABSENT, KeyState.ABSENT)
            engine.step()
            if i + 1 < number and engine.client.last("lookup") is not late:
                engine.client.last("lookup").reply.set_exception(DeadlineExceeded("late"))
                engine.step()


def test_after_a_few_late_lookups_in_a_row_requests_are_misses_at_once(engine: Engine):
    fail_lookups(engine)
    asked = engine.client.count("lookup")
    assert ask(engine, "next") == ["MISS"] * 2
    assert engine.client.count("lookup") <= asked + 1, "a probe at most"
    assert engine.counted(metrics.MISSED_BLOCKS, "lookup_paused") == 2
    assert engine.collect()[metrics.LOOKUPS_PAUSED][()] == 1


def test_after_one_late_lookup_of_a_silent_server_requests_are_misses_at_once(engine: Engine):
    fail_lookups(engine, 1, silent=True)
    asked = engine.client.count("lookup")
    assert ask(engine, "next") == ["MISS"] * 2
    assert engine.client.count("lookup") == asked, "nothing is sent for it"
    assert engine.counted(metrics.MISSED_BLOCKS, "lookup_paused") == 2


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


def test_a_server_that_is_late_for_short_prompts_is_asked_for_long_ones():
    clock = Clock()
    breaker = LookupBreaker(clock)
    for _ in range(LATE_IN_A_ROW):
        sent_s, clock.now = clock.now, clock.now + 0.1
        breaker.ended(in_time=False, sent_s=sent_s)
        clock.now += 0.2
        breaker.replied_late(0.3)
    clock.now += ONE_STALL_S
    assert breaker.paused
    assert [breaker.left_s(wait_s) for wait_s in (0.1, 0.3, 0.4, 5.0)] == [0.0, 0.0, 0.4, 5.0]
    breaker.probed(in_time=True)
    assert breaker.left_s(0.1) == 0.1


def test_an_answer_in_time_starts_the_count_again(engine: Engine):
    fail_lookups(engine, LATE_IN_A_ROW - 1)
    ask(engine, "well")
    engine.client.last("lookup").found(KeyState.ABSENT, KeyState.ABSENT)
    fail_lookups(engine, LATE_IN_A_ROW - 1)
    assert ask(engine, "next") == ["RETRY"] * 2


def test_one_key_is_asked_for_nobody_and_an_answer_in_time_ends_the_pause(engine: Engine):
    fail_lookups(engine, 1, silent=True)
    assert ask(engine, "paused") == ["MISS"] * 2
    engine.clock.now += FIRST_PAUSE_S
    asked = engine.client.count("lookup")
    assert ask(engine, "still paused") == ["MISS"] * 2, "it does not wait for the answer"
    for _ in range(3):
        engine.step()
    assert engine.client.count("lookup") == asked + 1, "one at a time"
    assert len(engine.client.last("lookup").keys) == 1
    engine.client.last("lookup").found(KeyState.ABSENT)
    engine.step()
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_pause_ends_by_a_probe_also_when_no_request_comes(engine: Engine):
    """An engine that computes answers takes steps. Its next prompt is not a miss for a server that
    has been in time again for long."""
    fail_lookups(engine, 1, silent=True)
    asked = engine.client.count("lookup")
    engine.clock.now += FIRST_PAUSE_S
    engine.step()
    assert engine.client.count("lookup") == asked + 1
    engine.client.last("lookup").found(KeyState.ABSENT)
    engine.step()
    assert ask(engine, "next") == ["RETRY"] * 2


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), ServerUnavailable("gone")])
def test_a_probe_that_fails_makes_the_pause_longer(engine: Engine, error: Exception):
    fail_lookups(engine, 1, silent=True)
    ask(engine, "paused")
    engine.clock.now += FIRST_PAUSE_S
    engine.step()
    engine.client.last("lookup").reply.set_exception(error)
    engine.step()
    asked = engine.client.count("lookup")
    engine.clock.now += 1.5 * FIRST_PAUSE_S
    assert ask(engine, "paused again") == ["MISS"] * 2
    assert engine.client.count("lookup") == asked
    engine.clock.now += 0.5 * FIRST_PAUSE_S
    engine.step()
    assert engine.client.count("lookup") == asked + 1


def test_a_reply_that_was_late_ends_a_silence_at_once(engine: Engine):
    """A server that stood still answers what it was asked as soon as it goes on."""
    fail_lookups(engine, 1, silent=True)
    late = engine.client.last("lookup")
    for _ in range(4):
        ask(engine, "paused")
        engine.clock.now += LONGEST_PAUSE_S
        engine.step()
        engine.client.last("lookup").reply.set_exception(DeadlineExceeded("late"))
        engine.step()
    assert ask(engine, "still paused") == ["MISS"] * 2
    late.found(KeyState.ABSENT, KeyState.ABSENT)
    engine.step()
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_server_that_was_away_and_came_back_is_asked_at_once(engine: Engine):
    fail_lookups(engine)
    engine.client.ready = False
    engine.tier.serve_external_requests(None)  # type: ignore[arg-type]
    engine.client.ready = True
    engine.tier.serve_external_requests(None)  # type: ignore[arg-type]
    assert ask(engine, "after") == ["RETRY"] * 2


def test_a_request_that_has_asked_before_the_pause_may_use_its_answer(engine: Engine):
    early, keys = engine.ask("early", 2)
    question = engine.client.last("lookup")
    fail_lookups(engine)
    assert engine.lookup(early, keys) == ["RETRY"] * 2
    question.found(KeyState.READABLE, KeyState.READABLE)
    assert engine.lookup(early, keys) == ["HIT"] * 2


def test_pauses_grow_to_a_limit_and_lookups_that_end_late_meanwhile_change_nothing():
    clock = Clock()
    pause = LookupBreaker(clock)
    for _ in range(LATE_IN_A_ROW):
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
