"""Guard: a part of a turn that fails does not end the server."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Failures in a row after which a part counts as broken for good.
MANY_FAILURES = 10

# The same for requests, so many of which fail within this time: between them others may succeed.
OFTEN_S = 60.0

# A broken part may be due in every turn: then a turn takes this long, and the log has one traceback
# in so many seconds.
PAUSE_S = 0.01
LOG_AGAIN_S = 10.0

_COUNTED = "_is_counted"


class Guard:
    """For the loop's thread alone. A failure here is a bug of ours, or a machine without memory: it
    is logged with its traceback, counted, and the loop goes on serving all others."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.counters = {"internal_errors": 0}
        self._requests_failed: deque[float] = deque(maxlen=MANY_FAILURES)
        self._clock = clock
        self._sleep = sleep
        self._in_a_row: Counter[str] = Counter()
        self._log_again_at: dict[str, float] = {}

    def run(self, part: str, step: Callable[[], Result], instead: Result) -> Result:
        """The result of `step`, or `instead` when it raises. `part` names it for people."""
        try:
            result = step()
        except Exception as error:
            self._failed(part, error)
            return instead
        if self._in_a_row:
            self._in_a_row.pop(part, None)
        return result

    def request_failed(self, error: Exception) -> None:
        """A step of a request has raised `error`. The request ends with it."""
        self._requests_failed.append(self._clock())
        self._count("a request", error)

    @property
    def ailing(self) -> list[str]:
        """A line for each part that seems broken for good."""
        lines = [
            f"{part} failed {count} times in a row"
            for part, count in self._in_a_row.items()
            if count >= MANY_FAILURES
        ]
        failed = self._requests_failed
        if len(failed) == MANY_FAILURES and self._clock() - failed[0] <= OFTEN_S:
            lines.append(f"{MANY_FAILURES} requests failed within {OFTEN_S:g} s")
        return lines

    def _count(self, part: str, error: Exception) -> None:
        """Count and log `error`, once: what ends a request may end the part that it is in too."""
        if getattr(error, _COUNTED, False):
            return
        setattr(error, _COUNTED, True)
        self.counters["internal_errors"] += 1
        now = self._clock()
        if now >= self._log_again_at.get(part, now):
            self._log_again_at[part] = now + LOG_AGAIN_S
            log.error("%s failed inside the server, which goes on", part, exc_info=error)

    def _failed(self, part: str, error: Exception) -> None:
        self._in_a_row[part] += 1
        self._count(part, error)
        if self._in_a_row[part] >= MANY_FAILURES:
            self._sleep(PAUSE_S)
