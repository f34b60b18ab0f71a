"""Breaker of lookups: a server whose lookups are always late is not waited for.

The session's breaker opens on silence alone. A server that answers each hello, and each lookup
after its deadline, would cost every request a deadline for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from remote_server.client.session import ONE_STALL_S

LATE_IN_A_ROW = 3

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass
class LookupBreaker:
    """Pauses lookups after `LATE_IN_A_ROW` late ones. One thread calls it."""

    clock: Callable[[], float]
    _late: int = 0
    _late_since_s: float = inf
    _pause_s: float = FIRST_PAUSE_S
    _begins_at_s: float = inf
    _probe_at_s: float = inf
    """Time of the next probe; infinite while one is under way."""

    @property
    def paused(self) -> bool:
        """Whether lookups are misses without a query."""
        return self.clock() >= self._begins_at_s

    def ended(self, *, in_time: bool, sent_s: float) -> None:
        """A lookup that a request waited for ended, in time or late."""
        if in_time:
            self.forget()
            return
        self._late += 1
        self._late_since_s = min(self._late_since_s, sent_s)
        if self._late == LATE_IN_A_ROW:
            self._begin(max(self.clock(), self._late_since_s + ONE_STALL_S))

    def take_probe(self) -> bool:
        """Whether to send a probe now, a lookup that no request waits for. The caller reports its
        end with `probed`. One probe is under way at a time, and one more for each late reply."""
        if not self.paused or self.clock() < self._probe_at_s:
            return False
        self._probe_at_s = inf
        return True

    def probed(self, *, in_time: bool) -> None:
        """A probe ended. After a late one the next pause is twice as long."""
        if in_time:
            self.forget()
        elif self.paused:
            self._begin(self.clock())

    def replied_late(self) -> None:
        """The reply to a lookup came after its deadline: the server is there. Probe at once, to
        find out whether it is in time again."""
        self._probe_at_s = min(self._probe_at_s, self.clock())

    def forget(self) -> None:
        """End the pause: a lookup was in time, or the server is another one."""
        self._late, self._late_since_s = 0, inf
        self._pause_s, self._begins_at_s, self._probe_at_s = FIRST_PAUSE_S, inf, inf

    def _begin(self, at_s: float) -> None:
        self._begins_at_s, self._probe_at_s = at_s, at_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
