"""Guard: runs parts of the server's turn so that the failure of one affects only itself."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Failures in a row after which a part counts as broken for good.
MANY_FAILURES = 10

# A broken part may be due in every turn: then a turn takes this long, and the log has one traceback
# in so many seconds.
PAUSE_S = 0.01
LOG_AGAIN_S = 10.0


class Guard:
    """For the loop's thread alone. A failure here is a bug of ours, or a machine without memory: it
    is logged with its traceback, counted, and the loop goes on serving all others."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.counters = {"internal_errors": 0}
        self._clock = clock
        self._sleep = sleep
        self._in_a_row: Counter[str] = Counter()
        self._log_again_at: dict[str, float] = {}

    def run(self, part: str, step: Callable[[], Result], instead: Result) -> Result:
        """The result of `step`, or `instead` when it raises. `part` names it for people."""
        try:
            result = step()
        except Exception:
            self._failed(part)
            return instead
        if self._in_a_row:
            self._in_a_row.pop(part, None)
        return result

    @property
    def ailing(self) -> list[str]:
        """A line for each part that seems broken for good."""
        return [
            f"{part} failed {count} times in a row"
            for part, count in self._in_a_row.items()
            if count >= MANY_FAILURES
        ]

    def _failed(self, part: str) -> None:
        self.counters["internal_errors"] += 1
        self._in_a_row[part] += 1
        now = self._clock()
        if now >= self._log_again_at.get(part, now):
            self._log_again_at[part] = now + LOG_AGAIN_S
            log.exception("%s failed inside the server, which goes on", part)
        if self._in_a_row[part] >= MANY_FAILURES:
            self._sleep(PAUSE_S)
