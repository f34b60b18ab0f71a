"""Charts as SVG, written directly: two kinds are needed, and a plotting library is 40 MB.

Readable on light and dark pages: the colours follow the reader's setting, and every series has a
name in the legend, so that nothing is told by colour alone.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's palette without black and yellow: distinct for the colour-blind, on both grounds.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a8a8a")

_STYLE = """<style>
  text { font: 12px system-ui, sans-serif; fill: #1a1a1a }
  .title { font-weight: 600; font-size: 14px }
  .grid { stroke: #d8d8d8 } .axis { stroke: #555 } .mark { stroke: #1a1a1a; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8e8e8 } .grid { stroke: #3c3c3c } .axis { stroke: #aaa } .mark { stroke: #eee }
  }
</style>"""

_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 60
_LEGEND_LINE = 18

Series = Mapping[str, Sequence[float | None]]


def bars(
    title: str, unit: str, groups: Sequence[str], series: Series, mark: float | None = None
) -> str:
    """Grouped bars: for each of `groups`, one bar per series. None leaves a gap.

    `mark` draws a dashed line across, for a wall or a goal.
    """
    frame = _Frame(title, unit, series, mark)
    slot = frame.width / max(1, len(groups))
    bar = slot * 0.8 / max(1, len(series))
    for place, group in enumerate(groups):
        left = _LEFT + place * slot
        frame.label(left + slot / 2, group)
        for number, (name, values) in enumerate(series.items()):
            value = values[place]
            if value is None:
                continue
            x, y = left + slot * 0.1 + number * bar, frame.y(value)
            frame.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" '
                f'height="{frame.bottom - y:.1f}" fill="{_colour(number)}">'
                f"<title>{escape(f'{group}, {name}: {value:.4g} {unit}')}</title></rect>"
            )
    return frame.svg()


def lines(
    title: str, unit: str, places: Sequence[str], series: Series, mark: float | None = None
) -> str:
    """One line per series over equally spaced `places`. None interrupts the line."""
    frame = _Frame(title, unit, series, mark)
    step = frame.width / max(1, len(places) - 1)
    xs = [_LEFT + place * step for place in range(len(places))]
    for x, place in zip(xs, places, strict=True):
        frame.label(x, place)
    for number, (name, values) in enumerate(series.items()):
        run: list[str] = []
        for x, value in [*zip(xs, values, strict=True), (0.0, None)]:
            if value is not None:
                run.append(f"{x:.1f},{frame.y(value):.1f}")
                frame.parts.append(
                    f'<circle cx="{x:.1f}" cy="{frame.y(value):.1f}" r="3.5" '
                    f'fill="{_colour(number)}"><title>{escape(f"{name}: {value:.4g} {unit}")}'
                    "</title></circle>"
                )
            elif run:
                frame.parts.append(
                    f'<polyline points="{" ".join(run)}" fill="none" stroke-width="2" '
                    f'stroke="{_colour(number)}"/>'
                )
                run = []
    return frame.svg()


class _Frame:
    """Axes, grid, legend, and the scale; the caller adds what lies between."""

    def __init__(self, title: str, unit: str, series: Series, mark: float | None) -> None:
        drawn = [value for values in series.values() for value in values if value is not None]
        step = _nice_step(max([*drawn, mark or 0.0, 1e-9]))
        self.top_value = step * math.ceil(max([*drawn, mark or 0.0, 1e-9]) / step)
        self.width = _WIDTH - _LEFT - _RIGHT
        per_line = 3
        self._legend_lines = -(-len(series) // per_line)
        self._top = _TOP + self._legend_lines * _LEGEND_LINE
        self.bottom = _HEIGHT - _BOTTOM + self._legend_lines * _LEGEND_LINE
        self.parts = [f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>']
        for number, name in enumerate(series):
            x = _LEFT + number % per_line * self.width / per_line
            y = 44.0 + number // per_line * _LEGEND_LINE
            self.parts.append(
                f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{_colour(number)}"/>'
                f'<text x="{x + 16:.0f}" y="{y}">{escape(name)}</text>'
            )
        for tick in range(round(self.top_value / step) + 1):
            y = self.y(tick * step)
            self.parts.append(
                self._across("grid", y)
                + f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step:g}</text>'
            )
        self.parts.append(
            self._across("axis", self.bottom)
            + f'<text transform="translate(18 {(self._top + self.bottom) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(unit)}</text>'
        )
        if mark is not None:
            self.parts.append(self._across("mark", self.y(mark)))

    @staticmethod
    def _across(kind: str, y: float) -> str:
        right = _WIDTH - _RIGHT
        return f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def y(self, value: float) -> float:
        return self.bottom - value / self.top_value * (self.bottom - self._top)

    def label(self, x: float, text: str) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{self.bottom + 20}" text-anchor="middle">{escape(text)}</text>'
        )

    def svg(self) -> str:
        height = _HEIGHT + self._legend_lines * _LEGEND_LINE
        return "\n".join(
            [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
             _STYLE, *self.parts, "</svg>\n"]
        )  # fmt: skip


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, so that four to ten of them reach `largest`."""
    power = 10.0 ** math.floor(math.log10(largest / 4))
    return next(
        (factor * power for factor in (1, 2, 5) if largest / (factor * power) <= 8), 10 * power
    )
