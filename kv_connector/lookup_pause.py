"""Whether lookups are worth waiting for: not while the server answers them too late.

The client's breaker opens when nothing at all is answered. A server that is far away answers puts
within their seconds and lookups never within their milliseconds: the breaker stays closed, and
every request would wait for its deadline in vain. After a few late lookups in a row every request
is a miss at once, and a lookup that no request waits for finds out when the delay is over. As with
the breaker, a pause begins only when the first of them was asked `ONE_STALL_S` ago.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from remote_server.client.breaker import ONE_STALL_S

LATE_IN_A_ROW = 3

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass
class LookupPause:
    """Counts late lookups in a row. Only the scheduler thread calls it."""

    clock: Callable[[], float]
    _late: int = 0
    _late_since_s: float = inf
    _pause_s: float = FIRST_PAUSE_S
    _begins_at_s: float = inf
    _probe_at_s: float = inf
    """When to try again; infinite while that is under way."""

    @property
    def paused(self) -> bool:
        """Whether requests are told a miss without a question."""
        return self.clock() >= self._begins_at_s

    def ended(self, *, in_time: bool, asked_s: float) -> None:
        """A lookup that a request waited for was answered in time, or was not."""
        if in_time:
            self.forget()
            return
        self._late += 1
        self._late_since_s = min(self._late_since_s, asked_s)
        if self._late == LATE_IN_A_ROW:
            self._begin(max(self.clock(), self._late_since_s + ONE_STALL_S))

    def take_probe(self) -> bool:
        """Whether to send a lookup now that nobody waits for; the caller reports how it went."""
        if not self.paused or self.clock() < self._probe_at_s:
            return False
        self._probe_at_s = inf
        return True

    def probed(self, *, in_time: bool) -> None:
        """How that went. Too late, and the next pause is twice as long."""
        if in_time:
            self.forget()
        elif self.paused:
            self._begin(self.clock())

    def forget(self) -> None:
        """A lookup was in time, or it is another server: ask again."""
        self._late, self._late_since_s = 0, inf
        self._pause_s, self._begins_at_s, self._probe_at_s = FIRST_PAUSE_S, inf, inf

    def _begin(self, at_s: float) -> None:
        self._begins_at_s, self._probe_at_s = at_s, at_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
