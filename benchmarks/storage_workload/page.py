"""One run as one HTML page. Nothing is loaded by it."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from benchmarks.harness.plot import Chart
from benchmarks.storage_workload import report
from benchmarks.storage_workload.document import criteria_of

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
       color: CanvasText; background: Canvas; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid
         color-mix(in srgb, CanvasText 15%, Canvas); }
pre, .wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
code { font-size: 90%; overflow-wrap: anywhere; }
.about { color: GrayText; }
"""


def page(document: Mapping[str, Any], charts: Mapping[str, Chart]) -> str:
    """The verdict, the charts, and the whole report."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Storage workload</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(_parts(document, charts))
        + "\n</body></html>\n"
    )


def _parts(document: Mapping[str, Any], charts: Mapping[str, Chart]) -> Iterator[str]:
    word = "PASS" if document["verdict"]["passed"] else "FAIL"
    yield f"<h1>Storage workload: {word}</h1>"
    yield f"<p><code>{escape(document['command'])}</code></p>"
    machine = document["machine"]
    about = [document["started"], f"{machine['cores']} cores, {machine['memory_gib']} GiB"]
    if document["interrupted"]:
        about.append("interrupted: only what was measured until then")
    about += [f"{name} {version}" for name, version in document["versions"].items()]
    yield f'<p class="about">{escape("; ".join(about))}</p>'
    yield "<table>"
    for criterion in criteria_of(document):
        verdict, _, rest = criterion.line.partition("] ")
        yield f"<tr><th>{escape(verdict.lstrip('['))}</th><td>{escape(rest)}</td></tr>"
    yield "</table>"
    for chart in charts.values():
        svg = chart.svg()
        yield f'<div class="wide">{svg[svg.index("<svg") :]}</div>'
    yield f"<h2>Report</h2><pre>{escape(report.render(document))}</pre>"
