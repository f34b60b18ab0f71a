"""Rows of `mutants.toml`: deliberate faults of the product, each with the test that must fail."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. `file` is a path from the root of the repository.

    `before` is the exact text that the fault replaces, and occurs once in the file; `test` is a
    pytest node id; `why` states what a user would suffer. With `hangs` a test that does not end
    counts as one that failed.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    why: str
    hangs: bool = False

    @property
    def is_c(self) -> bool:
        """Whether the library must be built again."""
        return self.file.endswith((".c", ".h"))

    def applied(self, text: str) -> str | None:
        """`text` with the fault; None unless `before` occurs exactly once."""
        return text.replace(self.before, self.after) if text.count(self.before) == 1 else None


def read(path: Path = TABLE) -> list[Mutant]:
    """All rows, in the order of the file. Raises `TypeError` for an unknown or a missing field."""
    return [Mutant(**row) for row in tomllib.loads(path.read_text())["mutant"]]
