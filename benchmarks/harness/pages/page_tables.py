"""The tables of the page: a record's rows and figures, and the figures of a source."""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from benchmarks.harness import source
from benchmarks.harness.record import Figure, Row
from benchmarks.harness.source import Cell
from benchmarks.harness.summary import summarize
from benchmarks.harness.table import digits

_MOST_COLUMNS = 13

_ONE_LINE = 48
"""Characters of a reason that stay on one line."""

_UNITS = {"us": "µs"}
"""Units of records as they are shown."""

_ALL_HEADS = ("model", "operation", "transport", "integrity", "bytes", "median s", "fastest",
              "slowest", "GB/s", "× memcpy", "× wall", "")  # fmt: skip


def of_rows(rows: Sequence[Row]) -> Iterable[str]:
    """Medians side by side; then every value of each row, folded away where the first table is
    enough."""
    if not rows:
        return
    overview = _side_by_side(rows)
    everything = _table("", *_without_empty(_ALL_HEADS, [_everything_of(row) for row in rows]))
    if overview is None:
        yield everything
        return
    yield overview
    yield f"<details><summary>All {len(rows)} rows, with fastest, slowest and ratios</summary>"
    yield everything
    yield "</details>"


def _side_by_side(rows: Sequence[Row]) -> str | None:
    """A line for each model and transport, a column for each operation, or transposed where that
    is narrower. None when it would have a single line or column, or too many columns."""
    operations = list(dict.fromkeys(row.operation for row in rows))
    places = list(dict.fromkeys(_place(row) for row in rows))
    if min(len(operations), len(places)) < 2 or min(len(operations), len(places)) > _MOST_COLUMNS:
        return None
    measured = [row for row in rows if row.sample.measured]
    speeds = all(row.gb_per_s for row in measured)
    unit = "GB/s, medians" if speeds else "s, medians"
    values = {(_place(row), row.operation): row.gb_per_s if speeds else row.seconds for row in rows}
    reasons = {(_place(row), row.operation): row.reason for row in rows if row.reason}
    varying = [number for number in range(len(places[0])) if len({p[number] for p in places}) > 1]
    common = ", ".join(part for n, part in enumerate(places[0]) if n not in varying and part)
    most = max((value for value in values.values() if value), default=1.0)
    lines: list[list[Cell]]
    if len(operations) <= len(places):
        heads = [*(("model", "by way of", "integrity")[n] for n in varying), *operations]
        lines = [
            [*(place[n] for n in varying), *(values.get((place, each)) for each in operations),
             _why({each: reasons.get((place, each), "") for each in operations})]
            for place in places
        ]  # fmt: skip
    else:
        names = {place: " ".join(place[n] for n in varying if place[n]) or "-" for place in places}
        heads = ["", *names.values()]
        lines = [
            [each, *(values.get((place, each)) for place in places),
             _why({names[place]: reasons.get((place, each), "") for place in places})]
            for each in operations
        ]  # fmt: skip
    if not reasons:
        lines = [line[:-1] for line in lines]
    else:
        heads.append("")
    return _table(f"{common} ({unit})" if common else unit, heads, lines, most)


def _place(row: Row) -> tuple[str, str, str]:
    integrity = {True: "checked", False: "unchecked", None: ""}[row.integrity]
    return row.model, row.transport or "", integrity


def _why(reasons: dict[str, str]) -> str:
    """One reason that all share is shown once."""
    given = {name: reason for name, reason in reasons.items() if reason}
    if len(given) == len(reasons) and len(set(given.values())) == 1:
        return next(iter(given.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in given.items())


def _without_empty(
    heads: Sequence[str], lines: Sequence[Sequence[Cell]]
) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    """Without empty columns."""
    kept = [n for n in range(len(heads)) if any(line[n] not in (None, "") for line in lines)]
    return [heads[n] for n in kept], [[line[n] for n in kept] for line in lines]


def _everything_of(row: Row) -> list[Cell]:
    seconds = summarize(row.sample.values) if row.sample.measured else None
    times = (seconds.median, seconds.min, seconds.max) if seconds else (None,) * 3
    integrity = {True: "on", False: "off", None: ""}[row.integrity]
    return [row.model, row.operation, row.transport or "", integrity, row.num_bytes or None, *times,
            row.gb_per_s, row.ratio_to_memcpy, row.ratio_to_wall, row.reason]  # fmt: skip


def of_goals(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The table of a benchmark's goals."""
    return _table("Goals", *_without_empty(heads, lines), kind="goals")


def of_figures(figures: Sequence[Figure]) -> Iterable[str]:
    """A table for all figures that have the same values; one line for each other figure."""
    alike: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        unit = _UNITS.get(figure.unit, figure.unit)
        alike.setdefault((unit, *figure.values), []).append(figure)
    single: list[list[Cell]] = []
    for (unit, *names), group in alike.items():
        if len(group) == 1:
            (one,) = group
            values = "; ".join(f"{name} {digits(value)}" for name, value in one.values.items())
            single.append([one.name, one.transport or "", f"{unit}: {values}" if unit else values])
            continue
        by_way_of = any(one.transport for one in group)
        heads = ["", *(["by way of"] if by_way_of else []), *names]
        lines: list[list[Cell]] = [
            [one.name, *([one.transport or ""] if by_way_of else []), *one.values.values()]
            for one in group
        ]
        yield _table(unit, heads, lines)
    if single:
        yield _table("", *_without_empty(["figure", "by way of", ""], single))


def of_source(table: source.Table) -> str:
    caption = f"{table.name} ({table.unit})" if table.unit else table.name
    return _table(caption, table.heads, table.rows, show=_as_reported)


def _table(
    caption: str,
    heads: Sequence[str],
    lines: Sequence[Sequence[Cell]],
    most: float | None = None,
    show: Callable[[float], str] = digits,
    kind: str = "",
) -> str:
    """A column that contains a word holds words. Numbers have a bar behind them, full at `most`.
    The last column wraps when it has no head. `kind` is the table's class in the page's style."""
    for line in lines:
        if len(line) != len(heads):
            raise ValueError(f"{len(heads)} columns, but a row has {len(line)}: {line}")
    words = [any(isinstance(line[place], str) for line in lines) for place in range(len(heads))]

    def cell(place: int, value: Cell) -> str:
        text = "" if value is None else escape(value) if isinstance(value, str) else show(value)
        if place and place == len(heads) - 1 and not heads[place]:
            kind = "why long" if len(text) > _ONE_LINE else "why"
            return f'<td class="{kind}">{text}</td>'
        if words[place]:
            return f"<td>{text}</td>"
        if most and value:
            part = 100 * float(value) / most
            return f'<td class="n bar" style="--part:{part:.0f}%">{text}</td>'
        return f'<td class="n">{text}</td>'

    first = "".join(
        f"<th>{escape(head)}</th>" if words[place] else f'<th class="n">{escape(head)}</th>'
        for place, head in enumerate(heads)
    )
    body = "\n".join(
        f"<tr>{''.join(cell(place, value) for place, value in enumerate(line))}</tr>"
        for line in lines
    )
    style = f' class="{kind}"' if kind else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table{style}>{title}\n<tr>{first}</tr>\n{body}\n</table></div>'


def _as_reported(value: float) -> str:
    """Every digit that the document prints."""
    return f"{value:,.6g}"
