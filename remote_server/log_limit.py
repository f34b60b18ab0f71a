"""Limit of log lines that a peer can cause at will."""

import logging
from collections.abc import Callable

EVERY_S = 10.0
LINES = 8


class FewLines:
    """At most `LINES` lines in `EVERY_S` seconds. One thread."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._again_at = clock()
        self._left = LINES
        self._left_out = 0

    def say(self, level: int, message: str, *about: object) -> None:
        """Log it, unless the limit is reached; the next line has the number of lines left out."""
        now = self._clock()
        if now >= self._again_at:
            self._again_at, self._left = now + EVERY_S, LINES
        if not self._left:
            self._left_out += 1
            return
        self._left -= 1
        more = f" (and {self._left_out:,} lines like it before)" if self._left_out else ""
        self._left_out = 0
        self._log.log(level, message + more, *about)
