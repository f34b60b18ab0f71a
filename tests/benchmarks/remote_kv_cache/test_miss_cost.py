"""What the benchmark of a request that finds nothing makes of its times. No engine is started."""

import pytest

from benchmarks.harness.record import Record
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache import test_miss_cost as miss_cost
from benchmarks.remote_kv_cache.test_miss_cost import ANSWER, FIRST, WITH, WITHOUT, Trial
from examples.engine import Completion


def answer(first_s: float, total_s: float) -> Completion:
    return Completion("", [], [], 525, 0, first_s, total_s, {})


def trials(count: int, seconds: float, swing_s: float = 0.0) -> list[Trial]:
    """Of two requests each, a tick apart so that no two are equal; `swing_s` up and down."""
    return [
        Trial([answer(seconds / 2, each), answer(seconds / 2, each + tick / 1000)])
        for tick in range(count)
        for each in [seconds + (swing_s if tick % 2 else -swing_s)]
    ]


def record_of(with_s: float, without_s: float, count: int = 20, swing_s: float = 0.0) -> Record:
    record = Record("b", "c")
    sample = Sample([1.0] * (count - 1), [1.0])
    for name, made in ((WITH, trials(count, with_s, swing_s)), (WITHOUT, trials(count, without_s))):
        record.rows += miss_cost.rows_of("wide", name, sample, made)
    record.figures += miss_cost.figures_of(record)
    return record


def test_a_value_is_what_a_request_of_the_trial_took_on_the_average_and_warm_ups_are_apart():
    rows = {row.operation: row for row in record_of(1.0, 1.0, 4).rows}
    assert len(rows) == 4
    whole = rows[f"{WITH}: {ANSWER}"].sample
    assert whole.warm_ups == pytest.approx([1.0])
    assert whole.values == pytest.approx([1.0005, 1.001, 1.0015])
    assert rows[f"{WITHOUT}: {FIRST}"].sample.values == pytest.approx([0.5] * 3)


@pytest.mark.parametrize(
    ("with_s", "swing_s", "said"),
    [
        (1.0, 0.005, "under 2%: met"),
        (1.02, 0.03, "under 2%: not certain"),
        (1.1, 0.005, "under 2%: NOT met"),
    ],
)
def test_the_goal_is_met_or_missed_only_when_the_whole_interval_says_so(
    with_s: float, swing_s: float, said: str
):
    record = record_of(with_s, 1.0, swing_s=swing_s)
    assert said in miss_cost.describe(record)
    cost = {figure.name: figure.values for figure in record.figures}[
        f"cost of the connector: {ANSWER}"
    ]
    assert cost["low"] <= cost["cost"] <= cost["high"]
    assert with_s < 1.05 or cost["cost"] == pytest.approx(10, abs=1), "dearer is positive"
    assert "<svg" in miss_cost.chart(record).svg()


def test_few_trials_give_no_verdict():
    """Two rounds of nearly equal values are no proof of anything."""
    assert "under 2%: not judged: 2 rounds" in miss_cost.describe(record_of(1.0, 1.0, 3))
