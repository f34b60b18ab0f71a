"""Processes of steps and checks that end as a test wants."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.commands.steps import Ended
from benchmarks.harness.record import Record


class Programs:
    """Each writes its log and its record, takes its time, and ends."""

    def __init__(self, record: Record) -> None:
        self.record: Record | None = record
        self.ended = Ended(0, 10.0, False)
        self.log = ""
        self.error: BaseException | None = None
        self.words: Sequence[str] = ()
        self.limits: list[float] = []
        self.now = 0.0

    def clock(self) -> float:
        """Time that passes only while a program runs."""
        return self.now

    def run(self, words: Sequence[str], log: Path, limit_s: float) -> Ended:
        self.words = words
        self.limits.append(limit_s)
        self.now += self.ended.seconds
        log.write_text(self.log)
        if self.error is not None:
            raise self.error
        if self.record is not None and "--json" in words:
            self.record.write(Path(words[words.index("--json") + 1]))
        return self.ended
