"""The breaker, with the time as an argument."""

from math import inf

import pytest

from remote_server.client import ClientConfig
from remote_server.client.connection.breaker import ONE_STALL_S, Breaker, BreakerState

CONFIG = ClientConfig(
    "tcp://127.0.0.1:1", breaker_timeouts=3, breaker_backoff_s=0.25, breaker_longest_backoff_s=1.0
)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    assert [breaker.timed_out(at, 5.0) for _ in range(3)] == [False, False, True]
    return breaker


def test_timeouts_in_a_row_open_it():
    breaker = opened(at=10.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.retry_at == 10.25


def test_an_answer_starts_the_count_again():
    breaker = Breaker(CONFIG)
    for _ in range(10):
        assert not breaker.timed_out(0, 5.0)
        assert not breaker.timed_out(0, 5.0)
        breaker.answered()
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("together", [3, 1000])
def test_a_burst_that_expires_in_one_short_stall_does_not_open_it(together: int):
    breaker = Breaker(CONFIG)
    for stall in range(10):
        assert not any(breaker.timed_out(stall, 0.05) for _ in range(together))
        breaker.answered()


def test_short_deadlines_open_it_once_the_silence_is_long():
    breaker = Breaker(CONFIG)
    asked_first = 7.0
    opened_at = next(
        now
        for now in (asked_first + ms / 1000 for ms in range(50, 5000))
        if breaker.timed_out(now, 0.05)
    )
    assert opened_at - asked_first == pytest.approx(ONE_STALL_S, abs=0.002)


def test_a_burst_opens_it_when_nothing_is_heard_after_it():
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.timed_out(7.05, 0.05)
    assert breaker.opens_at == pytest.approx(7.0 + ONE_STALL_S)
    assert not breaker.open_if_due(7.1)
    assert breaker.open_if_due(7.0 + ONE_STALL_S)
    assert breaker.state is BreakerState.OPEN and breaker.opens_at == inf


@pytest.mark.parametrize(("waited_s", "opens"), [(0.06, False), (2.0, True)])
def test_a_late_answer_is_a_sign_of_life_when_it_is_not_very_late(waited_s: float, opens: bool):
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.timed_out(7.05, 0.05)
    breaker.answered_late(waited_s)
    assert breaker.open_if_due(8.0) is opens


def test_more_timeouts_do_not_open_it_twice():
    breaker = opened(at=0.0)
    assert not any(breaker.timed_out(5.0, 5.0) for _ in range(10))
    assert breaker.retry_at == 0.25


def test_an_answer_to_an_old_request_does_not_close_it():
    breaker = opened()
    breaker.answered()
    assert breaker.state is BreakerState.OPEN
    breaker.probe()
    breaker.answered()
    assert breaker.state is BreakerState.PROBING


def test_each_failed_probe_waits_twice_as_long_up_to_a_limit():
    breaker = opened(at=0.0)
    waits = []
    now = breaker.retry_at
    for _ in range(4):
        breaker.probe()
        assert breaker.retry_at == inf
        assert not breaker.trip(now), "it was open before"
        waits.append(breaker.retry_at - now)
        now = breaker.retry_at
    assert waits == [0.5, 1.0, 1.0, 1.0]


def test_closing_forgets_the_past():
    breaker = opened()
    breaker.probe()
    breaker.trip(1.0)
    breaker.probe()
    breaker.close()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.timed_out(9.0, 5.0) for _ in range(3)] == [False, False, True]
    assert breaker.retry_at == 9.25


def test_an_unanswered_hello_opens_a_closed_breaker_at_once():
    breaker = Breaker(CONFIG)
    assert breaker.trip(2.0)
    assert breaker.retry_at == 2.25
