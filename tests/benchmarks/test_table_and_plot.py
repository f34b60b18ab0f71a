"""What people see: columns that line up, and SVG that is well-formed."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.harness import plot, table

SVG = "{http://www.w3.org/2000/svg}"


def test_numbers_stand_right_and_words_left():
    text = table.render(["model", "s"], [["a", 0.5], ["long name", 12.25], ["x", None]])
    assert text.splitlines() == [
        "model          s",
        "---------  -----",
        "a          0.500",
        "long name   12.2",
        "x              -",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        table.render(["a", "b"], [["x"]])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.000042, "0.000042"), (0.0331, "0.0331"), (0.165, "0.165"), (1.25, "1.25"),
     (43.21, "43.2"), (2_254_259.0, "2,254,259")],
)  # fmt: skip
def test_three_digits(value: float, text: str):
    assert table.digits(value) == text


SERIES: plot.Series = {"get <tcp>": [1.0, 2.5, None], "put & wait": [None, 0.5, 4.0]}


def words_of(svg: str) -> set[str | None]:
    return {element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}


@pytest.mark.parametrize("draw", [plot.bars, plot.lines])
def test_charts_are_well_formed_and_their_text_stays_text(draw: Callable[..., plot.Chart]):
    svg = draw("a title", "times a memcpy", ["3B", "7B", "32B"], SERIES, mark=1.0).svg()
    assert {"a title", "times a memcpy", "3B", "7B", "32B", "get <tcp>", "put & wait"} <= words_of(
        svg
    )


def test_a_timeline_has_a_lane_for_each_name():
    svg = plot.timeline("when", "ms", {"computing": [(0.0, 2.0)], "swap <in>": []}).svg()
    assert {"when", "ms", "computing", "swap <in>"} <= words_of(svg)


def test_a_chart_brings_its_own_ground_so_that_dark_pages_do_not_swallow_it():
    assert "fill: #ffffff" in plot.bars("t", "s", ["a"], {"x": [1.0]}).svg()


def test_a_chart_is_written_as_both_kinds_and_the_same_each_time(tmp_path: Path):
    chart = plot.lines("t", "s", ["a", "b"], {"x": [1.0, 2.0]}, bands={"x": [(0.5, 2.0), None]})
    chart.write(tmp_path / "a.svg")
    chart.write(tmp_path / "b.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    for kind in ("svg", "png"):
        first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert first == second
    assert first.startswith(b"\x89PNG")


def test_a_chart_of_nothing_is_still_one():
    ElementTree.fromstring(plot.bars("empty", "s", [], {}).svg())
    ElementTree.fromstring(plot.lines("empty", "s", ["a"], {"x": [None]}).svg())
    ElementTree.fromstring(plot.timeline("empty", "s", {}).svg())


def test_long_names_of_many_groups_are_broken_so_that_neighbours_stay_apart():
    names = [f"system {number}, shared memory" for number in range(11)]
    words = words_of(plot.bars("t", "GB/s", names, {"write": [1.0] * 11}).svg())
    assert not words & {*names} and {"shared", "memory"} & words
    few = words_of(plot.bars("t", "GB/s", names[:3], {"write": [1.0] * 3}).svg())
    assert {*names[:3]} <= few


def drawn(chart: plot.Chart) -> Any:
    """The axes of `chart`, laid out."""
    figure = Figure(figsize=chart.inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    chart.draw(axes)
    figure.draw_without_rendering()
    return axes


def test_a_long_word_is_not_broken_and_does_not_reach_its_neighbours():
    names = ["memcached, tcp", "memcached, unix socket", "processes"] * 7
    chart = plot.bars("t", "GB/s", names, {"write": [1.0] * 21})
    assert {"memcached,", "processes"} <= words_of(chart.svg())
    boxes = [label.get_window_extent() for label in drawn(chart).get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize("draw", [plot.bars, plot.lines])
def test_the_highest_value_is_not_on_the_edge(draw: Callable[..., plot.Chart]):
    axes = drawn(draw("t", "%", ["a", "b"], {"x": [38.2, 38.2], "y": [32.0, 33.0]}))
    assert axes.get_ylim()[1] >= 1.04 * 38.2 and axes.get_ylim()[0] == 0


def test_bars_are_told_apart_when_the_colours_begin_again():
    def hatched(count: int) -> bool:
        series: plot.Series = {f"s{number}": [1.0] for number in range(count)}
        return "<pattern" in plot.bars("t", "s", ["a"], series).svg()

    assert (hatched(7), hatched(8)) == (False, True)
