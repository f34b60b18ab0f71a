"""Conversion of points to a record's figures, and back."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.record import Figure, Record, RecordError
from benchmarks.store_sweep.points import (
    BLOB_ALONE,
    OPERATIONS,
    Percentiles,
    Point,
    ReadSplit,
    Result,
    split_of,
)
from remote_server.errors import ConfigError

_CPU = "cpu, percent"
_SERVER = "server, percent of a core"
_MOVED = "moved, GB/s"
_MOST_READ = "read, most to mean"
_RAW = "two raw connections, GB/s"
_SPLIT = {
    name: f"read {name}, mean, ms" for name in ReadSplit._fields if name != "apart_percent"
} | {"apart_percent": "reads whose parts are off by 5 %, percent"}
_THREE = {
    "client_server": "read of three: client-server, mean, ms",
    "server": "read of three: server, mean, ms",
    "blob": "read of three: blob, mean, ms",
}


def as_figure(result: Result, rounds: Sequence[Result] = ()) -> Figure:
    """Values not measured are omitted. `rounds` are the results of each round alone."""
    values: dict[str, float] = {
        "conversations per second": result.tps,
        "tokens per second": result.tokens_per_s,
        "errors": float(result.errors),
    }
    measured: dict[str, float | None] = {
        _name(operation, percent): value
        for operation in OPERATIONS
        for percent, value in getattr(result, operation)._asdict().items()
    }
    measured |= {_CPU: result.cpu_percent, _SERVER: result.server_percent}
    measured |= {_MOVED: result.moved_gb_per_s, _RAW: result.raw_gb_per_s}
    if result.split is not None:
        measured |= {_SPLIT[name]: value for name, value in result.split._asdict().items()}
        measured |= {_THREE[name]: value for name, value in result.split.three._asdict().items()}
    values |= {name: value for name, value in measured.items() if value is not None}
    return Figure(
        f"{result.point.concurrency} at once ({result.point})", "as named", values, "tcp",
        _of_rounds(rounds),
    )  # fmt: skip


def _of_rounds(rounds: Sequence[Result]) -> dict[str, list[float]]:
    """Throughput and medians of each round, where all have them."""
    if not rounds:
        return {}
    found: dict[str, list[float | None]] = {
        "tokens per second": [one.tokens_per_s for one in rounds],
        **{_name(name, "p50"): [getattr(one, name).p50 for one in rounds] for name in OPERATIONS},
    }
    known = {name: [v for v in values if v is not None] for name, values in found.items()}
    return {name: values for name, values in known.items() if len(values) == len(rounds)}


def read_record(path: Path) -> list[Result]:
    """The points of a sweep's record. Raises `ConfigError`."""
    try:
        figures = [one for one in Record.read(path).figures if one.name != BLOB_ALONE]
        results = [_result(figure) for figure in figures]
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except LookupError as error:
        raise ConfigError(f"{path}: not the record of a sweep: {error}") from None
    if not results:
        raise ConfigError(f"{path}: no point of a sweep in it")
    return results


def servers_of(path: Path) -> int:
    """The servers of a sweep's record. Older records have one, or name them in words."""
    parameters = Record.read(path).parameters
    words = re.match(r"(\d+) servers?\b", str(parameters.get("servers", "")))
    return int(words[1]) if words else 1


class Evenness(NamedTuple):
    """The read load of the busiest server, relative to the mean, by the number of servers."""

    known: Mapping[int, float]

    def of(self, servers: int) -> float:
        """Between two measured numbers in proportion; beyond the last as the last."""
        numbers = sorted(self.known)
        below = max((n for n in numbers if n <= servers), default=numbers[0])
        above = min((n for n in numbers if n >= servers), default=numbers[-1])
        if below >= above:
            return self.known[above]
        part = (servers - below) / (above - below)
        return self.known[below] + part * (self.known[above] - self.known[below])


def read_evenness(path: Path) -> Evenness:
    """Of a record of `test_trace --servers`: over the wire where both were replayed. Raises
    `ConfigError`."""
    try:
        found = Record.read(path).figures
    except RecordError as error:
        raise ConfigError(str(error)) from None
    known: dict[int, float] = {}
    for replay in ("store", "wire"):
        for figure in found:
            words = re.match(
                rf"{replay}: (\d+) servers?, room for everything, nothing", figure.name
            )
            if words and _MOST_READ in figure.values:
                known[int(words[1])] = figure.values[_MOST_READ]
    if not known:
        raise ConfigError(f"{path}: no replay of a fleet in it")
    return Evenness(known)


def _result(figure: Figure) -> Result:
    point = re.findall(r"\((\d+x\d+)\)", figure.name)[0]
    values = figure.values

    def percentiles(operation: str) -> Percentiles:
        return Percentiles(*(values.get(_name(operation, p)) for p in Percentiles._fields))

    return Result(
        Point.parse(point), values["conversations per second"], values["tokens per second"],
        percentiles("lookup"), percentiles("read"), percentiles("write"),
        int(values["errors"]), values.get(_CPU), values.get(_SERVER),
        split_of({name: values.get(shown) for name, shown in _SPLIT.items()}),
        values.get(_MOVED), values.get(_RAW),
    )  # fmt: skip


def _name(operation: str, percent: str) -> str:
    return f"{operation} {percent}, ms"
