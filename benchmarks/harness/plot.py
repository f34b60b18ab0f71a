"""Charts, drawn by matplotlib, each written as SVG and as PNG.

A chart has a ground of its own, so that it is readable on light and dark pages; text stays text in
the SVG. Every series has a name in the legend and a mark of its own, so that colour is never the
only distinction. The same numbers give the same file, byte for byte.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.titles import Title

# Okabe and Ito's palette without yellow, which a white ground hides: distinct for the
# colour-blind.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#5a5a5a")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "//", "..")
"""Hatches of bars when the colours repeat."""

_STYLE: Any = {  # matplotlib's own type lists all its settings
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "kvferry",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlesize": 11.0,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
_INCHES = (9.0, 4.6)
_MOST_INCHES = 24.0
_LEGEND_CHARACTERS = 110
"""Characters of a legend that fit below a chart of that width."""

_TITLE_CHARACTERS = 100
"""Characters of a title's line."""

_CHARACTERS_PER_INCH = 11
"""Characters of group names, with room between them."""

_DOTS_PER_INCH = 110

Series = Mapping[str, Sequence[float | None]]
Bands = Mapping[str, Sequence[tuple[float, float] | None]]


@dataclass(frozen=True)
class Chart:
    """A picture, drawn when it is written."""

    draw: Callable[[Any], None]
    """Draws onto matplotlib's axes."""

    inches: tuple[float, float] = _INCHES

    def svg(self) -> str:
        return self._render("svg").decode()

    def png(self) -> bytes:
        return self._render("png")

    def write(self, path: Path) -> None:
        """Write both kinds: `path` with the suffix `.svg` and with `.png`."""
        path.with_suffix(".svg").write_text(self.svg())
        path.with_suffix(".png").write_bytes(self.png())

    def _render(self, kind: str) -> bytes:
        # Imported here: it takes half a second, and few runs draw anything.
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=self.inches, facecolor="white", layout="constrained")
            self.draw(figure.add_subplot())
            to = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(to, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        return to.getvalue()


def bars(
    title: Title, unit: str, groups: Sequence[str], series: Series, mark: float | None = None, *,
    log: bool = False,
) -> Chart:  # fmt: skip
    """Grouped bars: for each of `groups`, one bar per series. None leaves a gap.

    `mark` draws a dashed line across, for a wall or a goal. With `log` bars begin below 1, and ten
    times as much is one length.
    """

    def draw(axes: Any) -> None:
        width = 0.8 / max(1, len(series))
        for number, (name, values) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            drawn = [(place, value) for place, value in enumerate(values) if value is not None]
            axes.bar(
                [place + shift for place, _ in drawn], [value for _, value in drawn],
                width * 0.92, label=name, color=_of(_COLOURS, number),
                hatch=_of(_HATCHES, number // len(_COLOURS)),
            )  # fmt: skip
        axes.set_xticks(
            range(len(groups)),
            [textwrap.fill(each, fit, break_long_words=False) for each in groups],
        )
        axes.set_xlim(-0.6, max(1, len(groups)) - 0.4)
        axes.grid(visible=False, axis="x")
        _finish(axes, title, unit, mark, bool(series))
        if log:
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.8)

    longest = max((len(word) for each in groups for word in each.split()), default=0)
    needed = (longest + 1) / _CHARACTERS_PER_INCH
    inches = max(_INCHES[0], min(_MOST_INCHES, max(0.9, needed) * len(groups)))
    # A longer line would run into its neighbours.
    fit = max(6, int(inches * _CHARACTERS_PER_INCH / max(1, len(groups))))
    return Chart(draw, (inches, _INCHES[1]))


def lines(
    title: Title,
    unit: str,
    places: Sequence[str],
    series: Series,
    mark: float | None = None,
    bands: Bands | None = None,
    x_unit: str = "",
) -> Chart:
    """One line per series over equally spaced `places`. None interrupts the line.

    `bands` are areas, such as those between the fastest and the slowest trial of a series.
    """

    def draw(axes: Any) -> None:
        xs = list(range(len(places)))
        for number, (name, values) in enumerate(series.items()):
            colour = _of(_COLOURS, number)
            ys = [float("nan") if value is None else value for value in values]
            axes.plot(xs, ys, marker=_of(_MARKS, number), color=colour, label=name)
            between = (bands or {}).get(name, ())
            known = [(x, band) for x, band in zip(xs, between, strict=False) if band is not None]
            axes.fill_between(
                [x for x, _ in known], [band[0] for _, band in known],
                [band[1] for _, band in known], color=colour, alpha=0.15, linewidth=0,
            )  # fmt: skip
        axes.set_xticks(xs, places)
        axes.set_xlabel(x_unit)
        _finish(axes, title, unit, mark, bool(series))

    return Chart(draw)


def over_time(
    title: Title, unit: str, seconds: Sequence[float], series: Series, mark: float | None = None
) -> Chart:
    """One line per series over `seconds`, at any distances. None interrupts the line."""

    def draw(axes: Any) -> None:
        for number, (name, values) in enumerate(series.items()):
            ys = [float("nan") if value is None else value for value in values]
            axes.plot(
                seconds, ys, marker=_of(_MARKS, number), markevery=max(1, len(ys) // 12),
                color=_of(_COLOURS, number), label=name,
            )  # fmt: skip
        axes.set_xlabel("s")
        _finish(axes, title, unit, mark, bool(series))

    return Chart(draw)


def timeline(title: Title, unit: str, lanes: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    """One lane for each name, with a bar from the start to the end of each span."""

    def draw(axes: Any) -> None:
        names = list(lanes)
        for number, name in enumerate(names):
            spans = [(began, ended - began) for began, ended in lanes[name]]
            axes.broken_barh(spans, (number - 0.35, 0.7), color=_of(_COLOURS, number), label=name)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        axes.set_title(textwrap.fill(title.text, _TITLE_CHARACTERS), loc="left")

    return Chart(draw, (_INCHES[0], 1.4 + 0.5 * len(lanes)))


def _finish(axes: Any, title: Title, unit: str, mark: float | None, has_series: bool) -> None:
    if mark is not None:
        axes.axhline(mark, color="#1a1a1a", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    highest = axes.dataLim.y1
    if highest > 0:  # a mark on the edge would be cut in half
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.05 * highest))
    axes.set_ylabel(unit)
    axes.set_title(textwrap.fill(title.text, _TITLE_CHARACTERS), loc="left")
    if has_series:
        names = [text.get_label() for text in axes.get_legend_handles_labels()[0]]
        widest = max(map(len, names), default=1)
        # Each name takes the width of the longest and its mark; names beyond the edge are cut off.
        fit = _LEGEND_CHARACTERS // (widest + 6)
        axes.figure.legend(loc="outside lower center", ncols=max(1, min(4, fit)))


def _of(choices: Sequence[str], number: int) -> str:
    return choices[number % len(choices)]
