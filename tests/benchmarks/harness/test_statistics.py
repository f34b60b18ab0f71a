"""The verdicts are right on samples whose answer is known."""

import numpy as np
import pytest

from benchmarks.harness import statistics
from benchmarks.harness.summary import summarize

# Seconds of 288 MiB through two variants on a shared machine, as recorded.
SLOW = [0.0342, 0.0339, 0.0351, 0.0513, 0.0345, 0.0340, 0.0347]
FAST = [0.0255, 0.0249, 0.0261, 0.0250, 0.0448, 0.0252, 0.0257]


def test_a_summary_is_the_median_and_the_extremes():
    summary = summarize([3.0, 1.0, 2.0, 10.0])
    assert summary == (2.5, 1.0, 10.0)
    assert summary.spread == pytest.approx(9 / 2.5)
    with pytest.raises(ValueError, match="nothing was measured"):
        summarize([])


def test_a_percentile_is_a_value_that_was_measured():
    values = [float(v) for v in range(1, 101)]
    assert statistics.percentile(values, 50) == 50
    assert statistics.percentile(values, 99) == 99
    assert statistics.percentile([7.0], 99) == 7


def test_a_difference_survives_one_outlier_on_each_side():
    found = statistics.compare(SLOW, FAST)
    assert found.significant
    assert found.verdict == "1.35x faster"
    assert found.low < found.ratio < found.high
    assert statistics.compare(FAST, SLOW).verdict == "1.35x slower"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SLOW, SLOW),
        ([1.0, 1.2, 1.4, 1.6, 1.8], [1.1, 1.3, 1.5, 1.7, 1.9]),  # they overlap
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2]),  # three trials a side can show nothing
        ([1.000, 1.001, 1.002, 1.003, 1.004], [1.010, 1.011, 1.012, 1.013, 1.014]),  # under 2 %
        ([1.0] * 5, [1.0] * 5),
    ],
    ids=["itself", "overlap", "three trials", "one percent", "constant"],
)
def test_not_significant(before: list[float], after: list[float]):
    assert statistics.compare(before, after).verdict == "not significant"


def test_mann_whitney_gives_the_tabled_probabilities():
    def p(first: list[float], second: list[float]) -> float:
        return statistics.mann_whitney(np.array(first), np.array(second))

    assert p([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert p([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert p([1, 3], [2, 4]) == pytest.approx(4 / 6)
    assert p([1, 1, 1], [1, 1, 1]) == 1
    # 20 against 20 is past counting: the normal approximation.
    assert p(list(range(20)), list(range(20, 40))) < 1e-6
    assert p(list(range(0, 40, 2)), list(range(1, 41, 2))) > 0.5


def test_pairs_tell_a_difference_that_drift_hides():
    """In some rounds the machine is half as fast, and one variant takes 5 % longer in each."""
    draws = np.random.default_rng(1)
    fast = draws.uniform(1.0, 2.0, 30)
    slow = 1.05 * fast * draws.uniform(0.99, 1.01, 30)
    found = statistics.compare_pairs(slow, fast)
    assert 1.04 < found.low <= found.ratio <= found.high < 1.06
    assert not statistics.compare(slow, fast).significant
    assert statistics.compare_pairs(fast, slow).ratio == pytest.approx(1 / found.ratio, rel=0.01)


@pytest.mark.parametrize(
    ("compare", "first", "second"),
    [
        (statistics.compare, [], FAST), (statistics.compare, [0.0, 1.0], FAST),
        (statistics.compare_pairs, [1.0], []), (statistics.compare_pairs, [], []),
        (statistics.compare_pairs, [1.0, 0.0], [1.0, 1.0]),
    ],
)  # fmt: skip
def test_what_is_no_sample_of_durations_is_refused(compare, first, second):
    pairs = compare is statistics.compare_pairs
    with pytest.raises(ValueError, match=r"each value|positive" if pairs else "positive durations"):
        compare(first, second)


@pytest.mark.parametrize("at_most", [True, False])
def test_a_verdict_takes_enough_rounds_and_the_whole_interval(at_most: bool):
    better, worse = ((0.1, 0.2), (0.4, 0.5)) if at_most else ((0.4, 0.5), (0.1, 0.2))

    def judged(low: float, high: float, rounds: int) -> str:
        return statistics.judge(low, high, rounds, goal=0.3, at_most=at_most).partition(":")[0]

    assert judged(*better, statistics.LEAST_ROUNDS) == "met"
    assert judged(*worse, statistics.LEAST_ROUNDS) == "NOT met"
    assert judged(0.2, 0.4, 100) == "not certain"
    for interval in (better, worse):
        assert judged(*interval, statistics.LEAST_ROUNDS - 1) == "not judged"


def test_six_rounds_are_the_least_whose_range_has_the_median_with_95_percent():
    def chance(rounds: int) -> float:
        return float(1 - 2.0 ** (1 - rounds))

    assert chance(statistics.LEAST_ROUNDS) >= 0.95 > chance(statistics.LEAST_ROUNDS - 1)
