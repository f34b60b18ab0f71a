"""CSV of a trace: its columns by their names, and their numbers."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from remote_server.traces.text import Lines
from remote_server.traces.trace import TraceError
from remote_server.values import float_or_nan

Row = dict[str, str]


def columns_of(line: str) -> list[str]:
    """The names in the first line of a file."""
    try:
        return [name.strip() for name in next(csv.reader([line]))]
    except csv.Error:
        return []


def rows_of(path: Path, lines: Lines) -> Iterator[tuple[int, Row]]:
    """The rows below the names, each with the number of its line. Raises `TraceError`."""
    _, first = next(lines)
    names = columns_of(first)
    for number, line in lines:
        try:
            values = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise TraceError(f"{path}, line {number:,}: no CSV: {error}") from None
        if len(values) != len(names):
            raise TraceError(
                f"{path}, line {number:,}: {len(values)} values for {len(names)} columns"
            )
        yield number, dict(zip(names, map(str.strip, values), strict=True))


def whole(row: Row, column: str) -> int:
    """Raises `ValueError` with a sentence."""
    value = float_or_nan(row[column])
    if not value.is_integer() or value < 0:  # not a number is no integer either
        raise ValueError(f"{column} is {row[column]!r:.40}, not a whole number")
    return int(value)


def seconds(row: Row, column: str) -> float:
    """Raises `ValueError` with a sentence."""
    value = float_or_nan(row[column])
    if not math.isfinite(value):
        raise ValueError(f"{column} is {row[column]!r:.40}, not seconds")
    return value
