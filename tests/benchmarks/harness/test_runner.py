"""Trials are interleaved, timed around `run` alone, and what was measured is kept."""

import io
import os
import signal

import pytest

from benchmarks.harness.runner import Case, Runner, Skipped, WrongBytes


class Clock:
    """Time moves only when the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def runner(trials: int = 3, warm_ups: int = 1, clock: Clock | None = None) -> Runner:
    return Runner(trials, warm_ups, io.StringIO(), clock or Clock())


def test_rounds_are_interleaved_and_begin_at_another_case_each():
    ran: list[str] = []
    cases = [Case(name, lambda name=name: ran.append(name)) for name in "abc"]
    runner(trials=2).measure("m", cases)
    assert "".join(ran) == "abcbcacab"


def test_only_run_is_timed_and_warm_ups_are_kept_apart():
    clock = Clock()

    def lasting(seconds: float) -> None:
        clock.now += seconds

    case = Case("a", lambda: lasting(2), lambda: lasting(100), lambda: lasting(100))
    sample = runner(trials=3, clock=clock).measure("m", [case])["a"]
    assert (sample.warm_ups, sample.values) == ([2.0], [2.0] * 3)


def test_a_case_that_cannot_run_costs_no_other():
    def skip() -> None:
        raise Skipped("no GPU")

    def wrong() -> None:
        raise WrongBytes("block 3")

    ran: list[int] = []
    here = runner()
    samples = here.measure(
        "m",
        [Case("s", skip), Case("w", lambda: ran.append(1), verify=wrong), Case("ok", lambda: None)],
    )
    assert samples["s"].skipped == "no GPU"
    assert samples["w"].failed == "WrongBytes: block 3"
    assert len(ran) == 1, "a case that failed was tried again"
    assert [samples[name].measured for name in ("s", "w", "ok")] == [False, False, True]
    assert here.num_failed == 1


def test_ctrl_c_keeps_what_was_measured():
    calls = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with runner(trials=10, warm_ups=0) as here:
        sample = here.measure("m", [Case("a", run)])["a"]
        assert len(sample.values) == 3
    assert here.interrupted

    with runner() as here:
        raise KeyboardInterrupt  # between two measurements
    assert here.interrupted


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), runner():
        raise ZeroDivisionError


def test_of_many_short_rounds_a_few_are_shown():
    log = io.StringIO()
    Runner(5, 0, log, rounds_a_line=2).measure("m", [Case("a", lambda: None)])
    shown = [line.partition(",")[0] for line in log.getvalue().splitlines()]
    assert shown == [f"m: round {number} of 5" for number in (1, 3, 5)]


def progress(clock: Clock, total: float, weights: list[float]) -> list[str]:
    """The log of measurements of one case that takes 10 s, in two rounds each."""
    log = io.StringIO()
    here = Runner(2, 0, log, clock, total)

    def run() -> None:
        clock.now += 10

    for number, weight in enumerate(weights):
        here.measure(f"m{number}", [Case("a", run)], weight)
    return log.getvalue().splitlines()


def test_the_progress_line_says_how_long_the_rest_may_take():
    assert progress(Clock(), 0, [0, 0]) == [
        "m0: round 1 of 2", "m0: round 2 of 2, about 10 s left",
        "m1: round 1 of 2", "m1: round 2 of 2, about 10 s left",
    ]  # fmt: skip
    assert progress(Clock(), 8, [1, 1, 6]) == [
        "m0: round 1 of 2", "m0: round 2 of 2, about 2 min 30 s left",
        "m1: round 1 of 2, about 2 min 20 s left", "m1: round 2 of 2, about 2 min 10 s left",
        "m2: round 1 of 2, about 2 min 0 s left", "m2: round 2 of 2, about 30 s left",
    ]  # fmt: skip


def test_sigterm_keeps_what_was_measured_and_a_second_one_interrupts_nothing():
    calls = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the signal interrupted nothing")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with runner(trials=10, warm_ups=0) as here:
            sample = here.measure("m", [Case("a", run)])["a"]
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(sample.values) == 3
        os.kill(os.getpid(), signal.SIGTERM)  # while the record is being written
        assert here.interrupted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_case_known_not_to_run_says_why_in_its_row():
    with runner() as here:
        samples = here.measure("m", [Case.skipped("gpu", Skipped("no GPU"))])
    assert samples["gpu"].skipped == "no GPU" and not samples["gpu"].values
