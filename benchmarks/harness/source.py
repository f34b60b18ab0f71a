"""What the documents that this project began from report, to stand beside what is measured here.

Figures of another machine are quoted and never computed with; where a document is wrong, the
figure is put right from the document's own numbers, and a correction says so.
"""

from collections.abc import Sequence
from typing import NamedTuple

Cell = str | float | int | None


class Correction(NamedTuple):
    """Where a document contradicts itself, or what really ran behind it."""

    says: str
    truth: str


class Table(NamedTuple):
    """Some figures of a document, for the page's section of one benchmark."""

    benchmark: str
    """The module, as in `benchmarks.kvbench`. It need not be there yet."""

    name: str
    unit: str
    """Of all numbers in it; empty where the heads say it."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """As wide as the heads. None was not reported."""

    corrections: Sequence[Correction] = ()


class Document(NamedTuple):
    """One source document."""

    title: str
    """As it calls itself."""

    machine: str
    """What it was measured on, or that it does not say."""

    tables: Sequence[Table]
