"""The HTML page of a run. It loads nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from typing import Any

from benchmarks.harness.pages import html
from benchmarks.harness.plot import Chart
from benchmarks.storage_workload.pages import report
from benchmarks.storage_workload.pages.document import criteria_of, word_of

_HALF = (5.4, 3.6)
"""Inches of a chart in one of two columns: its text is as large there as in the wide one."""

_STYLE = """
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem }
.PASS { color: var(--good) } .FAIL { color: var(--bad) }
.SKIPPED, .NOT_JUDGED, .about { color: var(--quiet) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: .6rem;
  margin: 1.2rem 0 }
.tiles div { background: var(--soft); border-radius: .4rem; padding: .5rem .7rem }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums;
  white-space: nowrap }
table { width: 100% }
th, td { padding: .3rem .5rem; text-align: left; border-bottom: 1px solid var(--line) }
th { width: 3rem } td.n { text-align: right; white-space: nowrap }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr));
  gap: 1rem; margin: 1.5rem 0 }
.charts div { overflow-x: auto; border-radius: .4rem }
.charts div:first-child:nth-last-child(odd) { grid-column: 1 / -1 }
svg { display: block; width: 100%; min-width: 28rem; height: auto }
pre { background: var(--soft); border-radius: .4rem; padding: .6rem .8rem; margin: 0;
  font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere }
code span { white-space: nowrap }
"""


def page(document: Mapping[str, Any], charts: Mapping[str, Chart]) -> str:
    """The verdict, the main figures, the charts, and the whole report."""
    label = report.label_of(document)
    title = f"Storage workload, {label}" if label else "Storage workload"
    return html.whole(title, html.THEME + _STYLE, _parts(document, charts))


def _parts(document: Mapping[str, Any], charts: Mapping[str, Chart]) -> Iterator[str]:
    word = word_of(document)
    yield f'<h1>Storage workload: <span class="{word.replace(" ", "_")}">{word}</span></h1>'
    if label := report.label_of(document):
        yield f'<p class="label"><strong>{escape(label)}</strong></p>'
    yield f"<p><code>{_command(document['command'])}</code></p>"
    yield f'<p class="about">{escape("; ".join(_about(document)))}</p>'
    yield '<div class="tiles">'
    for name, value in _first_figures(document["summary"]):
        yield f"<div><b>{escape(value)}</b>{escape(name)}</div>"
    yield "</div>"
    yield "<table>"
    for criterion in criteria_of(document):
        verdict, _, rest = criterion.line.removeprefix("[").partition("] ")
        name, _, shown = rest.partition(": ")
        yield (
            f'<tr><th class="{verdict}">{verdict}</th><td>{escape(name)}</td>'
            f'<td class="n">{escape(shown)}</td></tr>'
        )
    for line in document["accounting"]:
        if not line["agrees"]:
            yield (
                f'<tr><th class="FAIL">FAIL</th><td>{escape(line["tier"])}, {escape(line["what"])}'
                f'</td><td class="n">{line["counted"]:,} and {line["arithmetic"]:,}</td></tr>'
            )
    yield "</table>"
    yield '<div class="charts">'
    for number, chart in enumerate(charts.values()):
        is_wide = number == 0 and len(charts) % 2
        svg = (chart if is_wide else replace(chart, inches=_HALF)).svg()
        yield f"<div>{svg[svg.index('<svg') :]}</div>"
    yield "</div>"
    for title, lines in report.sections(document):
        yield f"<h2>{escape(title)}</h2><pre>{escape(chr(10).join(lines))}</pre>"


def _command(command: str) -> str:
    """The command, without line breaks between the hyphens of a flag."""
    words = [escape(word) for word in command.split(" ")]
    return " ".join(f"<span>{word}</span>" if word.startswith("--") else word for word in words)


def _about(document: Mapping[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    yield document["started"]
    yield f"{machine['cores']} cores, {machine['memory_gib']} GiB"
    if document["interrupted"]:
        yield "interrupted: only the results until then"
    if document["stolen_percent"]:
        yield f"{document['stolen_percent']:g} % of its CPU time was given to other machines"
    for name, version in document["versions"].items():
        yield f"{name} {version}"


def _first_figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stats = summary["cache_stats"]
    yield "requests/s", f"{summary['requests_per_second']:,.1f}"
    yield "tokens/s", f"{summary['avg_throughput_tokens_per_sec']:,.0f}"
    hit_rate = stats["cache_hit_rate"]
    yield "blocks found", "-" if hit_rate is None else f"{100 * hit_rate:.1f} %"
    yield "read GB/s", f"{stats['read_gb_per_sec']:.2f}"
    yield "written GB/s", f"{stats['write_gb_per_sec']:.2f}"
    for name, key in (
        ("storage, P95", "storage_io_latency_ms"), ("end to end, P95", "end_to_end_latency_ms"),
    ):  # fmt: skip
        latency = summary[key]
        yield name, "-" if latency is None else _time(latency["p95"])


def _time(ms: float) -> str:
    """Short enough for one line of a tile."""
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:,.1f} s"
