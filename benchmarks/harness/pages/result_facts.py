"""The numbers of a record as facts: fields that name them, and values. And the tables of them.

A `Table` is one entry of a `results.toml`; `result_tables` prints it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from benchmarks.harness.record import Record
from benchmarks.harness.summary import summarize

NOISY = 0.3
"""A range above this part of the median means that another program was running."""

_INTEGRITY = {True: "on", False: "off", None: ""}


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a `results.toml`."""

    records: list[str]
    """File names. Facts of several records share a table; their field `record` differs."""

    title: str = ""
    rows: str = ""
    """A pattern for a row's whole operation. Its named groups become fields beside `model`,
    `operation`, `transport`, `integrity` (on, off, empty) and `record`."""

    figures: str = ""
    """A pattern for a figure's whole name; the fields are `name`, `transport`, `unit`, `record`
    and its groups."""

    where: dict[str, list[str]] = {}
    """Only facts whose field is one of these, in this order. Other fields: in the record's."""

    lines: dict[str, str]
    """The field that names the lines, by the head of its column."""

    across: list[str] = []
    """Fields that name the columns; each cell is then `cell`."""

    pair: str = ""
    """A field whose values share a cell, divided by a slash."""

    cell: str = ""
    """Values by their names in braces, `{GB/s}` or with two decimals `{GB/s:2}`. A row has `GB/s`,
    `times memcpy`, `times wall`, `MiB`, `per second`, and `median`, `min` and `max` with ` s` or
    ` ms` behind it. Empty: all values by name."""

    columns: dict[str, str] = {}
    """Templates by the heads of their columns, where no field names the columns."""

    cells: dict[str, str] = {}
    """Templates in place of `cell`, by the first field of the line."""

    base: dict[str, str] = {}
    """`{NAME over base}` is the value divided by that of the fact with these fields."""

    names: dict[str, str] = {}
    """What is printed for a field's value."""

    parameters: list[str] = []
    versions: list[str] = []
    """Parameters, and programs with their versions, that stand above the table where the record has
    them."""


@dataclass(frozen=True)
class Fact:
    """One row or one figure of a record."""

    fields: Mapping[str, str]
    values: Mapping[str, float]
    unit: str = ""
    reason: str = ""
    """The reason for which a row has no values; empty with them."""

    num_trials: int = 0
    spread: float = 0.0
    """The range from the fastest to the slowest trial, as a part of the median."""


def facts_of(record: Record, stem: str, table: Table) -> Iterator[Fact]:
    """The rows and figures that the table's patterns match, in the record's order. `stem` becomes
    the field `record`."""
    if table.rows:
        for row in record.rows:
            if match := re.fullmatch(table.rows, row.operation):
                fields = {
                    "record": stem, "model": row.model, "operation": row.operation,
                    "transport": row.transport or "", "integrity": _INTEGRITY[row.integrity],
                    **match.groupdict(""),
                }  # fmt: skip
                values: dict[str, float | None] = {
                    "GB/s": row.gb_per_s, "times memcpy": row.ratio_to_memcpy,
                    "times wall": row.ratio_to_wall, "MiB": row.num_bytes / 2**20,
                }  # fmt: skip
                trials, spread = len(row.sample.values) if row.sample.measured else 0, 0.0
                if trials:
                    seconds = summarize(row.sample.values)
                    spread = seconds.spread
                    values["per second"] = 1 / seconds.median if seconds.median else None
                    for name, value in seconds._asdict().items():
                        values |= {f"{name} s": value, f"{name} ms": value * 1e3}
                yield Fact(fields, _finite(values), "", row.reason, trials, spread)
    if table.figures:
        for figure in record.figures:
            if match := re.fullmatch(table.figures, figure.name):
                fields = {
                    "record": stem, "name": figure.name, "transport": figure.transport or "",
                    "unit": figure.unit, **match.groupdict(""),
                }  # fmt: skip
                yield Fact(fields, _finite(figure.values), figure.unit)


def _finite(
    values: Mapping[str, float | None] | Mapping[str, float],
) -> dict[str, float]:
    return {n: v for n, v in values.items() if v is not None and math.isfinite(v)}
