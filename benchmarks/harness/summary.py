"""The summary of a sample. Without numpy: a record can be written where it is not installed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """The values of a sample that are shown."""

    median: float
    min: float
    max: float

    @property
    def spread(self) -> float:
        """The range of the trials, as a part of their median."""
        return (self.max - self.min) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> Summary:
    """Raises `ValueError` without values."""
    if not len(values):
        raise ValueError("nothing was measured")
    return Summary(float(statistics.median(values)), float(min(values)), float(max(values)))
