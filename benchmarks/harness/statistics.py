"""Statistics of a few timings: percentiles, and tests of whether two samples differ.

Medians, because one trial beside a busy neighbour must not move the result. The Mann-Whitney test,
which assumes no shape, judges two samples; a bootstrap gives an interval of the ratio of their
medians. Plain numpy: scipy would be a dependency for two functions.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

SIGNIFICANCE = 0.05
"""With 4 trials against 4 the smallest possible p is 2/70; with 3 against 3 it is 0.1, so fewer
than four trials a side never show a difference."""

LEAST_TO_DIFFER = 4

SMALLEST_DIFFERENCE = 0.02
"""Below this two samples are called equal, however certain the difference: a rebuilt page table or
a warmer room has as large an effect."""

LEAST_ROUNDS = 6
"""Rounds from which an interval of their median can be one of 95 %. The whole range of n values
has the true median with a chance of 1 - 2^(1 - n): 97 % for six, 94 % for five."""

_EXACT_ARRANGEMENTS = 20_000  # C(16, 8) = 12,870; larger samples use the normal approximation
_BOOTSTRAP_DRAWS = 4_000


class Comparison(NamedTuple):
    """Two samples of durations, `before` and `after`."""

    ratio: float
    """Median before / median after: above 1, `after` is faster."""

    low: float
    high: float
    """The 95% confidence interval of the ratio, by bootstrap."""

    p_value: float

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANCE and abs(math.log(self.ratio)) > math.log1p(
            SMALLEST_DIFFERENCE
        )

    @property
    def verdict(self) -> str:
        """`1.12x faster`, `1.30x slower` or `not significant`."""
        if not self.significant:
            return "not significant"
        if self.ratio > 1:
            return f"{self.ratio:.2f}x faster"
        return f"{1 / self.ratio:.2f}x slower"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed. Never interpolated."""
    return float(np.percentile(np.asarray(values), percent, method="inverted_cdf"))


def are_durations(values: Sequence[float]) -> bool:
    """Whether all are finite numbers above 0, as `compare` needs them; `nan` is none."""
    return all(0 < value < math.inf for value in values)


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Judge two samples of positive durations. The same samples always give the same result."""
    first, second = np.asarray(before, float), np.asarray(after, float)
    if not (len(first) and len(second) and are_durations([*first, *second])):
        raise ValueError("both samples must hold positive durations")
    low, high = _ratio_interval(first, second)
    ratio = float(np.median(first) / np.median(second))
    return Comparison(ratio, low, high, mann_whitney(first, second))


class PairedRatio(NamedTuple):
    """A comparison of two variants that ran in the same rounds."""

    ratio: float
    """Median over the rounds of before / after: above 1, `after` is faster."""

    low: float
    high: float
    """Its 95% confidence interval, by bootstrap over the rounds: their range where they are few."""

    rounds: int


def compare_pairs(before: Sequence[float], after: Sequence[float]) -> PairedRatio:
    """Judge two samples whose values at one index come from one round, run one after the other.

    A machine that is slower for some rounds is slower for both, so their ratio is unaffected:
    where rounds differ more than variants do, this detects smaller differences than `compare`.
    """
    first, second = np.asarray(before, float), np.asarray(after, float)
    if len(first) != len(second) or not len(first):
        raise ValueError("each value needs the other of its round")
    if not ((first > 0).all() and (second > 0).all()):
        raise ValueError("both samples must hold positive durations")
    ratios = first / second
    draws = np.random.default_rng(0).choice(ratios, (_BOOTSTRAP_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return PairedRatio(float(np.median(ratios)), float(low), float(high), len(ratios))


def judge(low: float, high: float, rounds: int, *, goal: float, at_most: bool) -> str:
    """The verdict on a median with this interval, of so many rounds, against `goal`, which it may
    reach at most, or must at least: `met`, `NOT met`, or why neither is shown."""
    if rounds < LEAST_ROUNDS:
        return f"not judged: {rounds} rounds, and a verdict takes {LEAST_ROUNDS}"
    if high <= goal if at_most else low >= goal:
        return "met"
    if low > goal if at_most else high < goal:
        return "NOT met"
    return "not certain: use more --trials"


def mann_whitney(first: Values, second: Values) -> float:
    """The two-sided p-value: the odds that chance alone ranks one sample so far above the other.

    Exact, ties included, while all arrangements can be counted.
    """
    ranks = _midranks(np.concatenate((first, second)))
    size, total = len(first), len(ranks)
    expected = size * (total + 1) / 2
    distance = abs(float(ranks[:size].sum()) - expected)
    if math.comb(total, size) <= _EXACT_ARRANGEMENTS:
        chosen = np.array(list(itertools.combinations(range(total), size)))
        distances = np.abs(ranks[chosen].sum(axis=1) - expected)
        return float(np.mean(distances >= distance - 1e-9))
    _, ties = np.unique(ranks, return_counts=True)
    tied = float((ties**3 - ties).sum()) / (total * (total - 1))
    variance = size * (total - size) / 12 * (total + 1 - tied)
    if variance <= 0:
        return 1.0
    return math.erfc(max(0.0, distance - 0.5) / math.sqrt(2 * variance))


def _midranks(values: Values) -> Values:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Values = (last - (counts - 1) / 2)[inverse]
    return shared


def _ratio_interval(first: Values, second: Values) -> tuple[float, float]:
    draws = np.random.default_rng(0)
    medians = [
        np.median(draws.choice(sample, (_BOOTSTRAP_DRAWS, len(sample))), axis=1)
        for sample in (first, second)
    ]
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    return float(low), float(high)
