"""Progress of a replay: how many requests are done, and about how long the rest takes."""

import sys
import time
from typing import TextIO

from benchmarks.harness.runner import Runner

_LOG_EVERY_S = 10.0


class Progress:
    """Prints how many requests of one replay are done: continuously on a terminal, at intervals in
    a log."""

    def __init__(self, runner: Runner, where: str, total: int, log: TextIO | None = None) -> None:
        self._runner, self._where, self._total = runner, where, total
        self._log = sys.stderr if log is None else log
        self._began = self._logged = time.monotonic()
        self._write(0)

    def __call__(self, done: int) -> None:
        if done % 64 and done != self._total:
            return
        now = time.monotonic()
        left_s = (now - self._began) * (self._total - done) / max(1, done)
        text = f"{self._where}, request {done:,} of {self._total:,}, about {left_s:.0f} s left"
        self._runner.show(text)
        if now - self._logged > _LOG_EVERY_S:
            self._logged = now
            self._write(done)

    def _write(self, done: int) -> None:
        if not self._log.isatty():
            print(f"{self._where}, request {done:,} of {self._total:,}", file=self._log, flush=True)
