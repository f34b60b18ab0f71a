"""The progress of a run, on stderr while it runs.

One line that is rewritten on a terminal; where the output is a file, a line at intervals for later
readers.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from benchmarks.storage_workload.load.driver import Driver

WATCHED_EVERY_S = 0.5
LOGGED_EVERY_S = 10.0

WIDTH = 110
"""The longest rewritten line: a longer one would wrap and could not be rewritten."""


def at_most(seconds: float) -> str:
    """The time that runs of `seconds` together take: they may end earlier, and their writes to disk
    and the start of each are not in it."""
    shown = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    return f"{shown} of measurement"


class Progress:
    """The progress of one run. `duration_s` is its longest duration."""

    def __init__(self, driver: Driver, duration_s: float, stream: TextIO | None = None) -> None:
        self._driver = driver
        self._duration_s = duration_s
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        """None where the process has no stderr: then no line is written."""

        self._watched = self._stream is not None and self._stream.isatty()
        self._counted = 0
        self._asked = 0
        self._hit = 0

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the progress while the block runs."""
        task = asyncio.create_task(self._show())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if self._watched:
                self._write("\r" + " " * WIDTH + "\r")

    def line(self) -> str:
        """The present line."""
        driver = self._driver
        requests = driver.samples.requests
        for request in requests[self._counted :]:
            self._asked += request.asked
            self._hit += request.hit
        self._counted = len(requests)
        if not driver.samples.moments:
            return driver.preparing
        now = min(driver.elapsed_s, self._duration_s)
        last = driver.samples.moments[-1]
        parts = [
            f"{now:.0f} of {self._duration_s:g} s, {self._duration_s - now:.0f} s left",
            f"{last.users} users, {last.in_flight} waiting for an answer",
            f"{len(requests):,} requests",
        ]
        if self._asked:
            parts.append(f"{100 * self._hit / self._asked:.1f}% of the blocks found")
        return "; ".join(parts)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(WATCHED_EVERY_S if self._watched else LOGGED_EVERY_S)
            line = self.line()
            self._write(f"\r{line:<{WIDTH}}"[: WIDTH + 1] if self._watched else f"{line}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
