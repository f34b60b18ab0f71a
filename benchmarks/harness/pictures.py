"""The pictures beside the committed records, drawn by `python -m benchmarks results`.

Each is drawn from its record alone and carries the record's digest, so that a picture of an older
record is found without drawing it again. `test_swap.svg` and `test_swap_more.svg` are pictures of
`test_swap.json`; a new picture begins with an empty file of its name.
"""

import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record

_DIGEST = re.compile(r"<!-- record (?P<name>\S+) (?P<digest>[0-9a-f]{64}) -->\n?")

Charts = Chart | Mapping[str, Chart]


class Drawn(Protocol):
    """Anything that can be written as SVG."""

    def svg(self) -> str: ...


class Picture(NamedTuple):
    """A committed picture and the record that it shows."""

    file: Path
    record: Path

    @property
    def suffix(self) -> str:
        """What its name has behind the record's; empty for the first chart."""
        return self.file.stem.removeprefix(self.record.stem).removeprefix("_")

    def is_of_its_record(self) -> bool:
        """Whether it was drawn from the record as it is now."""
        match = _DIGEST.search(self.file.read_text())
        return match is not None and match["digest"] == _digest(self.record)


def found(folder: Path) -> Iterator[Picture]:
    """The pictures in `folder` in order, each with the record whose name is the longest part of
    its own. Raises `LookupError` for a picture without one."""
    stems = {file.stem: file for file in folder.glob("*.json")}
    for file in sorted(folder.glob("*.svg")):
        words = file.stem.split("_")
        names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
        record = next((stems[name] for name in names if name in stems), None)
        if record is None:
            raise LookupError(f"{file}: a picture without a record")
        yield Picture(file, record)


def drawn(picture: Picture) -> str:
    """The picture's text, from its record. Raises `LookupError` where the benchmark has no such
    chart."""
    charts = of_record(picture.record)
    if picture.suffix not in charts:
        raise LookupError(f"{picture.file}: its charts are {sorted(charts)}")
    head, tag, body = charts[picture.suffix].svg().partition("<svg")
    mark = f"<!-- record {picture.record.name} {_digest(picture.record)} -->\n"
    return f"{head}{mark}{tag}{body}"


def of_record(file: Path) -> Mapping[str, Drawn]:
    """The charts of a record by what stands behind its name in theirs. A benchmark has `chart` or
    `charts`; one whose JSON is more than a record has `charts_of_file`. Raises `LookupError` where
    there is none."""
    record = Record.read(file)
    module = _module_of(record.benchmark)
    if hasattr(module, "charts_of_file"):
        charts: Mapping[str, Drawn] = module.charts_of_file(file)
        return charts
    if hasattr(module, "charts"):
        charts = module.charts(record)
        return charts
    if hasattr(module, "chart"):
        return {"": module.chart(record)}
    raise LookupError(f"{record.benchmark} has no chart")


def named(charts: Charts, file: Path) -> Iterator[tuple[Path, Chart]]:
    """Each chart with its file, where the first is written to `file`."""
    if isinstance(charts, Chart):
        yield file, charts
        return
    for name, chart in charts.items():
        yield file.with_stem(f"{file.stem}_{name}") if name else file, chart


def _module_of(benchmark: str) -> object:
    module = importlib.import_module(benchmark)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{benchmark}.__main__")
    return module


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
