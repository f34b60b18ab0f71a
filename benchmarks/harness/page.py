"""Records as one HTML page, of each benchmark and command the latest. Nothing is loaded by it."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.harness.record import Figure, Record, RecordError, Row
from benchmarks.harness.statistics import summarize

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: CanvasText; background: Canvas; }
h2 { margin-top: 3rem; border-top: 1px solid GrayText; padding-top: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid
         color-mix(in srgb, CanvasText 15%, Canvas); white-space: nowrap; }
td.n, th.n { text-align: right; }
td.why { color: GrayText; white-space: normal; }
code { font-size: 90%; overflow-wrap: anywhere; }
.about { color: GrayText; }
"""

_ROW_HEADS = ("model", "operation", "transport", "integrity", "bytes", "median s", "fastest",
              "slowest", "GB/s", "× memcpy", "× wall", "")  # fmt: skip
_TEXT_COLUMNS = 4


def latest(folder: Path) -> tuple[list[Record], list[str]]:
    """Of each benchmark and command the record that was started last; and a line for each JSON
    file that is no record."""
    found: dict[tuple[str, str], Record] = {}
    others = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = Record.read(file)
        except RecordError as error:
            others.append(str(error).replace(str(folder), folder.name))
            continue
        key = (record.benchmark, record.command)
        if key not in found or found[key].started < record.started:
            found[key] = record
    return [found[key] for key in sorted(found)], others


def page(records: Sequence[Record], others: Sequence[str], questions: Mapping[str, str]) -> str:
    """`questions` are by module; a record of a benchmark that is gone has none."""
    parts = ["<h1>Benchmarks</h1>", "<p>GB are 10⁹ bytes. Ratios are within one run; figures of "
             "two machines say nothing about each other.</p>"]  # fmt: skip
    for number, record in enumerate(records):
        parts += _section(f"r{number}", record, questions.get(record.benchmark, ""))
    if others:
        parts += ["<h2>Left out</h2>", *(f"<p>{escape(line)}</p>" for line in others)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Benchmarks</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _section(anchor: str, record: Record, question: str) -> Iterable[str]:
    yield f'<h2 id="{anchor}">{escape(question or record.benchmark)}</h2>'
    yield f"<p><code>{escape(record.command)}</code></p>"
    about = [record.started, record.describe_machine()]
    if record.stolen_percent is not None:
        about.append(f"{record.stolen_percent:g} % of its CPU time was given to other machines")
    if record.interrupted:
        about.append("interrupted: not everything was measured")
    about += [f"{name} {version}" for name, version in record.versions.items()]
    about += [f"{name} = {value}" for name, value in record.parameters.items()]
    yield f'<p class="about">{escape("; ".join(map(str, about)))}</p>'
    if record.rows:
        yield _table(_ROW_HEADS, map(_row, record.rows))
    if record.figures:
        heads = ("figure", "transport", "unit", "values")
        yield _table(heads, map(_figure, record.figures), text_columns=len(heads))


def _row(row: Row) -> list[str]:
    seconds = summarize(row.sample.values) if row.sample.measured else None
    times = (seconds.median, seconds.min, seconds.max) if seconds else (None,) * 3
    integrity = {True: "on", False: "off", None: ""}[row.integrity]
    ratios = (row.gb_per_s, row.ratio_to_memcpy, row.ratio_to_wall)
    return [row.model, row.operation, row.transport or "", integrity,
            f"{row.num_bytes:,}" if row.num_bytes else "",
            *map(_number, (*times, *ratios)), row.reason]  # fmt: skip


def _figure(figure: Figure) -> list[str]:
    values = "; ".join(f"{name} {_number(value)}" for name, value in figure.values.items())
    return [figure.name, figure.transport or "", figure.unit, values]


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = _TEXT_COLUMNS
) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        last = len(heads) - 1
        kinds = ["" if i < text_columns else ' class="why"' if i == last else ' class="n"'
                 for i in range(len(cells))]  # fmt: skip
        inside = "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{inside}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n{line(heads, "th")}\n{body}\n</table></div>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
