"""The pictures of a sweep: every point of every result is in them, whatever it is."""

import math
import re

import pytest

from benchmarks.store_sweep.pages import charts
from benchmarks.store_sweep.points import NOTHING, PARTS, Percentiles, Point, ReadSplit, Result

SPLIT = ReadSplit(0.1, 0.2, 0.3, 0.4, 0.5, 1.5, 0.0)


def measured(at_once: int, tokens: float, p50: float | None = 2.0, **more: object) -> Result:
    latency = NOTHING if p50 is None else Percentiles(p50, 2 * p50, 3 * p50, 9 * p50)
    return Result(Point(at_once, 1), tokens / 1152, tokens, latency, latency, **more)  # type: ignore[arg-type]


UP_AND_DOWN = [measured(n, tokens) for n, tokens in ((1, 10e3), (2, 60e3), (4, 40e3), (8, 5e3))]

SWEEPS: dict[str, tuple[list[Result], list[str]]] = {
    "rising": ([measured(1, 10e3), measured(2, 20e3)], []),
    "falls after its peak": (UP_AND_DOWN, ["hollow: 2 of 4 points, beyond the peak"]),
    "the first is the peak": ([*reversed(UP_AND_DOWN[:2])], ["hollow: 1 of 2 points"]),
    "one not measured": (
        [*UP_AND_DOWN[:2], measured(16, 70e3, None)],
        ["x at the lower edge: 4 values that were not measured"],
    ),
    "no time at all": (
        [measured(1, 10e3, 0.0), measured(2, 20e3)],
        ["x at the lower edge: 4 values"],
    ),
    "no number": (
        [measured(1, 10e3, math.nan), measured(2, 20e3)],
        ["x at the lower edge: 4 values"],
    ),
    "with errors": (
        [measured(1, 10e3, errors=3), measured(2, 0.0)],
        ["with errors: 1 at once", "hollow: 1 of 2 points"],
    ),
    "equal ones": ([measured(1, 10e3), measured(2, 10e3)], ["hollow: 1 of 2 points"]),
    "a far outlier": ([measured(1, 10e3, 1e-3), measured(2, 20e3, 1e6)], []),
}


def points_of(svg: str) -> dict[str, str]:
    """The words of each point by series and place."""
    found = re.findall(
        r'<g id="[^"]+" class="point"[^>]*data-series="([^"]+)" data-place="(\d+)" '
        r'aria-label="([^"]+)">', svg
    )  # fmt: skip
    return {f"{series}~{place}": words for series, place, words in found}


def positions(svg: str) -> list[tuple[float, float]]:
    groups = re.findall(r'class="point".*?</g>\s*</g>', svg, re.DOTALL)
    return [
        (float(x), float(y))
        for group in groups
        for x, y in re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', group)
    ]


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("operation", ["lookup", "read"])
def test_each_percentile_of_each_point_is_in_the_picture_or_named_in_it(name: str, operation: str):
    results, notes = SWEEPS[name]
    svg = charts.latency(results, operation).svg
    drawn = points_of(svg)
    every = {f"{p}~{place}" for p in Percentiles._fields for place in range(len(results))}
    assert drawn.keys() == every
    assert all(note in svg for note in notes)
    assert ("hollow" in svg, "lower edge" in svg) == tuple(
        any(word in note for note in notes) for word in ("hollow", "lower edge")
    )
    _, _, width, height = map(float, re.findall(r'viewBox="([^"]+)"', svg)[0].split())
    places = positions(svg)
    assert len(places) == len(drawn)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_what_was_measured_at_no_point_is_named():
    lookups = [measured(1, 10e3, None), measured(2, 20e3, None)]
    assert "not measured at any point: p50, p90, p99, p100" in charts.latency(lookups, "read").svg


@pytest.mark.parametrize("name", SWEEPS)
def test_each_point_has_its_bars_and_its_errors(name: str):
    results, _ = SWEEPS[name]
    assert len(points_of(charts.throughput(results).svg)) == 2 * len(results)
    assert ("errors" in charts.throughput(results).svg) == any(one.errors for one in results)


def test_a_point_without_the_parts_of_a_read_keeps_its_place_and_says_so():
    results = [measured(1, 1e3, split=SPLIT), measured(2, 2e3), measured(4, 3e3, split=SPLIT)]
    chart = charts.split(results)
    assert chart is not None
    assert points_of(chart.svg).keys() == {f"{part}~{place}" for part in PARTS for place in (0, 2)}
    assert chart.svg.count("not measured") == 1
    assert "(2x1)" in chart.svg
    assert charts.split([measured(1, 1e3)]) is None
