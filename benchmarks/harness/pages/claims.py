"""Figures in prose, each with the record that it is from.

`benchmarks/claims.toml` has them:

    [[claim]]
    page = "docs/reliability.md"
    text = "{cost:.1f} % of the whole answer"
    record = "test_miss_cost.json"
    values = { cost = "cost of the connector: whole answer | cost" }

A value is `FIGURE | NAME`, a parameter `PARAMETER`, `ROW | seconds`, its median time, or
`ROW / ROW`: the speed of the first as a multiple of the second's, by the medians. The page must
have the text with the record's values; its line breaks do not matter. So a record that is made
again shows which sentences are to be changed.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness.record import Record


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sentence's part with figures, and where they are from."""

    page: str
    text: str
    """With the values' names in braces, as for `str.format`."""

    record: str
    values: dict[str, str]


class _Claims(msgspec.Struct, forbid_unknown_fields=True):
    claim: list[Claim]


def read(path: Path) -> Sequence[Claim]:
    """Raises `msgspec.DecodeError`."""
    return msgspec.toml.decode(path.read_bytes(), type=_Claims).claim


def text_of(claim: Claim, record: Record) -> str:
    """The text that the page must have. Raises `LookupError` where the record lacks a value."""
    return claim.text.format(**{name: _value(of, record) for name, of in claim.values.items()})


def complaints(root: Path) -> Iterator[str]:
    """A line for each claim that its page does not have as its record gives it."""
    file = root / "benchmarks" / "claims.toml"
    for claim in read(file) if file.exists() else ():
        try:
            record = Record.read(root / "benchmarks" / "results" / claim.record)
            text = text_of(claim, record)
            page = (root / claim.page).read_text()
        except (LookupError, ValueError, TypeError, OSError) as error:  # also a `RecordError`
            yield f"{file}: {claim.text!r}: {error}"
            continue
        if not _has(" ".join(page.split()), " ".join(text.split())):
            yield f"{claim.page}: by {claim.record} it must read: {text}"


def _has(page: str, text: str) -> bool:
    """Whether the page has the text, and not as a part of longer numbers: 1.5 is not in 21.5."""
    return re.search(rf"(?<!\d)(?<!\d[.,]){re.escape(text)}(?!\d|[.,]\d)", page) is not None


def _value(of: str, record: Record) -> float:
    first, slash, second = of.partition(" / ")
    if slash:
        return _seconds(second, record) / _seconds(first, record)
    name, bar, value = of.partition(" | ")
    if not bar:
        return float(record.parameters[name])
    for figure in record.figures:
        if figure.name == name and value in figure.values:
            return figure.values[value]
    if value == "seconds":
        return _seconds(name, record)
    raise LookupError(f"no figure {name!r} with {value!r}")


def _seconds(operation: str, record: Record) -> float:
    for row in record.rows:
        if row.operation == operation and row.seconds:
            return row.seconds
    raise LookupError(f"no row {operation!r}")
