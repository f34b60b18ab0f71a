"""Points of a sweep with chosen lookups, for tests of its verdicts and of its page."""

from dataclasses import replace

from benchmarks.store_sweep import source
from benchmarks.store_sweep.points import Percentiles, Point


def looked_up(concurrency: int, p50: float, cpu: float | None = 10.0, errors: int = 0):
    lookup = Percentiles(p50, None, None, None)
    return replace(
        source.results()[0], point=Point(concurrency, 1), lookup=lookup, cpu_percent=cpu,
        errors=errors,
    )  # fmt: skip
