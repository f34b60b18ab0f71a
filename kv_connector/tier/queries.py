"""The lookups under way to the server."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

from kv_connector import guarded
from kv_connector.pool.rows import PoolRows
from kv_connector.tier import metrics
from kv_connector.tier.lookup_state import Answer, Kind, LookupState, Missed, Query
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.patience import Patience
from kv_connector.tier.speeds import LinkSpeed
from remote_server.client import Anchors, CacheClient
from remote_server.client.connection.lookup_breaker import LookupBreaker
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Found, KeyState, Stretch

# Limit on keys in open queries, over all requests: a server answers so many in half the default
# deadline of a lookup. Without a limit, a burst of long prompts makes lookups late.
MOST_KEYS_UNDER_WAY = 32_768


@dataclass
class Queries:
    """Lookups under way to the server. Belongs to the scheduler thread. Replies and deadlines come
    on the client's I/O thread, which only appends to a deque; the scheduler thread applies them at
    its next lookup.
    """

    client: CacheClient
    counters: TierCounters
    link: LinkSpeed
    patience: Patience
    clock: Callable[[], float]
    breaker: LookupBreaker
    on_absent: Callable[[list[bytes]], None] | None = None
    """Called with the keys that a reply found absent."""
    answers: deque[Answer] = field(default_factory=deque, init=False)
    probe_key: bytes | None = field(default=None, init=False)
    """The key for the next probe, a lookup that no request waits for: one of the last late lookup,
    so that a pause ends also when no other request comes."""
    probe_s: float = field(default=0.0, init=False)
    """The deadline of that lookup, and of the probe."""
    _keys_under_way: int = field(default=0, init=False)

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
        anchors: Anchors = (),
    ) -> None:
        """Look `keys` up on the server, with their chain fields and anchors if they are known."""
        query = Query(kind, wait, wait.generation if wait is not None else 0, keys, self.clock())
        if wait is not None:
            self._keys_under_way += len(keys)
        on_late = None
        if wait is not None and kind is Kind.AWAITED:
            wait.sent(query.sent_s)
            on_late = partial(self._on_late, query)
        timeout_s = self._timeout_s(kind, wait)
        hint = wait.hint if wait is not None else None
        found = self.client.lookup(
            namespace, keys, timeout_s=timeout_s, on_late=on_late, chain=chain, anchors=anchors,
            hint=hint,
        )  # fmt: skip
        found.add_done_callback(partial(self._on_found, query))

    def _timeout_s(self, kind: Kind, wait: LookupState | None) -> float:
        if wait is None:
            return self.probe_s
        if kind is Kind.AGAIN:  # no request waits for it
            return wait.budget_s
        return max(self.patience.floor_s, wait.budget_s - wait.owed_s)

    def send_for(
        self, wait: LookupState, namespace: str, kind: Kind, keys: list[bytes],
        ends: list[int | None], rows: PoolRows,
    ) -> None:  # fmt: skip
        """Look up `keys` of a request, whose tokens end at `ends`."""
        chain = wait.chain(rows, keys, ends)
        anchors = () if wait.anchors is None else wait.anchors.of(keys, ends)
        self.send(namespace, kind, keys, wait, chain, anchors)

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
            if self.on_absent is not None and answer.states is not None:
                states = zip(keys, answer.states, strict=True)
                self.on_absent([key for key, state in states if state == KeyState.ABSENT])

    def _learn(self, answer: Answer) -> None:
        """Record the round trip, if it ended by a reply or by its deadline."""
        in_time, kind, sent_s = answer.states is not None, answer.query.kind, answer.query.sent_s
        if kind in (Kind.AGAIN, Kind.PROBE):
            self.breaker.probed(in_time=in_time)
        elif kind is Kind.LATE:
            self.breaker.replied_late(answer.ended_s - sent_s)
            self.link.lookup_took(answer.ended_s - sent_s)
        elif in_time or answer.reason is Missed.LOOKUP_LATE:
            seconds = answer.ended_s - sent_s
            self.counters.observe(metrics.LOOKUP_DURATION, seconds)
            if in_time:
                self.link.lookup_took(seconds)
            self.breaker.ended(in_time=in_time, sent_s=sent_s)
            if not in_time:
                self.probe_key, self.probe_s = answer.query.keys[0], seconds

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
