"""The triangle of times as a picture: the cells as printed, and the times by level."""

import io
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness.table import digits
from examples.token_sources import CACHED, COMPUTED, DISK, ENGINE, MEMORY, POOL, SERVER

if TYPE_CHECKING:
    from examples.triangle import Triangle

FORMATS = (".svg", ".png")

# Light enough for black figures on all of them; colour is never the only distinction.
_COLOURS = {
    COMPUTED: "#d9d9d9", ENGINE: "#a6dba0", POOL: "#c7e9f1", MEMORY: "#9ecae1", DISK: "#fdcc8a",
    SERVER: "#9ecae1", CACHED: "#a6dba0",
}  # fmt: skip
_OTHER = "#ffffff"


class NoPicture(RuntimeError):
    """The picture cannot be drawn. One line, with a remedy."""


def check(path: Path) -> None:
    """Raises `NoPicture` if `draw` to this path would fail. Call it before measuring."""
    if path.suffix not in FORMATS:
        raise NoPicture(f"--plot {path}: a picture is .svg or .png, by the name of its file")
    if not path.resolve().parent.is_dir():
        raise NoPicture(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPicture("--plot: needs matplotlib: pip install matplotlib") from None


def draw(triangle: "Triangle", title: str, path: Path) -> None:
    """Write the picture; the same cells give the same bytes with the same matplotlib."""
    path.write_bytes(Drawing(triangle, title).render(path.suffix.removeprefix(".")))


class Drawing(NamedTuple):
    """A triangle's picture, drawn when it is asked for."""

    triangle: "Triangle"
    title: str

    def svg(self) -> str:
        return self.render("svg").decode()

    def render(self, kind: str) -> bytes:
        """As `svg` or `png`."""
        return _render(self.triangle, self.title, kind)


def _render(triangle: "Triangle", title: str, kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and ids are not random.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 10}):
        figure = Figure(figsize=(10.5, 4.6), facecolor="white", layout="constrained")
        cells, levels = figure.subplots(1, 2, width_ratios=(1.25, 1))
        figure.suptitle(title, fontsize=11)
        _draw_cells(cells, triangle)
        _draw_levels(levels, triangle)
        metadata = {"Date": None} if kind == "svg" else None
        to = io.BytesIO()
        figure.savefig(to, format=kind, dpi=110, metadata=metadata)
        return to.getvalue()


def _draw_cells(axes: Any, triangle: "Triangle") -> None:
    from matplotlib.patches import Rectangle

    for cell in triangle.cells:
        place = cell.document - 0.5, cell.round - 0.5
        colour = _COLOURS.get(cell.level, _OTHER)
        hatch = "///" if cell.mixed else None
        axes.add_patch(
            Rectangle(place, 1, 1, facecolor=colour, edgecolor="white", linewidth=2, hatch=hatch)
        )
        axes.text(cell.document, cell.round, digits(cell.seconds), ha="center", va="center")
    axes.set(
        xlim=(0.5, triangle.n + 0.5), ylim=(triangle.n + 0.5, 0.5),
        xticks=range(1, triangle.n + 1), yticks=range(1, triangle.n + 1),
        xlabel="document", ylabel="round", title="first token, seconds",
    )  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _draw_levels(axes: Any, triangle: "Triangle") -> None:
    """One row a level: a dot for each cell, a mark at their median, on a logarithmic scale."""
    levels = triangle.by_level()
    for place, (level, seconds) in enumerate(levels.items()):
        middle = median(seconds)
        axes.axhspan(place - 0.36, place + 0.36, color=_COLOURS.get(level, _OTHER), zorder=0)
        axes.plot(seconds, [place] * len(seconds), "o", color="#333333", markersize=4, zorder=2)
        axes.plot([middle] * 2, [place - 0.36, place + 0.36], color="#333333", zorder=2)
        axes.annotate(
            f"{digits(middle)} s", (max(seconds), place), xytext=(8, 0), textcoords="offset points",
            va="center",
        )  # fmt: skip
    drawn = [value for seconds in levels.values() for value in seconds] or [0.1, 1.0]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(
        xlim=(min(drawn) / 2, max(drawn) * 4), yticks=range(len(levels)), yticklabels=levels,
        xlabel="seconds, and the median of each level", title="the same by level",
    )  # fmt: skip
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
