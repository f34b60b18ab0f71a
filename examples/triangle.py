"""The n-by-n triangle of times: its definition, its text and its record.

There are n documents without common parts. Round i sends the first i of them in sequence: i - 1
earlier ones, and a new one. So the set grows by a document a round, and as it exceeds one level
after the other, the times in a round show the speed of the next level. The last time of each round
is that of computing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.harness import table
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from examples.token_sources import CACHED, COMPUTED, DISK, ENGINE, LEVELS, MEMORY, POOL, SERVER

MODULE = "examples.stress_test"

LETTERS = {
    COMPUTED: "c", ENGINE: "e", POOL: "p", MEMORY: "m", DISK: "d", SERVER: "s", CACHED: "h"
}  # fmt: skip
_PURE = 0.95
"""A cell is mixed when less than this part of its document came from one level."""


@dataclass(frozen=True)
class Cell:
    """One document in one round. Both count from 1."""

    round: int
    document: int
    seconds: float  # to the first token
    document_tokens: int  # without the question, which is always computed
    tokens: Mapping[str, int]  # by level; levels without tokens are missing

    @property
    def level(self) -> str:
        """The level of the largest part of the document."""
        return max(self._of_document, key=lambda level: self._of_document[level])

    @property
    def mixed(self) -> bool:
        return self._of_document[self.level] < _PURE * self.document_tokens

    @property
    def mark(self) -> str:
        """The level's letter, with a `*` when other levels contributed."""
        return LETTERS.get(self.level, "?") + ("*" if self.mixed else "")

    @property
    def _of_document(self) -> dict[str, int]:
        question = max(0, sum(self.tokens.values()) - self.document_tokens)
        return {
            level: count - question if level == COMPUTED else count
            for level, count in self.tokens.items()
        } or {"unknown": 0}


@dataclass
class Triangle:
    """The cells measured so far, in order."""

    n: int
    cells: list[Cell] = field(default_factory=list)

    @classmethod
    def of(cls, record: Record) -> "Triangle":
        """The triangle that `add_to` put into `record`."""
        found = cls(int(record.parameters["documents"]))
        question = int(record.parameters["question_tokens"])
        for figure in record.figures:
            if match := re.fullmatch(r"round (\d+), document (\d+)", figure.name):
                tokens = {name: int(n) for name, n in figure.values.items() if name != "seconds"}
                size = sum(tokens.values()) - question
                cell = Cell(int(match[1]), int(match[2]), figure.values["seconds"], size, tokens)
                found.cells.append(cell)
        return found

    @staticmethod
    def places(n: int) -> Iterator[tuple[int, int]]:
        """Round and document of all cells, in the order of sending."""
        return ((i, j) for i in range(1, n + 1) for j in range(1, i + 1))

    @property
    def complete(self) -> bool:
        return len(self.cells) == self.n * (self.n + 1) // 2

    def by_level(self) -> dict[str, list[float]]:
        """The seconds of each level's cells, the known levels in their order, without mixed cells,
        whose times belong to no level."""
        found: dict[str, list[float]] = {}
        for cell in self.cells:
            if not cell.mixed:
                found.setdefault(cell.level, []).append(cell.seconds)
        order = [*LEVELS, *sorted(found.keys() - {*LEVELS})]
        return {level: found[level] for level in order if level in found}

    def wrong(self, holds: Sequence[tuple[str, int]]) -> list[str]:
        """Every cell that is not of the expected level, when `holds` gives the documents of each
        level: the first level that holds all documents sent before this round."""
        found = []
        for cell in self.cells:
            before = cell.round - 1
            must = COMPUTED
            if cell.document < cell.round:
                must = next(level for level, documents in holds if documents >= before)
            if cell.level != must or cell.mixed:
                counts = ", ".join(f"{count} {level}" for level, count in cell.tokens.items())
                found.append(
                    f"round {cell.round}, document {cell.document}: not all from {must}, "
                    f"but {counts or 'unknown'}"
                )
        return found

    def text(self) -> str:
        """The triangle, and a line for each level."""
        return f"{self._cells_text()}\n\n{self._levels_text()}"

    def _cells_text(self) -> str:
        shown = {(c.round, c.document): f"{c.seconds:.3f} {c.mark:<2}" for c in self.cells}
        width = max([len(text) for text in shown.values()] + [8])
        head = " ".join(f"{number:>{width - 3}}   " for number in range(1, self.n + 1))
        lines = [f"round  {head}"]
        for i in range(1, self.n + 1):
            row = [shown.get((i, j), "-" + " " * 3) for j in range(1, i + 1)]
            lines.append(f"{i:>5}  " + " ".join(text.rjust(width) for text in row))
        return "\n".join(line.rstrip() for line in lines)

    def _levels_text(self) -> str:
        levels = self.by_level()
        computed = median(levels[COMPUTED]) if COMPUTED in levels else None
        rows: list[list[table.Cell]] = []
        for level, seconds in levels.items():
            middle = median(seconds)
            faster = f"{computed / middle:.1f}x" if computed is not None else None
            rows.append([
                LETTERS.get(level, "?"), level, len(seconds), f"{middle:.3f}",
                f"{min(seconds):.3f}", f"{max(seconds):.3f}", faster,
            ])  # fmt: skip
        headers = ["", "level", "cells", "median s", "fastest", "slowest", "faster"]
        text = table.render(headers, rows)
        if num_mixed := sum(cell.mixed for cell in self.cells):
            text += f"\n* mixed: {num_mixed} cells came from more than one level; not counted here"
        return text

    def add_to(self, record: Record, model: str) -> None:
        """Add a row to the record for each level, so that records can be compared, and a figure
        for each cell with its counts."""
        record.rows += [
            Row(model, f"first token: {level}", 0, Sample(seconds))
            for level, seconds in self.by_level().items()
        ]
        record.figures += [
            Figure(
                f"round {cell.round}, document {cell.document}",
                "s and tokens",
                {"seconds": cell.seconds, **cell.tokens},
            )
            for cell in self.cells
        ]
