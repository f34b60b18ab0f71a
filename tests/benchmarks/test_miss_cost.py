"""What the benchmark of a request that finds nothing makes of its times. No engine is started."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.record import Record, Row
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
    for name, made in (
        (WITH, trials(count, with_s, swing_s)),
        (WITHOUT, trials(count, without_s)),
    ):
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
        (1.0, 0.005, "under 2%: met, with"),
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


def test_a_case_that_failed_is_one_row_that_says_so_and_nothing_is_compared_with_it():
    failed = Sample([1.0], failed="AssertionError: something was found")
    record = Record("b", "c", rows=miss_cost.rows_of("wide", WITH, failed, trials(1, 1.0)))
    record.rows += miss_cost.rows_of("wide", WITHOUT, Sample([1.0]), trials(1, 1.0))
    assert [row.reason[:7] for row in record.rows] == ["FAILED:", "", ""]
    record.figures += miss_cost.figures_of(record)
    assert [figure.name for figure in record.figures] == []
    assert "something was found" in miss_cost.describe(record)


def test_without_room_for_an_engine_the_row_is_skipped_with_the_reason(tmp_path: Path):
    file = tmp_path / "a.json"
    assert miss_cost.main(["--memory", "1MiB", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["skipped"].startswith("needs ")
    assert isinstance(Record.read(file).rows[0], Row)
