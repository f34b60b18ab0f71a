"""What people see: columns that line up, and SVG that is well-formed."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness import plot, table
from benchmarks.harness.titles import Title

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
    svg = draw(Title("a title"), "times a memcpy", ["3B", "7B", "32B"], SERIES, mark=1.0).svg()
    assert "fill: #ffffff" in svg, "its own ground, so that dark pages do not swallow it"
    assert {"a title", "times a memcpy", "3B", "7B", "32B", "get <tcp>", "put & wait"} <= words_of(
        svg
    )


def test_a_chart_is_written_as_both_kinds_and_the_same_each_time(tmp_path: Path):
    chart = plot.lines(
        Title("t"), "s", ["a", "b"], {"x": [1.0, 2.0]}, bands={"x": [(0.5, 2.0), None]}
    )
    chart.write(tmp_path / "a.svg")
    chart.write(tmp_path / "b.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    for kind in ("svg", "png"):
        first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert first == second
    assert first.startswith(b"\x89PNG")


def test_a_chart_of_nothing_is_still_one():
    ElementTree.fromstring(plot.bars(Title("empty"), "s", [], {}).svg())
    ElementTree.fromstring(plot.lines(Title("empty"), "s", ["a"], {"x": [None]}).svg())
    ElementTree.fromstring(plot.timeline(Title("empty"), "s", {}).svg())
