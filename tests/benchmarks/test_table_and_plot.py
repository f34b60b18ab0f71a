"""What people see: columns that line up, and SVG that is well-formed."""

from xml.etree import ElementTree

import pytest

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


@pytest.mark.parametrize("chart", [plot.bars, plot.lines])
def test_charts_are_well_formed_and_follow_the_readers_colours(chart):
    series = {"get <tcp>": [1.0, 2.5, None], "put & wait": [None, 0.5, 4.0]}
    text = chart("a title", "times a memcpy", ["3B", "7B", "32B"], series, mark=1.0)
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a title", "times a memcpy", "3B", "7B", "32B", "get <tcp>", "put & wait"} <= {*words}
    assert "prefers-color-scheme: dark" in text
    marks = list(root.iter(f"{SVG}rect" if chart is plot.bars else f"{SVG}circle"))
    assert len([m for m in marks if m.find(f"{SVG}title") is not None]) == 4


def test_a_chart_of_nothing_is_still_one():
    ElementTree.fromstring(plot.bars("empty", "s", [], {}))
    ElementTree.fromstring(plot.lines("empty", "s", ["a"], {"x": [None]}))
