"""The figures of the source documents, for display beside the figures measured here.

Figures of another machine are quoted and never computed with. Where a document is wrong, the
figure is corrected from the document's own numbers, and a correction states it.
"""

from collections.abc import Sequence
from typing import NamedTuple

Cell = str | float | int | None


class Correction(NamedTuple):
    """A place where a document contradicts itself, or a note on the software behind it."""

    says: str
    truth: str


class Table(NamedTuple):
    """Some figures of a document, for the page's section of one benchmark."""

    benchmark: str
    """The module, as in `benchmarks.kvbench`. It need not exist yet."""

    name: str
    unit: str
    """The unit of all its numbers; empty where the heads have units."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """As wide as the heads. None stands for a value not reported."""

    corrections: Sequence[Correction] = ()


class Document(NamedTuple):
    """One source document."""

    title: str
    """The document's own title."""

    machine: str
    """The machine of its measurements, or that it names none."""

    tables: Sequence[Table]
