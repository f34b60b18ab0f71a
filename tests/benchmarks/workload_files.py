"""Where the run that tests look at has left its files."""

from pathlib import Path
from typing import NamedTuple


class WorkloadRun(NamedTuple):
    """What a run through the command line has written and printed."""

    folder: Path
    status: int
    printed: str

    @property
    def json(self) -> Path:
        return self.folder / "run.json"

    @property
    def html(self) -> Path:
        return self.folder / "run.html"
