"""One request asks once, waits within its budget, and is charged only what the server owed."""

import pytest

from kv_connector.lookup_state import MOST_LOADS_OF_A_KEY, LookupState, Missed
from remote_server.protocol import KeyState

A, B, C = b"a", b"b", b"c"
ABSENT, PENDING, READABLE = (bytes([state]) for state in KeyState)


def asked(*keys: bytes, budget_s: float = 0.1) -> LookupState:
    """A request that asked for `keys` in step 0, at second 0."""
    wait = LookupState(budget_s=budget_s)
    wait.looked_up(now_s=0.0, step=0)
    wait.states = dict.fromkeys(keys)
    wait.sent(0.0)
    return wait


def test_an_answer_is_a_state_for_each_key():
    wait = asked(A, B, C)
    wait.answered([A, B, C], READABLE + ABSENT + PENDING, 0.01)
    assert wait.states == {A: KeyState.READABLE, B: Missed.ABSENT, C: KeyState.PENDING}
    assert wait.news


def test_a_question_costs_its_round_trip_however_long_the_step_was():
    wait = asked(A)
    wait.answered([A], READABLE, 0.002)
    for step in (1, 2, 3):
        wait.looked_up(now_s=5.0 * step, step=step)
    assert wait.owed_s == pytest.approx(0.002)
    assert not wait.out_of_time


def test_a_block_that_is_being_written_costs_the_time_in_which_the_engine_asked_for_it():
    wait = asked(A)
    wait.answered([A], PENDING, 0.01)
    wait.looked_up(now_s=0.06, step=1)
    assert wait.owed_s == pytest.approx(0.06)
    wait.sent(0.06)
    wait.answered([A], PENDING, 0.07)
    wait.looked_up(now_s=0.12, step=2)
    assert wait.owed_s == pytest.approx(0.12)
    assert wait.out_of_time


def test_steps_in_which_the_engine_did_not_look_cost_nothing():
    wait = asked(A)
    wait.answered([A], PENDING, 0.01)
    for step in (7, 20, 31):
        wait.looked_up(now_s=float(step), step=step)
    assert wait.owed_s == pytest.approx(0.01)
    assert not wait.out_of_time


def test_a_question_without_an_answer_costs_its_time_also_while_the_engine_is_busy():
    wait = asked(A)
    wait.unanswered([A], Missed.LOOKUP_LATE, 0.05)
    assert wait.owed_s == pytest.approx(0.05)
    assert wait.states[A] is Missed.LOOKUP_LATE


def test_an_engine_with_long_steps_can_ask_again_before_the_budget_counts():
    wait = asked(A)
    wait.answered([A], PENDING, 0.001)
    wait.looked_up(now_s=0.5, step=1)
    assert wait.owed_s > wait.budget_s
    assert not wait.out_of_time


def test_a_key_that_was_given_up_stays_a_miss_when_its_answer_comes():
    wait = asked(A, B)
    wait.give_up([A], Missed.BUDGET_SPENT)
    wait.answered([A, B], READABLE * 2, 0.2)
    assert wait.states == {A: Missed.BUDGET_SPENT, B: KeyState.READABLE}


def test_a_failed_load_is_a_miss_for_those_who_asked_and_for_no_other():
    first, fresh = asked(A), LookupState(budget_s=1)
    first.answered([A], READABLE, 0.01)
    for wait in (first, fresh):
        wait.load_failed([A])
    assert first.states == {A: Missed.LOAD_FAILED}
    assert fresh.states == {}


def test_a_preempted_request_knows_only_which_loads_failed():
    wait = asked(A, B, C)
    wait.answered([A, B, C], READABLE + ABSENT + PENDING, 0.09)
    wait.load_failed([A])
    wait.restart()
    assert wait.states == {A: Missed.LOAD_FAILED}
    assert (wait.owed_s, wait.queried, wait.judged) == (0.0, False, False)


def test_what_was_forgotten_has_another_generation():
    wait = asked(A)
    before = wait.generation
    wait.forget_answers()
    assert wait.generation != before and not wait.queries


def test_the_wait_is_the_time_between_looks_that_deferred_the_request():
    wait = asked(A)
    wait.deferred(0.0)
    wait.looked_up(now_s=0.3, step=1)
    wait.deferred(0.3)
    wait.looked_up(now_s=0.4, step=2)  # and this one admits it
    wait.looked_up(now_s=9.0, step=30)  # the engine had no room until now
    assert wait.waited_s == pytest.approx(0.4)
    assert wait.waited_steps == 2


def test_a_request_whose_rows_keep_leaving_the_pool_is_loaded_a_few_times_and_no_more():
    wait = asked(A, B)
    wait.loads = 2 * MOST_LOADS_OF_A_KEY - 1
    assert not wait.loads_too_often
    wait.loads += 1
    assert wait.loads_too_often
