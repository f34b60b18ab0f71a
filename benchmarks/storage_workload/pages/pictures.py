"""The page and the charts, written after a run or from the JSON of an earlier one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.plot import Chart
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.storage_workload.pages import report
from benchmarks.storage_workload.pages.page import page
from benchmarks.storage_workload.pages.plots import charts
from benchmarks.storage_workload.plan.flags import OneLineParser
from remote_server.errors import ConfigError


def write(
    document: Mapping[str, Any], html: Path | None, plots: Path | None
) -> None:  # fmt: skip
    """Write the page and the folder of charts, where a path is given."""
    if html is None and plots is None:
        return
    drawn = charts(document)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for name, chart in drawn.items():
            chart.write(plots / name)
    if html is not None:
        html.write_text(page(document, drawn), encoding="utf-8")


def charts_of_file(file: Path) -> dict[str, Chart]:
    """The charts of a run's JSON. Raises `LookupError` for another file, as of `validate`."""
    try:
        return charts(_read(file))
    except ConfigError as error:
        raise LookupError(str(error)) from None


def main(argv: Sequence[str]) -> int:
    """Print the report of a JSON file again, and draw the chosen files. Raises `ConfigError`."""
    made = OneLineParser(
        prog="python -m benchmarks.storage_workload report",
        description="The report of an earlier run, from its JSON.",
    )
    made.add_argument("file", type=Path, help="a file that --output wrote")
    made.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="charts as SVG and as PNG")
    arguments = made.parse_args(argv)
    found = _read(arguments.file)
    try:
        write(found, arguments.html, arguments.plots)
    except OSError as error:
        raise ConfigError(f"not written: {error}") from None
    with tolerate_closed_pipe():
        print(report.render(found))
        print(f"\n{found['command']}")
    return 0


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if {"summary", "verdict", "samples"} <= found.keys():
            return dict(found)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    raise ConfigError(f"{file} is not the JSON of a run")
