"""The link to the server, as an engine sees it: the deadlines of requests, the lookups under way,
and their breaker."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kv_connector import guarded, metrics
from kv_connector.break_even import EngineSpeed, LinkSpeed
from kv_connector.config import RemoteConfig
from kv_connector.lookup_state import Answer, Kind, LookupState, Missed, Query
from kv_connector.metrics import TierCounters
from remote_server.client import RemoteClient
from remote_server.client.session import ONE_STALL_S
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Found, Stretch

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
class LookupBreaker:
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


# Limit on keys in open queries, over all requests: a server answers so many in half the default
# deadline of a lookup. Without a limit, a burst of long prompts makes lookups late.
MOST_KEYS_UNDER_WAY = 32_768


@dataclass
class Queries:
    """Lookups under way to the server. Belongs to the scheduler thread. Replies and deadlines come
    on the client's I/O thread, which only appends to a deque; the scheduler thread applies them at
    its next lookup.
    """

    client: RemoteClient
    counters: TierCounters
    link: LinkSpeed
    patience: Patience
    clock: Callable[[], float]
    breaker: LookupBreaker
    answers: deque[Answer] = field(default_factory=deque)
    probe_key: bytes | None = None
    """The key for the next probe, a lookup that no request waits for."""
    _keys_under_way: int = 0

    def has_room(self, num_keys: int) -> bool:
        """Whether so many keys may be queried now."""
        return not self._keys_under_way or self._keys_under_way + num_keys <= MOST_KEYS_UNDER_WAY

    def send(
        self,
        namespace: str,
        kind: Kind,
        keys: list[bytes],
        wait: LookupState | None = None,
        chain: Sequence[Stretch] = (),
    ) -> None:
        """Look `keys` up on the server, with their chain fields if they are known."""
        query = Query(kind, wait, wait.generation if wait is not None else 0, keys, self.clock())
        if wait is not None:
            self._keys_under_way += len(keys)
        on_late = None
        if wait is not None and kind is Kind.AWAITED:
            wait.sent(query.sent_s)
            on_late = partial(self._on_late, query)
        timeout_s = self.patience.lookup_s
        found = self.client.lookup(
            namespace, keys, timeout_s=timeout_s, on_late=on_late, chain=chain
        )
        found.add_done_callback(partial(self._on_found, query))

    def probe(self, namespace: str) -> None:
        """Send a probe if one is due."""
        if self.probe_key is not None and self.client.ready and self.breaker.take_probe():
            self.send(namespace, Kind.PROBE, [self.probe_key])

    def take_answers(self) -> None:
        """Apply what the I/O thread has handed over, in the order in which it came."""
        while self.answers:
            answer = self.answers.popleft()
            self._learn(answer)
            kind, wait, _, keys, _ = answer.query
            if wait is not None:
                if kind is not Kind.LATE:
                    self._keys_under_way -= len(keys)
                wait.take(answer)

    def _learn(self, answer: Answer) -> None:
        """Record the round trip, if it ended by a reply or by its deadline."""
        in_time, kind, sent_s = answer.states is not None, answer.query.kind, answer.query.sent_s
        if kind in (Kind.AGAIN, Kind.PROBE):
            self.breaker.probed(in_time=in_time)
        elif kind is Kind.LATE:
            self.breaker.replied_late()
        elif in_time or answer.reason is Missed.LOOKUP_LATE:
            seconds = answer.ended_s - sent_s
            self.counters.observe(metrics.LOOKUP_DURATION, seconds)
            self.link.lookup_took(seconds)
            self.breaker.ended(in_time=in_time, sent_s=sent_s)

    # ── on the client's I/O thread ───────────────────────────────────────────────────────

    def _on_found(self, query: Query, reply: "Future[Found]") -> None:
        states, reason = None, Missed.LOOKUP_FAILED
        remote: Sequence[int] = ()
        with guarded(self.counters, "_on_found"):
            error = CancelledError() if reply.cancelled() else reply.exception()
            if error is None:
                states, remote = reply.result().states, reply.result().remote
            elif isinstance(error, DeadlineExceeded):
                reason = Missed.LOOKUP_LATE
            elif isinstance(error, ServerUnavailable):
                reason = Missed.UNAVAILABLE
        with guarded(self.counters, "_on_found"):  # a reply that makes no sense ends it too
            self.answers.append(Answer(query, self.clock(), states, reason, remote))

    def _on_late(self, query: Query, found: Found) -> None:
        with guarded(self.counters, "_on_late"):
            late, now_s = query._replace(kind=Kind.LATE), self.clock()
            answer = Answer(late, now_s, found.states, Missed.LOOKUP_LATE, found.remote)
            self.answers.append(answer)
