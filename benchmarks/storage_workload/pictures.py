"""The files that people look at, where they were asked for."""

from collections.abc import Mapping
from typing import Any

from benchmarks.storage_workload.document import Run
from benchmarks.storage_workload.page import page
from benchmarks.storage_workload.plots import charts


def write_pictures(run: Run, document: Mapping[str, Any]) -> None:
    """The page with `--html`, the charts with `--plots`."""
    options = run.options
    if options.html is None and options.plots is None:
        return
    drawn = charts(document, run.samples)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, chart in drawn.items():
            chart.write(options.plots / name)
    if options.html is not None:
        options.html.write_text(page(document, drawn), encoding="utf-8")
