"""Tables of aligned text: numbers to the right, words to the left."""

import re
from collections.abc import Sequence

Cell = str | float | int | None

_NUMBER = re.compile(r"[<~]?-?[\d,.]+( ?(x|%|ms|us|s))?|-")


def render(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Lines of equal columns. None is shown as `-`, floats with three significant digits."""
    cells = [[_show(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"{len(headers)} columns, but a row has {len(row)}: {row}")
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    right = [
        all(_NUMBER.fullmatch(cell) for cell in column)
        for column in (zip(*cells, strict=True) if cells else [()] * len(headers))
    ]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def digits(value: float) -> str:
    """Three significant digits, never in scientific notation: 0.0331, 1.25, 431."""
    if value == 0:
        return "0"
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    if size < 0.1:
        places = 4 if size >= 0.001 else 6
    return f"{value:,.{places}f}"


def _show(cell: Cell) -> str:
    if cell is None:
        return "-"
    return digits(cell) if isinstance(cell, float) else str(cell)
