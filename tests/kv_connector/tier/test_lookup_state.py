"""One request asks once, waits within its budget, and is charged only what the server owed."""

from kv_connector.tier.lookup_state import LookupState, Missed
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


def test_a_key_that_was_given_up_stays_a_miss_when_its_answer_comes():
    wait = asked(A, B)
    wait.give_up([A], Missed.BUDGET_SPENT)
    wait.answered([A, B], READABLE * 2, 0.2)
    assert wait.states == {A: Missed.BUDGET_SPENT, B: KeyState.READABLE}


def test_a_preempted_request_knows_only_which_loads_failed():
    wait = asked(A, B, C)
    wait.answered([A, B, C], READABLE + ABSENT + PENDING, 0.09)
    wait.load_failed([A])
    wait.restart()
    assert wait.states == {A: Missed.LOAD_FAILED}
    assert (wait.owed_s, wait.queried, wait.judged) == (0.0, False, False)
