"""One request asks once, waits within its budget, and never loops."""

import pytest

from kv_connector.waiting import Missed, Verdict, Waiting
from remote_server.protocol import KeyState

A, B, C = b"a", b"b", b"c"
ABSENT, PENDING, READABLE = (bytes([state]) for state in KeyState)


def ask(wait: Waiting, *keys: bytes, now_s: float = 0.0, step: int = 0) -> list[object]:
    return [wait.verdict(key, now_s=now_s, step=step) for key in keys]


def test_keys_are_asked_for_once_and_in_order():
    wait = Waiting(budget_s=1)
    assert ask(wait, A, B, C) == [Verdict.RETRY] * 3
    assert ask(wait, A, B, C, step=1) == [Verdict.RETRY] * 3
    assert wait.take_wanted() == [A, B, C]
    assert wait.take_wanted() == []


def test_an_answer_is_used_in_the_next_step():
    wait = Waiting(budget_s=1)
    ask(wait, A, B)
    wait.answer([A, B], READABLE + ABSENT)
    assert ask(wait, A, B, step=1) == [Verdict.HIT, Missed.ABSENT]


def test_a_block_that_is_being_written_is_asked_for_again():
    wait = Waiting(budget_s=1)
    ask(wait, A)
    wait.take_wanted()
    wait.answer([A], PENDING)
    assert ask(wait, A, step=1) == [Verdict.RETRY]
    assert wait.take_wanted() == [A]


def test_when_the_budget_is_spent_everything_is_a_miss():
    wait = Waiting(budget_s=0.1)
    ask(wait, A, B)
    wait.answer([A], READABLE)
    assert ask(wait, A, B, now_s=0.2, step=2) == [Missed.BUDGET_SPENT] * 2


def test_an_engine_with_long_steps_still_uses_the_answer():
    """The reply came in a millisecond; that the next step came seconds later is not its fault."""
    wait = Waiting(budget_s=0.1)
    ask(wait, A)
    wait.answer([A], READABLE)
    assert ask(wait, A, now_s=5.0, step=1) == [Verdict.HIT]
    assert ask(wait, A, now_s=10.0, step=2) == [Missed.BUDGET_SPENT]


@pytest.mark.parametrize("reason", [Missed.LOOKUP_LATE, Missed.UNAVAILABLE])
def test_a_miss_stays_a_miss_for_this_request(reason: Missed):
    wait = Waiting(budget_s=1)
    ask(wait, A)
    wait.give_up([A], reason)
    assert ask(wait, A, step=1) == [reason]
    assert wait.take_wanted() == [A]
    assert ask(wait, A, step=2) == [reason]
    assert wait.take_wanted() == []


def test_a_failed_load_is_a_miss_for_those_who_asked_and_for_nobody_else():
    asked, fresh = Waiting(budget_s=1), Waiting(budget_s=1)
    ask(asked, A)
    asked.answer([A], READABLE)
    for wait in (asked, fresh):
        wait.load_failed([A])
    assert ask(asked, A, step=1) == [Missed.LOAD_FAILED]
    assert ask(fresh, A, step=1) == [Verdict.RETRY]


def test_a_request_that_bypasses_the_server_never_asks():
    wait = Waiting(budget_s=1, bypass="lora")
    assert ask(wait, A) == [Missed.BYPASS]
    assert wait.take_wanted() == []
