"""The record of a run, one JSON file: every value, and the facts needed to judge it later.

    {"schema": 1, "benchmark": "…", "command": "…", "started": "…", "interrupted": false,
     "machine": {"cores": 2, "memory_gib": 24}, "stolen_percent": 0.4, "versions": {…},
     "source": {"commit": "…", "clean": true}, "host": {"cpu": "…", "kernel": "…", …},
     "storage": {"directory": {"type": "ext4", …}, …}, "parameters": {…}, "channels": {…},
     "rows": [{"model", "operation", "transport", "integrity",
               "seconds": {"median", "min", "max"}, "gb_per_s", "ratio_to_memcpy",
               "bytes", "values", "warm_ups", …}],
     "figures": [{"name", "transport", "unit", "values": {…}, "rounds": {…}}]}

`rows` are bytes moved in a time; `figures` are all other numbers. A row that was not measured has
null for its numbers and the reason in `skipped` or `failed`.
"""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import machine as here
from benchmarks.harness import origin
from benchmarks.harness.files import replace_text
from benchmarks.harness.runner import Sample
from benchmarks.harness.summary import summarize

SCHEMA = 1

_RESUME = "--resume"
_NOT_PART_OF_THE_MEASUREMENT = ("--json", "--plot", "--csv", "--html", "--page")


CHANNELS = {
    "tcp": "lanes: TCP connections of their own",
    "zmq": "payload of ZeroMQ messages",
    "shm": "shared memory",
}
"""What a transport is for kvferry's own clients. Those of peers, and raw ones, are named by their
operations. Records without `channels` are older than lanes in most benchmarks."""


class RecordError(ValueError):
    """A file that is not a record, or one of another schema."""


@dataclass
class Row:
    """The same bytes moved once per value."""

    model: str
    operation: str
    num_bytes: int
    sample: Sample
    transport: str | None = None
    integrity: bool | None = None
    ratio_to_memcpy: float | None = None
    wall: str | None = None
    """The fastest operation possible on this transport, if it was measured in the same run."""

    ratio_to_wall: float | None = None

    @property
    def identity(self) -> tuple[str, str, str | None, bool | None]:
        """The key by which rows of two records are the same measurement."""
        return self.model, self.operation, self.transport, self.integrity

    @property
    def seconds(self) -> float | None:
        """The median, or None when this was not measured."""
        return summarize(self.sample.values).median if self.sample.measured else None

    @property
    def gb_per_s(self) -> float | None:
        """In units of 10⁹ bytes, as for links and memory. None where no bytes move."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds and self.num_bytes else None

    @property
    def reason(self) -> str:
        """Why there are no numbers; empty when there are some."""
        if self.sample.skipped is not None:
            return f"SKIPPED: {self.sample.skipped}"
        if self.sample.failed is not None:
            return f"FAILED: {self.sample.failed}"
        return "" if self.sample.values else "not measured: interrupted"

    def to_json(self) -> dict[str, Any]:
        sample = self.sample
        summary = summarize(sample.values) if sample.measured else None
        row: dict[str, Any] = {
            "model": self.model,
            "operation": self.operation,
            "transport": self.transport,
            "integrity": self.integrity,
            "seconds": None,
            "gb_per_s": _rounded(self.gb_per_s),
            "ratio_to_memcpy": _rounded(self.ratio_to_memcpy),
            "bytes": self.num_bytes,
            "values": sample.values,
            "warm_ups": sample.warm_ups,
        }
        if summary is not None:
            row["seconds"] = {"median": summary.median, "min": summary.min, "max": summary.max}
        if self.wall is not None:
            row |= {"wall": self.wall, "ratio_to_wall": _rounded(self.ratio_to_wall)}
        for name in ("skipped", "failed"):
            if (reason := getattr(sample, name)) is not None:
                row[name] = reason
        return row


@dataclass
class Figure:
    """Numbers other than bytes in a time: a latency with its percentiles, keys per second."""

    name: str
    unit: str
    values: Mapping[str, float]
    transport: str | None = None
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Some of the values as each round of the run had them, so that `compare` can judge them."""

    def to_json(self) -> dict[str, Any]:
        figure: dict[str, Any] = {
            "name": self.name,
            "transport": self.transport,
            "unit": self.unit,
            "values": {name: _rounded(value) for name, value in self.values.items()},
        }
        if self.rounds:
            figure["rounds"] = {n: [*map(_rounded, of)] for n, of in self.rounds.items()}
        return figure


@dataclass
class Record:
    """One run. `command` runs it again; `parameters` are those not in the command."""

    benchmark: str
    command: str
    started: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
    interrupted: bool = False
    machine: Mapping[str, Any] = field(default_factory=here.describe)
    versions: dict[str, str] = field(default_factory=here.versions)
    source: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    storage: dict[str, dict[str, str]] = field(default_factory=dict)
    """What made it (`origin.py`); empty in records that are older than these."""

    names_channels: bool = field(default=True, compare=False)
    """False for a record that is older than `channels`: its `tcp` may be ZeroMQ's."""

    parameters: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    stolen_percent: float | None = None
    """The part of the run's CPU time that the host gave to other machines; None until `end`."""
    _begun: here.CpuTimes = field(default_factory=here.cpu_times, compare=False)

    def end(self) -> None:
        """The measurement is over."""
        now = here.cpu_times()
        total = now.total - self._begun.total
        if total > 0:
            self.stolen_percent = round(100 * (now.stolen - self._begun.stolen) / total, 1)

    @classmethod
    def begin(cls, benchmark: str, argv: Sequence[str]) -> "Record":
        """A record of `python -m BENCHMARK ARGV…`, without the flags that name output files."""
        return cls(
            benchmark, f"python -m {benchmark} {_measured_arguments(argv)}".strip(),
            source=origin.source(), host=origin.host(), storage=origin.storage(argv),
        )  # fmt: skip

    def channels(self) -> dict[str, str]:
        """What carried kvferry's blocks, for each of the record's transports."""
        used = {row.transport for row in self.rows} | {one.transport for one in self.figures}
        return {name: what for name, what in CHANNELS.items() if name in used}

    def describe_machine(self) -> str:
        gpu = f", {self.machine['gpu']}" if "gpu" in self.machine else ""
        return f"{self.machine['cores']} cores, {self.machine['memory_gib']} GiB{gpu}"

    def describe_source(self) -> str:
        """Empty for a record that does not name its source."""
        if not self.source:
            return ""
        return f"at {self.source['commit']}{'' if self.source['clean'] else ' with changes'}"

    def write(self, path: Path) -> None:
        document = {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "command": self.command,
            "started": self.started,
            "interrupted": self.interrupted,
            "machine": dict(self.machine),
            "stolen_percent": self.stolen_percent,
            "source": self.source,
            "host": self.host,
            "storage": self.storage,
            "versions": self.versions,
            "parameters": self.parameters,
            "channels": self.channels(),
            "rows": [row.to_json() for row in self.rows],
            "figures": [figure.to_json() for figure in self.figures],
        }
        replace_text(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Raises `RecordError` with the defect of the file."""
        try:
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                raise RecordError(f"{path}: schema {document['schema']}, this reads {SCHEMA}")
            rows = [_row_from_json(row) for row in document["rows"]]
            figures = [Figure(**figure) for figure in document["figures"]]
            known = {name: document[name] for name in (
                "benchmark", "command", "started", "interrupted", "machine", "versions",
                "parameters",
            )}  # fmt: skip
            _check_shapes(known, rows, figures)
        except RecordError:
            raise
        except OSError as error:
            raise RecordError(f"{path}: not a record of a benchmark: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"{path}: not a record of a benchmark: {error!r}") from None
        stolen = document.get("stolen_percent")
        names = "channels" in document
        made_by = {name: document.get(name, {}) for name in ("source", "host", "storage")}
        return cls(
            **known,
            **made_by,
            rows=rows,
            figures=figures,
            stolen_percent=stolen,
            names_channels=names,
        )


def _check_shapes(known: Mapping[str, Any], rows: Sequence[Row], figures: Sequence[Figure]) -> None:
    """Raises `TypeError` or `KeyError` for defects that would otherwise appear only on display."""
    for name in ("machine", "versions", "parameters"):
        if not isinstance(known[name], Mapping):
            raise TypeError(f"{name} is no object")
    for name in ("cores", "memory_gib"):
        known["machine"][name]
    for figure in figures:
        if not isinstance(figure.values, Mapping):
            raise TypeError(f"the values of {figure.name} are no object")
        for values in figure.rounds.values():
            _check_numbers(values, figure.name)
    for row in rows:
        _check_numbers(row.sample.values, row.operation)


def _check_numbers(values: Any, name: str) -> None:
    are = isinstance(values, list) and all(isinstance(each, (int, float)) for each in values)
    if not are:
        raise TypeError(f"the rounds of {name} are no list of numbers")


def _row_from_json(row: Mapping[str, Any]) -> Row:
    sample = Sample(row["values"], row["warm_ups"], row.get("skipped"), row.get("failed"))
    return Row(
        row["model"], row["operation"], row["bytes"], sample, row["transport"], row["integrity"],
        row["ratio_to_memcpy"], row.get("wall"), row.get("ratio_to_wall"),
    )  # fmt: skip


def _measured_arguments(argv: Sequence[str]) -> str:
    kept: list[str] = []
    words = iter(argv)
    given = tuple(f"{flag}=" for flag in _NOT_PART_OF_THE_MEASUREMENT)
    for word in words:
        if word in _NOT_PART_OF_THE_MEASUREMENT:
            next(words, None)
        elif word != _RESUME and not word.startswith(given):
            kept.append(word)
    return shlex.join(kept)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
