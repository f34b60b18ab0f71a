"""Breaker of lookups: a server whose lookups are late is not waited for.

The session's breaker opens on silence alone. A server that answers each hello, and each lookup
after its deadline, would cost every request a deadline for ever.

Requests wait differently long. After a late lookup those that may wait no longer than it took are
misses at once; others ask, and the server may be in time for them. While nothing at all comes, the
silence counts for all of them: an outage costs the longest of their waits and not the sum. A probe,
a lookup that no request waits for, ends this when it is in time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass
class LookupBreaker:
    """Pauses lookups after a late one. One thread calls it."""

    clock: Callable[[], float]
    _late_after_s: float = 0.0
    """The longest wait that was not enough, since the last lookup in time."""
    _heard_at_s: float = -inf
    _silent_since_s: float = inf
    """Start of the first wait in which nothing came, if nothing came since; else infinite."""
    _pause_s: float = FIRST_PAUSE_S
    _probe_at_s: float = inf
    """Time of the next probe; infinite while one is under way, and without a late lookup."""

    @property
    def paused(self) -> bool:
        """Whether some lookups are misses without a query."""
        return self._late_after_s > 0

    def left_s(self, wait_s: float) -> float:
        """How long a request that may wait `wait_s` for a reply may wait for one now; 0 if its
        lookup is a miss without a query."""
        if wait_s <= self._late_after_s:
            return 0.0
        return min(wait_s, max(0.0, self._silent_since_s + wait_s - self.clock()))

    def ended(self, *, in_time: bool, sent_s: float) -> None:
        """A lookup that a request waited for ended, in time or late."""
        if in_time:
            self.forget()
        else:
            self.was_late(sent_s)

    def was_late(self, since_s: float) -> None:
        """A request has waited since then, and nothing came for it."""
        now = self.clock()
        if not self.paused:
            self._probe_at_s = now + self._pause_s
        self._late_after_s = max(self._late_after_s, now - since_s)
        if since_s >= self._heard_at_s:
            self._silent_since_s = min(self._silent_since_s, since_s)

    def take_probe(self) -> bool:
        """Whether to send a probe now. The caller reports its end with `probed`. One is under way
        at a time, and one more for each late reply."""
        if not self.paused or self.clock() < self._probe_at_s:
            return False
        self._probe_at_s = inf
        return True

    def probed(self, *, in_time: bool) -> None:
        """A probe ended. After a late one the next pause is twice as long."""
        if in_time:
            self.forget()
        elif self.paused:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._probe_at_s = self.clock() + self._pause_s

    def replied_late(self, took_s: float = 0.0) -> None:
        """The reply to a lookup came `took_s` after it was sent, and too late: the server is there.
        Probe at once, to find out whether it is in time again."""
        now = self.clock()
        self._heard_at_s, self._silent_since_s = now, inf
        if self.paused:
            self._late_after_s = max(self._late_after_s, took_s)
            self._probe_at_s = min(self._probe_at_s, now)

    def forget(self) -> None:
        """End the pause: a lookup was in time, or the server is another one."""
        self._late_after_s = 0.0
        self._heard_at_s, self._silent_since_s = self.clock(), inf
        self._pause_s, self._probe_at_s = FIRST_PAUSE_S, inf
