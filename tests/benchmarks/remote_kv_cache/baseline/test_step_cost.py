"""What the benchmark of long prompts' steps makes of its measurements. No engine is started."""

import argparse

import pytest

from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache.baseline import test_step_cost as step_cost
from benchmarks.remote_kv_cache.baseline.steps import step_cost_results as results
from benchmarks.remote_kv_cache.baseline.steps.step_cost_results import (
    ADMITS,
    AGAIN,
    ANSWERED,
    ASKS,
    LOADING,
    NO_ANSWER,
    Trial,
)
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import Step

LENGTH = 3_200  # 100 blocks


def step(ours_ms: float = 0.0, walks: int = 0, admits: bool = False) -> Step:
    """A step of 10 ms with 2 ms of vLLM's hooks, of which 0.5 ms were waited for."""
    calls = 100 * walks
    walk_s = ours_ms / 1e3 if walks else 0.0
    return Step(0.01, ours_ms / 1e3, 0.002, 0.0005, walks, admits, calls, walk_s, calls)


def trial(walk_ms: float) -> Trial:
    return results.by_phase([
        step(9, walks=1), step(0.2), step(0.4), step(0.3), step(walk_ms, walks=1),
        step(0.05, walks=1), step(0.1), step(walk_ms, walks=1, admits=True),
    ])  # fmt: skip


def record_of(trials: list[Trial], charged_s: float = 0.0) -> Record:
    sample = Sample([1.0] * len(trials))
    return Record(
        "b", "c",
        rows=results.rows_of("small", LENGTH, sample, trials),
        figures=[
            *results.figures_of(LENGTH, sample, trials, charged_s),
            Figure(results.TIMER, "us", {"charged": 0.25}),
        ],
    )  # fmt: skip


def test_a_step_belongs_to_the_phase_that_its_walk_says():
    phases = {phase: len(steps) for phase, steps in trial(0.1).items()}
    assert phases == {ASKS: 1, NO_ANSWER: 3, ANSWERED: 1, AGAIN: 1, LOADING: 1, ADMITS: 1}
    at_once = results.by_phase([step(walks=1), step(walks=1), step(walks=1, admits=True)])
    assert list(at_once) == [ASKS, ANSWERED, ADMITS]


def test_a_row_holds_the_median_step_of_each_trial_and_a_figure_the_time_of_a_block():
    record = record_of([trial(0.1), trial(0.12), trial(0.11)], charged_s=0.25e-6)
    rows = {row.operation: row for row in record.rows}
    assert len(rows) == len(results.PHASES) * 4
    assert rows["3,200 tokens, no answer yet: ours"].sample.values == pytest.approx([0.0003] * 3)
    assert rows["3,200 tokens, answers used: ours"].seconds == pytest.approx(0.00011)
    figures = {figure.name: figure.values for figure in record.figures}
    assert figures["3,200 tokens, answers used"] == pytest.approx(
        {
            "engine step": 100, "ours": 1.1, "vLLM's": 20, "both, CPU": 16.1,
            "ours, less the timer": 0.85, "ours in the walk, less the timer": 0.85,
        }
    )  # fmt: skip
    assert figures["3,200 tokens, no answer yet: steps"] == {"median": 3, "max": 3}


def test_the_goal_is_judged_for_each_walk_with_answers_and_for_no_other_step():
    text = results.describe(record_of([trial(0.15)] * 3), [LENGTH])
    assert "answers used: 1.50 us, met" in text and "load in: 1.50 us, met" in text
    assert "the timer charges 0.25 us" in text
    assert "NOT" not in text  # the first step, with 90 us a block, is none of them
    assert "answers used: 1.60 us, NOT met" in results.describe(record_of([trial(0.16)]), [LENGTH])
    assert "<svg" in results.chart(record_of([trial(0.15)])).svg()


def test_lengths_are_whole_blocks_each_once():
    assert step_cost.lengths("64,32,64") == (64, 32)
    for wrong in ("33", "0", "-32", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            step_cost.lengths(wrong)


def test_a_prompt_has_room_in_the_pool_that_is_asked_for():
    at_131k, nothing = step_cost.needed_bytes(131_072), step_cost.needed_bytes(0)
    assert at_131k - nothing == pytest.approx(384 * 2**20 * (1 + 4 / 3 + 1.25))
