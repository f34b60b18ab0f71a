"""A sweep's picture for other pages: what lookups and reads take, by the number at once."""

from benchmarks.harness import plot, titles
from benchmarks.harness.record import Record

_SHOWN = ("lookup p50", "lookup p99", "read p50", "read p99")


def chart(record: Record) -> plot.Chart:
    """A line for each percentile that was measured. The page of a sweep has further charts."""
    points = {
        figure.name.partition(" ")[0]: figure.values
        for figure in record.figures
        if " at once" in figure.name
    }
    series = {
        name: [values.get(f"{name}, ms") for values in points.values()]
        for name in _SHOWN
        if any(f"{name}, ms" in values for values in points.values())
    }
    title = titles.of(record, "what lookups and reads take")
    return plot.lines(title, "ms", [*points], series, x_unit="conversations at once")
