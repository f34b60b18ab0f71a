"""The source's three charts and the parts of a read, drawn by matplotlib, as SVG for embedding in a
page.

Lines and letters take the colour of the surrounding text, so one picture serves light and dark.
Each point and each bar is a group with its exact values as a title, which a browser shows without a
script, and with the name of its series, which `interactive` uses.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from benchmarks.store_sweep.points import PARTS, Percentiles, Result

_TEXT = "#010203"  # stands for the colour of the surrounding text; used for nothing else
# The colours of Okabe and Ito's palette that are legible on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7")
_MARKS = ("o", "s", "^", "D")
_STYLE: Any = {  # matplotlib's own type lists all its settings
    "svg.fonttype": "none",  # text, not outlines
    "font.family": "sans-serif",
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "hatch.color": _TEXT,
    "grid.color": "#888888",
    "grid.alpha": 0.35,
    "legend.frameon": False,
}


class Chart(NamedTuple):
    """One picture."""

    name: str
    svg: str
    series: dict[str, str]
    """Name and colour of each series that can be switched off."""


Tips = dict[str, str]
"""Values of each point in words, by its id, `SERIES~NUMBER`."""


def latency(results: Sequence[Result], operation: str) -> Chart:
    """Percentiles of `operation` ("lookup" or "read") over thousands of tokens a second.

    Every point is drawn. Beyond the peak, where more clients give fewer tokens and the curve turns
    back, marks are hollow. One that was not measured is a mark at the lower edge. The line
    below the axis counts them. Logarithmic, because the slowest of thousands would flatten the
    median.
    """
    peak = max(range(len(results)), key=lambda place: results[place].tokens_per_s)
    tips: Tips = {}
    series: dict[str, str] = {}
    values = {
        name: [getattr(getattr(result, operation), name) for result in results]
        for name in Percentiles._fields
    }
    measured = [value for some in values.values() for value in some if _is_drawn(value)]
    edge = _line_below(0.999 * min(measured)) if measured else 1.0

    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        xs = [result.tokens_per_s / 1e3 for result in results]
        for number, (name, ys) in enumerate(values.items()):
            if not any(map(_is_drawn, ys)):
                continue
            series[name] = colour = _COLOURS[number]
            for place, (x, y, result) in enumerate(zip(xs, ys, results, strict=True)):
                mark = _MARKS[number] if _is_drawn(y) else "x"
                axes.plot([x], [y if _is_drawn(y) else edge], mark, label="" if place else name,
                          color=colour, markerfacecolor=colour if place <= peak else "none",
                          clip_on=False, gid=f"{name}~{place}")  # fmt: skip
                tips[f"{name}~{place}"] = (
                    f"{operation} {name}: {f'{y:.2f} ms' if _is_drawn(y) else 'not measured'} at "
                    f"{result.point.concurrency} at once ({result.point}), {x:.1f} K tokens/s"
                    f"{_errors_of(result)}"
                )
        notes = _notes(results, peak, values)
        axes.set_xlabel("\n".join(["thousands of tokens a second", *notes]))
        axes.set_ylabel(f"{operation}, ms")
        axes.set_yscale("log")
        axes.set_ylim(bottom=edge)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        if series:
            below = (0.5, -0.15 - 0.06 * len(notes))
            legend = axes.legend(loc="upper center", bbox_to_anchor=below, ncols=len(_MARKS))
            legend.set_gid("legend")
        axes.spines["right"].set_visible(False)
        places, names = _without_overlap(xs, [f"{r.point.concurrency}" for r in results])
        above = axes.secondary_xaxis("top")
        above.set_xticks(places, names)
        above.set_xlabel("conversations at once")

    return Chart(operation, _svg(draw, f"{operation}-", tips), series)


def _is_drawn(value: float | None) -> bool:
    """Whether a logarithmic axis has a place for it."""
    return value is not None and 0 < value < math.inf


def _errors_of(result: Result) -> str:
    return f", {result.errors:,} errors" if result.errors else ""


def _notes(
    results: Sequence[Result], peak: int, values: Mapping[str, Sequence[float | None]]
) -> list[str]:
    """Explanations of a chart's marks, a line each."""
    notes = []
    if beyond := len(results) - 1 - peak:
        notes.append(f"hollow: {beyond} of {len(results)} points, beyond the peak")
    nowhere = [name for name, ys in values.items() if not any(map(_is_drawn, ys))]
    if nowhere:
        notes.append(f"not measured at any point: {', '.join(nowhere)}")
    at_edge = sum(
        not _is_drawn(y) for name, ys in values.items() if name not in nowhere for y in ys
    )
    if at_edge:
        notes.append(f"x at the lower edge: {at_edge} values that were not measured")
    if wrong := [f"{one.point.concurrency}" for one in results if one.errors]:
        notes.append(f"with errors: {', '.join(wrong)} at once")
    return notes


def _without_overlap(xs: list[float], names: list[str]) -> tuple[list[float], list[str]]:
    """Merge the names of neighbours that are too close together."""
    room = (max(xs) - min(xs)) / 14
    groups: list[list[int]] = []
    for number in sorted(range(len(xs)), key=xs.__getitem__):
        if groups and xs[number] - xs[groups[-1][-1]] < room:
            groups[-1].append(number)
        else:
            groups.append([number])
    places = [sum(xs[number] for number in group) / len(group) for group in groups]
    return places, [", ".join(names[number] for number in group) for group in groups]


def _line_below(value: float) -> float:
    """The nearest lower value of 1, 2, 5, 10, 20, …, which have grid lines."""
    power = 10 ** math.floor(math.log10(value))
    return float(max(step * power for step in (1, 2, 5) if step * power <= value))


def throughput(results: Sequence[Result]) -> Chart:
    """Conversations a second and thousands of tokens a second, over the number at once."""
    tips: Tips = {}
    series = {"conversations a second": _COLOURS[0], "thousands of tokens a second": _COLOURS[1]}

    def bars(axes: Any, shift: float, values: Sequence[float], name: str, **style: Any) -> None:
        places = [place + shift for place in range(len(values))]
        for place, bar in enumerate(axes.bar(places, values, 0.38, color=series[name], **style)):
            bar.set_gid(f"{name}~{place}")
            point = results[place].point
            tips[f"{name}~{place}"] = (
                f"{values[place]:.1f} {name} at {point.concurrency} at once ({point})"
                f"{_errors_of(results[place])}"
            )

    def draw(axes: Any) -> None:
        left, right_name = series
        bars(axes, -0.2, [one.tps for one in results], left, label=f"{left} (left)")
        right = axes.twinx()
        bars(right, 0.2, [one.tokens_per_s / 1e3 for one in results], right_name,
             label=f"{right_name} (right)", hatch="//")  # fmt: skip
        _name_points(axes, results)
        axes.set_ylabel(left)
        right.set_ylabel(right_name)
        right.grid(visible=False)
        axes.grid(visible=False, axis="x")
        handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, loc="upper left").set_gid("legend")

    return Chart("throughput", _svg(draw, "throughput-", tips), series)


def split(results: Sequence[Result]) -> Chart | None:
    """The parts of a read, stacked, over the number at once; None without any. A point without
    them has its place and the words for it."""
    has_any = any(result.split is not None for result in results)
    tips: Tips = {}
    series = dict(zip(PARTS, _COLOURS, strict=True))

    def draw(axes: Any) -> None:
        known = [place for place, result in enumerate(results) if result.split is not None]
        below = [0.0] * len(known)
        for number, name in enumerate(PARTS):
            heights = [one.split.parts[name] for one in results if one.split is not None]
            drawn = axes.bar(known, heights, 0.6, bottom=below, color=series[name],
                             label=name, hatch=("", "//", "..", "\\\\", "xx")[number])  # fmt: skip
            for place, height, bar in zip(known, heights, drawn, strict=True):
                bar.set_gid(f"{name}~{place}")
                point = results[place].point
                tips[f"{name}~{place}"] = (
                    f"{name}: {height:.3f} ms of a read (mean) at {point.concurrency} at "
                    f"once ({point})"
                )
            below = [under + height for under, height in zip(below, heights, strict=True)]
        for place, result in enumerate(results):
            if result.split is None:
                axes.text(place, 0, "not measured", rotation=90, ha="center", va="bottom")
        _name_points(axes, results)
        axes.set_ylabel("mean of a read, ms")
        axes.grid(visible=False, axis="x")
        axes.legend(loc="upper left").set_gid("legend")

    return Chart("split", _svg(draw, "split-", tips), series) if has_any else None


def _name_points(axes: Any, results: Sequence[Result]) -> None:
    names = [
        f"{one.point.concurrency}\n({one.point})" + ("\nerrors" if one.errors else "")
        for one in results
    ]
    axes.set_xticks(range(len(results)), names)
    axes.set_xlabel("conversations at once (processes x clients)")


def _svg(draw: Callable[[Any], None], prefix: str, tips: Mapping[str, str]) -> str:
    """`draw` fills `tips`."""
    # Imported here: it takes half a second, and most runs draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        figure = Figure(figsize=(8.0, 4.2), layout="constrained")
        draw(figure.add_subplot())
        to = io.StringIO()
        figure.savefig(to, format="svg", transparent=True, metadata={"Date": None})
    return _with_tips(_to_set_into_a_page(to.getvalue(), prefix), prefix, tips)


def _with_tips(svg: str, prefix: str, tips: Mapping[str, str]) -> str:
    for name, tip in tips.items():
        series, _, place = name.partition("~")
        group = f'<g id="{prefix}{name}">'
        assert svg.count(group) == 1, f"matplotlib drew no {name}"
        id_ = f"{prefix}{series.replace(' ', '-')}-{place}"
        svg = svg.replace(
            group,
            f'<g id="{id_}" class="point" role="img" data-series="{series}" data-place="{place}" '
            f'aria-label="{escape(tip)}"><title>{escape(tip)}</title>',
        )
    return svg


def _to_set_into_a_page(svg: str, prefix: str) -> str:
    """Remove XML's head, addresses of schemas and licences, and make names unique."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{prefix}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    return svg.replace(_TEXT, "currentColor")
