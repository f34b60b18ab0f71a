"""Inputs and results of a sweep, and both as CSV."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from benchmarks.harness.statistics import percentile
from remote_server.errors import ConfigError

_MOST_PROCESSES = 8
"""As in the source: up to this number each client has a process, beyond it several share one."""

_PERCENTS = (50, 90, 99, 100)


class Point(NamedTuple):
    """A number of conversations at once."""

    processes: int
    clients: int
    """Clients of each process."""

    @property
    def concurrency(self) -> int:
        return self.processes * self.clients

    @classmethod
    def of(cls, concurrency: int) -> "Point":
        """Up to eight clients have a process each. Raises `ConfigError` for a greater number that
        eight does not divide."""
        if concurrency <= _MOST_PROCESSES:
            return cls(concurrency, 1)
        if concurrency % _MOST_PROCESSES:
            raise ConfigError(
                f"concurrency: {concurrency} is no multiple of {_MOST_PROCESSES}; "
                "write it as processes x clients, as in 3x4"
            )
        return cls(_MOST_PROCESSES, concurrency // _MOST_PROCESSES)

    @classmethod
    def parse(cls, text: str) -> "Point":
        """`16`, or `4x4`. Raises `ConfigError`."""
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
        if match is None:
            raise ConfigError(f"concurrency: {text!r} is neither a number nor like 8x2")
        return cls(int(match[1]), int(match[2])) if match[2] else cls.of(int(match[1]))

    def __str__(self) -> str:
        return f"{self.processes}x{self.clients}"


def in_rounds(points: Sequence[Point], num_rounds: int) -> Iterator[tuple[int, Point]]:
    """All points in each round. Rounds begin at different points, which distributes drift."""
    for number in range(num_rounds):
        first = number % len(points)
        for point in (*points[first:], *points[:first]):
            yield number, point


class Percentiles(NamedTuple):
    """Milliseconds, over all samples of all clients together. None: not measured."""

    p50: float | None
    p90: float | None
    p99: float | None
    p100: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        if not samples:
            return cls(None, None, None, None)
        return cls(*(percentile(samples, percent) for percent in _PERCENTS))


BLOB_ALONE = "blob alone: one read"
"""The figure of reads of an object store without a server."""


class ThreeParts(NamedTuple):
    """A read by the place where its time goes, in milliseconds: means, which sum up."""

    client_server: float
    """Serialize, network and deserialize: client, network and both sockets' queues."""

    server: float
    """In the server without its store."""

    blob: float
    """In the server's store: its memory, its disk, or an object store."""


NOTHING = Percentiles(None, None, None, None)


class ReadSplit(NamedTuple):
    """Parts of a read, and the read itself, in milliseconds: means, because means sum up."""

    serialize: float
    network: float
    server: float
    """In the server without its storage."""

    storage: float
    deserialize: float
    """Into the client's memory, verified, until its thread continues."""

    read: float
    """Measured around the whole read, not a sum of the parts."""

    apart_percent: float
    """Percent of reads whose parts do not sum up to the read within 5 %."""

    @property
    def parts(self) -> dict[str, float]:
        return dict(zip(PARTS, self, strict=False))

    @property
    def three(self) -> ThreeParts:
        way = self.serialize + self.network + self.deserialize
        return ThreeParts(round(way, 4), self.server, self.storage)


PARTS = ReadSplit._fields[:5]


@dataclass(frozen=True)
class Result:
    """The results of one point."""

    point: Point
    tps: float
    """Conversations a second of all clients."""

    tokens_per_s: float
    """As the source books them: 1,152 a conversation."""

    lookup: Percentiles
    read: Percentiles
    write: Percentiles = NOTHING
    errors: int = 0
    cpu_percent: float | None = None
    """Use of all cores meanwhile: near 100 the machine is the limit."""

    server_percent: float | None = None
    """Percent of one core used by the servers' processes. The loop of each is one thread."""

    split: ReadSplit | None = None
    """None when the server sends no times."""

    moved_gb_per_s: float | None = None
    """Blocks read and written, in 10⁹ bytes a second."""

    raw_gb_per_s: float | None = None
    """The speed of two raw TCP connections of this machine in the same run."""

    @property
    def network_percent(self) -> float | None:
        """The blocks' percentage of `raw_gb_per_s`."""
        if not self.raw_gb_per_s or self.moved_gb_per_s is None:
            return None
        return 100 * self.moved_gb_per_s / self.raw_gb_per_s


def split_of(values: Mapping[str, float | None]) -> ReadSplit | None:
    """Made of its fields by name; None unless all are present."""
    known = {name: value for name, value in values.items() if value is not None}
    return ReadSplit(**known) if len(known) == len(ReadSplit._fields) else None


OPERATIONS = ("lookup", "read", "write")
COLUMNS = (
    "processes", "concurrency_per_process", "total_concurrency", "tps", "tokens_per_sec",
    *(f"{name}_{percent}_ms" for name in OPERATIONS for percent in Percentiles._fields),
    "errors", "cpu_percent", "server_cpu_percent",
    *(f"read_mean_{name}" for name in ReadSplit._fields), "moved_gb_per_s", "raw_gb_per_s",
    *(f"read_of_three_{name}_ms" for name in ThreeParts._fields),
)  # fmt: skip
"""The source's columns, then those that it lacks."""


def as_csv(results: Sequence[Result]) -> str:
    """Values not measured are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        point = result.point
        samples = [value for name in OPERATIONS for value in getattr(result, name)]
        writer.writerow(
            ["" if value is None else value for value in (
                point.processes, point.clients, point.concurrency, round(result.tps, 3),
                round(result.tokens_per_s, 1), *samples, result.errors, result.cpu_percent,
                result.server_percent, *(result.split or (None,) * len(ReadSplit._fields)),
                result.moved_gb_per_s, result.raw_gb_per_s,
                *(result.split.three if result.split else (None,) * len(ThreeParts._fields)),
            )]
        )  # fmt: skip
    return text.getvalue()


def read_csv(path: Path) -> list[Result]:
    """Raises `ConfigError`. Columns that the source's files lack may be missing."""
    try:
        with path.open() as file:
            results = [_result(row) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: not the CSV of a sweep: {error!r}") from None
    if not results:
        raise ConfigError(f"{path}: no point of a sweep in it")
    return results


def _result(row: dict[str, str]) -> Result:
    def number(name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    def percentiles(name: str) -> Percentiles:
        return Percentiles(*(number(f"{name}_{p}_ms") for p in Percentiles._fields))

    return Result(
        Point(int(row["processes"]), int(row["concurrency_per_process"])),
        float(row["tps"]), float(row["tokens_per_sec"]),
        percentiles("lookup"), percentiles("read"), percentiles("write"),
        int(row.get("errors") or 0), number("cpu_percent"), number("server_cpu_percent"),
        split_of({name: number(f"read_mean_{name}") for name in ReadSplit._fields}),
        number("moved_gb_per_s"), number("raw_gb_per_s"),
    )  # fmt: skip
