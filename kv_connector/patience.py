"""Patience: the deadlines of lookups and loads, and the pause after lookups that were late."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kv_connector.break_even import EngineSpeed
from kv_connector.config import RemoteConfig
from remote_server.client.breaker import ONE_STALL_S

# A deadline at the end of a step would be detected one step later.
SHARE_OF_A_STEP = 0.8

# Upper limit for long steps: a server that does not reply for a second is away.
LONGEST_S = 1.0


@dataclass(frozen=True)
class Patience:
    """The deadlines of requests sent now. Only the scheduler thread uses it."""

    config: RemoteConfig
    engine: EngineSpeed

    @property
    def lookup_s(self) -> float:
        """`lookup_timeout_ms`, or most of a step if that is longer."""
        return self._at_least(self.config.lookup_timeout_ms)

    @property
    def load_stall_s(self) -> float:
        """`load_stall_ms`, or most of a step if that is longer."""
        return self._at_least(self.config.load_stall_ms)

    def _at_least(self, milliseconds: float) -> float:
        step_s = self.engine.step_s or 0.0
        return max(milliseconds / 1000, min(SHARE_OF_A_STEP * step_s, LONGEST_S))


LATE_IN_A_ROW = 3

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass
class LookupPause:
    """Pauses lookups after `LATE_IN_A_ROW` late ones. Only the scheduler thread calls it."""

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

    def ended(self, *, in_time: bool, asked_s: float) -> None:
        """A lookup that a request waited for ended, in time or late."""
        if in_time:
            self.forget()
            return
        self._late += 1
        self._late_since_s = min(self._late_since_s, asked_s)
        if self._late == LATE_IN_A_ROW:
            self._begin(max(self.clock(), self._late_since_s + ONE_STALL_S))

    def take_probe(self) -> bool:
        """Whether to send a probe now, a lookup that no request waits for. The caller reports its
        end with `probed`."""
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

    def forget(self) -> None:
        """End the pause: a lookup was in time, or the server is another one."""
        self._late, self._late_since_s = 0, inf
        self._pause_s, self._begins_at_s, self._probe_at_s = FIRST_PAUSE_S, inf, inf

    def _begin(self, at_s: float) -> None:
        self._begins_at_s, self._probe_at_s = at_s, at_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
