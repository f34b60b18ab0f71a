"""Histograms of durations, with the same buckets everywhere."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec

BOUNDS_S = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of a histogram's buckets, in seconds; one more bucket holds larger values."""


class Timings(msgspec.Struct, frozen=True):
    """A histogram over `BOUNDS_S`: `counts` has one more, and they are not cumulative."""

    counts: list[int]
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def for_prometheus(self) -> list[tuple[str, float]]:
        """The upper end of each bucket, and how many observations are not above it."""
        return [*zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self.counts), strict=True)]


class Histogram:
    """Counts of observed seconds by `BOUNDS_S`."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def timings(self) -> Timings:
        """A copy."""
        return Timings([*self.counts], self.sum_s)


def together(several: Sequence[Timings]) -> Timings:
    """The observations of all."""
    counts = [sum(of_bucket) for of_bucket in zip(*(one.counts for one in several), strict=True)]
    return Timings(counts, sum(one.sum_s for one in several))


def percentile(counts: Sequence[int], percent: float) -> float | None:
    """The time within which `percent` of the observations lie, interpolated linearly in its bucket;
    None without observations. Above the last bound it is that bound."""
    rank = sum(counts) * percent / 100
    seen = 0
    for number, count in enumerate(counts):
        if count and seen + count >= rank:
            if number == len(BOUNDS_S):
                return BOUNDS_S[-1]
            low = BOUNDS_S[number - 1] if number else 0.0
            return low + (BOUNDS_S[number] - low) * (rank - seen) / count
        seen += count
    return None
