"""An HTML page of the latest record of each benchmark and command. The page loads nothing."""

import base64
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.pages import goals, html
from benchmarks.harness.pages import page_tables as tables
from benchmarks.harness.record import Record, RecordError
from benchmarks.harness.source import Document, Table

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 15%, Canvas);
        --soft: color-mix(in srgb, CanvasText 5%, Canvas);
        --bar: color-mix(in srgb, #0072b2 30%, Canvas);
        --quiet: color-mix(in srgb, CanvasText 65%, Canvas); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: CanvasText; background: Canvas; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 3rem; padding-top: 1rem;
     border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
nav ol { columns: 22rem; column-gap: 2rem; padding-left: 1.4rem; }
nav li { break-inside: avoid; margin-bottom: .3rem; }
a { color: LinkText; }
.wide, pre { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { background: var(--soft); }
td.n, th.n { text-align: right; }
th.n { white-space: normal; vertical-align: bottom; }
td.bar { background: linear-gradient(to right, var(--bar) var(--part), transparent var(--part));
         min-width: 5rem; }
.goals td, .goals th { white-space: normal; padding: .15rem .4rem; }
.goals td:first-child { min-width: 8rem; }
td.why { color: var(--quiet); } td.long { white-space: normal; min-width: min(22rem, 60vw); }
code { font-size: 90%; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; background: #fff; }
.chart { cursor: zoom-in; } .chart:focus { cursor: auto; } .chart:focus img { max-width: none; }
.about, summary, li small { color: var(--quiet); }
.about { overflow-wrap: anywhere; }
summary { cursor: pointer; }
.source { border-left: 4px solid #e69f00; background: var(--soft); padding: .3rem 1rem;
          margin-top: 1.5rem; }
dl.corrections dt { margin-top: .4rem; } dl.corrections dd { margin-left: 1.4rem; }
"""

_LARGEST_PICTURE_BYTES = 200_000
"""A bound on pictures, so that the page can be sent as one file."""

_PIXELS_PER_POINT = 96 / 72


class Shown(NamedTuple):
    """A record, and the pictures in its folder."""

    record: Record
    pictures: Sequence[Path] = ()


def latest(folder: Path) -> tuple[list[Shown], list[str]]:
    """The record last started for each benchmark and command, and a line for each JSON file that
    is not a record."""
    files = sorted(folder.glob("*.json"))
    found: dict[tuple[str, str], Shown] = {}
    others = []
    for file in files:
        try:
            record = Record.read(file)
        except RecordError as error:
            others.append(str(error).replace(str(folder), folder.name))
            continue
        key = (record.benchmark, record.command)
        if key not in found or found[key].record.started < record.started:
            found[key] = Shown(record, _pictures(file, [other.stem for other in files]))
    return [found[key] for key in sorted(found)], others


def _pictures(file: Path, stems: Iterable[str]) -> list[Path]:
    """`sweep.svg` and `sweep_by_night.svg` of `sweep.json`, without those of another record."""
    longer = [stem for stem in stems if stem.startswith(f"{file.stem}_")]
    return [
        picture
        for picture in sorted(file.parent.glob(f"{file.stem}*.svg"))
        if _is_of(picture, file.stem) and not any(_is_of(picture, stem) for stem in longer)
        and picture.stat().st_size <= _LARGEST_PICTURE_BYTES
    ]  # fmt: skip


def _is_of(picture: Path, stem: str) -> bool:
    return picture.stem == stem or picture.stem.startswith(f"{stem}_")


def page(
    shown: Sequence[Shown],
    others: Sequence[str],
    questions: Mapping[str, str],
    documents: Sequence[Document] = (),
    goal_lines: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """`questions` are by module; a record of a removed benchmark has none. A benchmark without a
    record has a section when it has a question and a document reports figures for it. `goal_lines`
    are by the name of the benchmark, as `goals.lines` makes them."""
    by_module = {
        module: list(group)
        for module, group in itertools.groupby(
            sorted(shown, key=lambda one: one.record.benchmark), lambda one: one.record.benchmark
        )
    }
    theirs = {table.benchmark for document in documents for table in document.tables}
    modules = sorted(by_module.keys() | (theirs & questions.keys()))
    parts = ["<h1>Benchmarks</h1>", "<p>GB are 10⁹ bytes. Ratios are within one run; figures of "
             "two machines do not compare: the sources' figures are shown beside ours, corrected "
             "where they contradict themselves, and never computed with.</p>",
             _contents(modules, by_module, questions)]  # fmt: skip
    for module in modules:
        name = _name(module)
        parts.append(f'<section id="{name}"><h2>{escape(questions.get(module) or name)}</h2>')
        records = by_module.get(module, [])
        if not records:
            parts.append("<p>No record of it is here.</p>")
        if wanted := (goal_lines or {}).get(module.rpartition(".")[2]):
            parts.append(tables.of_goals(goals.HEADS, wanted))
        for one in records:
            parts += record_parts(one)
        parts += itertools.chain(*(_source(document, module) for document in documents))
        parts.append("</section>")
    if others:
        parts += ["<h2>Left out</h2>", *(f"<p>{escape(line)}</p>" for line in others)]
    return html.whole("Benchmarks", STYLE, parts)


def _name(module: str) -> str:
    return escape(module.rpartition(".")[2])


def _contents(
    modules: Iterable[str], records: Mapping[str, Sequence[Shown]], questions: Mapping[str, str]
) -> str:
    lines = []
    for module in modules:
        count = len(records.get(module, ()))
        runs = "no run" if not count else "" if count == 1 else f"{count} runs"
        about = ", ".join(filter(None, (_name(module), runs)))
        question = escape(questions.get(module) or _name(module))
        lines.append(
            f'<li><a href="#{_name(module)}">{question}</a><br><small>{about}</small></li>'
        )
    return f"<nav><ol>{''.join(lines)}</ol></nav>"


def record_parts(shown: Shown) -> Iterable[str]:
    """A record's part of a page, in `STYLE`: its command, pictures, rows, figures, versions."""
    record = shown.record
    yield f"<h3><code>{escape(record.command)}</code></h3>"
    about = [record.started, record.describe_machine()]
    about += filter(None, [record.describe_source()])
    about += [f"{name.replace('_', ' ')} {fact}" for name, fact in record.host.items()]
    about += [
        f"{name}: {facts['type']}, {facts['device']}, {facts['options']}"
        for name, facts in record.storage.items()
    ]
    if record.stolen_percent is not None:
        about.append(f"{record.stolen_percent:g} % of its CPU time was given to other machines")
    if record.interrupted:
        about.append("interrupted: not everything was measured")
    plain = {k: v for k, v in record.parameters.items() if not isinstance(v, Mapping)}
    about += [f"{name} = {value}" for name, value in plain.items()]
    yield f'<p class="about">{escape("; ".join(about))}</p>'
    yield from map(_picture, shown.pictures)
    yield from tables.of_rows(record.rows)
    yield from tables.of_figures(record.figures)
    lines = [f"{name} {version}" for name, version in record.versions.items()]
    lines += [f"{k} = {v}" for k, v in record.parameters.items() if k not in plain]
    text = escape("; ".join(lines))
    yield f'<details><summary>Versions and set-up</summary><p class="about">{text}</p></details>'


def _picture(path: Path) -> str:
    """An `img` and not inline elements: names inside one SVG would meet those of another. Its size
    is given, so that the page does not move while it loads. It is as wide as the column at most;
    selected, it has its full size and is scrolled."""
    drawn = path.read_bytes()
    box = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    wide, high = (float(side) * _PIXELS_PER_POINT for side in box.groups()) if box else (0, 0)
    size = f' width="{wide:.0f}" height="{high:.0f}"' if box else ""
    data = base64.b64encode(drawn).decode()
    name = escape(path.stem.replace("_", " "))
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{name}"{size}>'
    return f'<div class="wide chart" tabindex="0" role="region" aria-label="{name}">{image}</div>'


def _source(document: Document, module: str) -> Iterable[str]:
    found: list[Table] = [table for table in document.tables if table.benchmark == module]
    if not found:
        return
    yield '<div class="source"><h3>The source\'s own figures</h3>'
    yield (
        f'<p class="about">From <cite>{escape(document.title)}</cite>. Its machine: '
        f"{escape(document.machine)}.</p>"
    )
    for table in found:
        yield tables.of_source(table)
        if table.corrections:
            yield '<dl class="corrections">'
            for correction in table.corrections:
                yield f"<dt>It states: <em>{escape(correction.says)}</em></dt>"
                yield f"<dd>{escape(correction.truth)}.</dd>"
            yield "</dl>"
    yield "</div>"
