"""The source's three charts, drawn by matplotlib, as SVG to be set into a page.

Lines and letters take the colour of the text around them, so one picture serves light and dark.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.store_sweep.points import Percentiles, Result

_TEXT = "#010203"  # stands for the colour of the text around, and is drawn nowhere else
# Okabe and Ito's palette, those of it that are read on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")
_MARKS = ("o", "s", "^", "D")
_STYLE: Any = {  # matplotlib's own type of it is a list of all its settings
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


def latency(results: Sequence[Result], operation: str) -> str:
    """Percentiles of `operation` ("lookup" or "read") over thousands of tokens a second.

    Up to the peak: beyond it more clients give fewer tokens, and the curve would turn back. In
    powers of ten, because the slowest of thousands would press the median flat.
    """
    peak = max(range(len(results)), key=lambda place: results[place].tokens_per_s)
    shown = results[: peak + 1]

    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        xs = [result.tokens_per_s / 1e3 for result in shown]
        for number, name in enumerate(Percentiles._fields):
            ys = [getattr(getattr(result, operation), name) for result in shown]
            if None in ys:
                continue
            axes.plot(xs, ys, _MARKS[number], label=name,
                      color=_COLOURS[number])  # fmt: skip
        axes.set_xlabel("thousands of tokens a second")
        axes.set_ylabel(f"{operation}, ms")
        axes.set_yscale("log")
        axes.set_ylim(bottom=_line_below(axes.get_ylim()[0]))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(_MARKS))
        axes.spines["right"].set_visible(False)
        places, names = _without_overlap(xs, [f"{r.point.concurrency}" for r in shown])
        above = axes.secondary_xaxis("top")
        above.set_xticks(places, names)
        above.set_xlabel("conversations at once")

    return _svg(draw, f"{operation}-")


def _without_overlap(xs: list[float], names: list[str]) -> tuple[list[float], list[str]]:
    """Names of neighbours that are too close to stand side by side become one."""
    room = (max(xs) - min(xs)) / 25
    groups: list[list[int]] = []
    for number in sorted(range(len(xs)), key=xs.__getitem__):
        if groups and xs[number] - xs[groups[-1][-1]] < room:
            groups[-1].append(number)
        else:
            groups.append([number])
    places = [sum(xs[number] for number in group) / len(group) for group in groups]
    return places, [", ".join(names[number] for number in group) for group in groups]


def _line_below(value: float) -> float:
    """The nearest of 1, 2, 5, 10, 20, …, which have lines across."""
    power = 10 ** math.floor(math.log10(value))
    return float(max(step * power for step in (1, 2, 5) if step * power <= value))


def throughput(results: Sequence[Result]) -> str:
    """Conversations a second and thousands of tokens a second, over the number at once."""

    def draw(axes: Any) -> None:
        places = range(len(results))
        axes.bar([place - 0.2 for place in places], [result.tps for result in results], 0.38,
                 color=_COLOURS[0], label="conversations a second (left)")  # fmt: skip
        right = axes.twinx()
        right.bar([place + 0.2 for place in places],
                  [result.tokens_per_s / 1e3 for result in results], 0.38, color=_COLOURS[1],
                  label="thousands of tokens a second (right)", hatch="//")  # fmt: skip
        axes.set_xticks(places, [f"{r.point.concurrency}\n({r.point})" for r in results])
        axes.set_xlabel("conversations at once (processes x clients)")
        axes.set_ylabel("conversations a second")
        right.set_ylabel("thousands of tokens a second")
        right.grid(visible=False)
        axes.grid(visible=False, axis="x")
        handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, loc="upper left")

    return _svg(draw, "throughput-")


def _svg(draw: Callable[[Any], None], prefix: str) -> str:
    # Imported here: it takes half a second, and most runs draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        figure = Figure(figsize=(8.0, 4.2), layout="constrained")
        draw(figure.add_subplot())
        to = io.StringIO()
        figure.savefig(to, format="svg", transparent=True, metadata={"Date": None})
    return _to_set_into_a_page(to.getvalue(), prefix)


def _to_set_into_a_page(svg: str, prefix: str) -> str:
    """Without XML's head, addresses of schemas and licences, and names that another chart has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{prefix}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    return svg.replace(_TEXT, "currentColor")
