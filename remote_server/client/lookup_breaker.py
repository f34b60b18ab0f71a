"""Breaker of lookups: a server whose lookups are always late is not waited for.

The session's breaker opens on silence alone. A server that answers each hello, and each lookup
after its deadline, would cost every request a deadline for ever.

Requests wait differently long. One that waits longer than those whose lookups were late is not
paused: the server may be in time for it. Of a server that has answered nothing since, the silence
counts for all of them, so that an outage costs the longest of their waits and not the sum.
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
    """Pauses lookups of a server that is silent, or late `LATE_IN_A_ROW` times. One thread calls
    it."""

    clock: Callable[[], float]
    _late: int = 0
    _late_since_s: float = inf
    _late_after_s: float = 0.0
    """The longest wait that was not enough, since the last lookup in time."""
    _begins_at_s: float = inf
    """Start of the pause for always being late."""
    _heard_at_s: float = -inf
    _silent_since_s: float = inf
    """When the first late lookup was sent, if nothing came since; else infinite."""
    _pause_s: float = FIRST_PAUSE_S
    _probe_at_s: float = inf
    """Time of the next probe; infinite while one is under way."""

    @property
    def paused(self) -> bool:
        """Whether some lookups are misses without a query."""
        return self.always_late or self.clock() >= self._silent_since_s

    @property
    def always_late(self) -> bool:
        """Whether the last lookups were all late: another one needs a reason."""
        return self.clock() >= self._begins_at_s

    def left_s(self, wait_s: float) -> float:
        """How long a request that may wait `wait_s` for replies may wait for one now; 0 if its
        lookup is a miss without a query."""
        now = self.clock()
        if self.always_late and wait_s <= self._late_after_s:
            return 0.0
        return min(wait_s, max(0.0, self._silent_since_s + wait_s - now))

    def ended(self, *, in_time: bool, sent_s: float) -> None:
        """A lookup that a request waited for ended, in time or late."""
        if in_time:
            self.forget()
            return
        now = self.clock()
        self._late += 1
        self._late_since_s = min(self._late_since_s, sent_s)
        self._late_after_s = max(self._late_after_s, now - sent_s)
        if sent_s >= self._heard_at_s:
            if self._silent_since_s == inf:
                self._probe_at_s = min(self._probe_at_s, now + self._pause_s)
            self._silent_since_s = min(self._silent_since_s, sent_s)
        if self._late == LATE_IN_A_ROW:
            self._begins_at_s = max(now, self._late_since_s + ONE_STALL_S)
            self._probe_at_s = self._begins_at_s + self._pause_s

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
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._probe_at_s = self.clock() + self._pause_s

    def replied_late(self, took_s: float = 0.0) -> None:
        """The reply to a lookup came `took_s` after it was sent, and too late: the server is there.
        Probe at once, to find out whether it is in time again."""
        now = self.clock()
        self._heard_at_s, self._silent_since_s = now, inf
        self._late_after_s = max(self._late_after_s, took_s)
        self._probe_at_s = min(self._probe_at_s, now)

    def forget(self) -> None:
        """End the pause: a lookup was in time, or the server is another one."""
        self._late, self._late_since_s, self._late_after_s = 0, inf, 0.0
        self._heard_at_s, self._silent_since_s = self.clock(), inf
        self._pause_s, self._begins_at_s, self._probe_at_s = FIRST_PAUSE_S, inf, inf
