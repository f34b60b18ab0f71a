"""Breaker: a server that stops answering costs one deadline, not one per request.

closed ──N timeouts in a row──▶ open ──backoff over──▶ probing ──welcome──▶ closed
                                 ▲                        │
                                 └──── no answer; backoff doubles ────┘
"""

from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf

from remote_server.client.config import ClientConfig

ONE_STALL_S = 0.2
"""Silence that is needed before the breaker opens, however many requests expire before. A host that
withholds the processor from the server for a moment makes a whole burst of lookups late at once."""


class BreakerState(StrEnum):
    CLOSED = auto()  # requests flow
    OPEN = auto()  # requests end as "unavailable" at once, nothing is sent
    PROBING = auto()  # as open, but one hello is on its way


@dataclass(slots=True)
class Breaker:
    """Counts timeouts in a row and measures the silence. A reply in time resets both."""

    config: ClientConfig
    state: BreakerState = BreakerState.CLOSED
    retry_at: float = inf
    """Time of the next probe; infinite unless open."""
    opens_at: float = inf
    """Time at which `open_if_due` opens it, unless a reply comes before."""
    _backoff_s: float = 0.0
    _timeouts: int = 0
    _silent_since: float = inf

    def answered(self) -> None:
        """A reply came in time. It does not close the breaker: only the reply to a probe does."""
        self._timeouts, self._silent_since, self.opens_at = 0, inf, inf

    def answered_late(self, waited_s: float) -> None:
        """A reply came after its deadline. Within `ONE_STALL_S` it counts as one in time."""
        if waited_s < ONE_STALL_S:
            self.answered()

    def timed_out(self, now: float, waited_s: float) -> bool:
        """A request waited `waited_s` without a reply. True when this opened the breaker."""
        self._timeouts += 1
        self._silent_since = min(self._silent_since, now - waited_s)
        if self._timeouts >= self.config.breaker_timeouts:
            self.opens_at = self._silent_since + ONE_STALL_S
        return self.open_if_due(now)

    def open_if_due(self, now: float) -> bool:
        """Open when the silence has lasted long enough. True when this opened the breaker."""
        if self.state is not BreakerState.CLOSED or now < self.opens_at:
            return False
        self._open(now)
        return True

    def trip(self, now: float) -> bool:
        """A hello timed out: open now, regardless of the count. True when it was closed before."""
        opened = self.state is BreakerState.CLOSED
        self._open(now)
        return opened

    def probe(self) -> None:
        """A hello is sent. `close` or `trip` reports its result."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.PROBING
            self.retry_at = inf

    def close(self) -> None:
        """The server answered a hello."""
        self.state = BreakerState.CLOSED
        self.retry_at = inf
        self._backoff_s = 0.0
        self.answered()

    def _open(self, now: float) -> None:
        self.state, self.opens_at = BreakerState.OPEN, inf
        backoff_s = self._backoff_s or self.config.breaker_backoff_s
        self.retry_at = now + backoff_s
        self._backoff_s = min(2 * backoff_s, self.config.breaker_longest_backoff_s)
