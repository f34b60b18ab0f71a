"""The link to the server, as an engine sees it: its measured speed, the decision to fetch or to
compute, the deadlines of requests, the lookups under way, and their breaker."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median

from kv_connector import guarded, metrics
from kv_connector.config import RemoteConfig
from kv_connector.lookup_state import Answer, Kind, LookupState, Missed, Query
from kv_connector.metrics import TierCounters
from remote_server.client import RemoteClient
from remote_server.client.session import ONE_STALL_S
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Found, Stretch

KEPT_SAMPLES = 9
LEAST_SAMPLES = 5

# Steps below these limits do not measure prompt speed: the fixed cost of a step or its decoding
# requests dominate.
LEAST_PROMPT_TOKENS = 64
LEAST_PROMPT_SHARE = 0.5

# Most steps in flight in vLLM, with pipelined workers. More means that an end was missed.
MOST_STEPS_UNDER_WAY = 8


@dataclass
class Recent:
    """Median of the last `KEPT_SAMPLES` values; needs at least `LEAST_SAMPLES`."""

    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    def add(self, sample: float) -> None:
        self._samples.append(sample)

    def forget(self) -> None:
        """Drop all samples, as after an outage."""
        self._samples.clear()

    @property
    def value(self) -> float | None:
        """None below `LEAST_SAMPLES`."""
        return median(self._samples) if len(self._samples) >= LEAST_SAMPLES else None


@dataclass
class LinkSpeed:
    """Link speed, from the engine's own loads and lookups. Other users of the link lower it."""

    _bytes_per_s: Recent = field(default_factory=Recent)
    _round_trip_s: Recent = field(default_factory=Recent)

    def lookup_took(self, seconds: float) -> None:
        """A lookup ended after `seconds`, with a reply or at its deadline."""
        self._round_trip_s.add(seconds)

    def load_took(self, num_bytes: int, seconds: float) -> None:
        """A load ended after `seconds` with `num_bytes` landed; 0 is allowed.

        One round trip is subtracted, but at most half: a small load is mostly round trip.
        """
        flowing_s = max(seconds - (self._round_trip_s.value or 0.0), seconds / 2, 1e-6)
        self._bytes_per_s.add(num_bytes / flowing_s)

    def forget(self) -> None:
        """Drop all samples after an outage: another server may answer now."""
        self._bytes_per_s.forget()
        self._round_trip_s.forget()

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s.value

    @property
    def round_trip_s(self) -> float | None:
        return self._round_trip_s.value


@dataclass
class EngineSpeed:
    """Duration of the engine's recent steps, and prompt tokens computed a second."""

    _tokens_per_s: Recent = field(default_factory=Recent)
    _step_s: Recent = field(default_factory=Recent)
    _under_way: deque[tuple[int, float]] = field(default_factory=deque)
    _last_end_s: float = float("-inf")

    def step_began(self, tokens_by_request: Iterable[int], now_s: float) -> None:
        """The scheduler planned a step with these numbers of tokens."""
        counts = list(tokens_by_request)
        prompt = sum(count for count in counts if count > 1)
        telling = prompt >= max(LEAST_PROMPT_TOKENS, LEAST_PROMPT_SHARE * sum(counts))
        if len(self._under_way) == MOST_STEPS_UNDER_WAY:
            self._under_way.clear()
        self._under_way.append((prompt if telling else 0, now_s))

    def step_ended(self, now_s: float) -> None:
        """The oldest step in flight ended. A pipelined step began when the one before it ended."""
        if self._under_way:
            tokens, planned_s = self._under_way.popleft()
            took_s = now_s - max(planned_s, self._last_end_s)
            self._step_s.add(took_s)
            if tokens and took_s > 0:
                self._tokens_per_s.add(tokens / took_s)
        self._last_end_s = now_s

    @property
    def step_s(self) -> float | None:
        """Includes steps that computed nothing: an engine that only waits for a server takes short
        steps."""
        return self._step_s.value

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens_per_s.value


# While prefixes are declined, every `PROBE_EVERY`th is fetched all the same, and the first after
# `PROBE_AFTER_S`. Five such probes can turn the median around.
PROBE_EVERY = 16
PROBE_AFTER_S = 10.0


def worth_loading(
    num_bytes: int, num_tokens: int, link: LinkSpeed, engine: EngineSpeed, *, round_trips: int
) -> bool:
    """Whether loading `num_bytes` is at least as fast as computing `num_tokens`.

    `round_trips` is the number still to be made: 2 before the lookup, 1 after it. True when a speed
    is unknown: only a fetch can measure it.
    """
    bytes_per_s, round_trip_s, tokens_per_s = (
        link.bytes_per_s, link.round_trip_s, engine.tokens_per_s
    )  # fmt: skip
    if bytes_per_s is None or round_trip_s is None or tokens_per_s is None:
        return True
    if bytes_per_s <= 0:
        return False
    if tokens_per_s <= 0:
        return True
    return round_trips * round_trip_s + num_bytes / bytes_per_s <= num_tokens / tokens_per_s


@dataclass
class BreakEven:
    """The decision of one engine. Only the scheduler thread calls it."""

    clock: Callable[[], float]
    enabled: bool = True
    link: LinkSpeed = field(default_factory=LinkSpeed)
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    _declined: int = 0
    _last_probe_s: float | None = None

    def admits(self, num_bytes: int, num_tokens: int, *, round_trips: int) -> bool:
        """Whether to fetch this prefix: fetching is faster, or a probe is due."""
        speeds = self.link, self.engine
        if not self.enabled or worth_loading(
            num_bytes, num_tokens, *speeds, round_trips=round_trips
        ):
            return True
        now_s = self.clock()
        if self._last_probe_s is None:
            self._last_probe_s = now_s
        self._declined += 1
        if self._declined < PROBE_EVERY and now_s - self._last_probe_s < PROBE_AFTER_S:
            return False
        self._declined, self._last_probe_s = 0, now_s
        return True


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
        with guarded(self.counters, "_on_found"):
            error = CancelledError() if reply.cancelled() else reply.exception()
            if error is None:
                states = reply.result().states
            elif isinstance(error, DeadlineExceeded):
                reason = Missed.LOOKUP_LATE
            elif isinstance(error, ServerUnavailable):
                reason = Missed.UNAVAILABLE
            self.answers.append(Answer(query, self.clock(), states, reason))

    def _on_late(self, query: Query, found: Found) -> None:
        with guarded(self.counters, "_on_late"):
            late, now_s = query._replace(kind=Kind.LATE), self.clock()
            self.answers.append(Answer(late, now_s, found.states, Missed.LOOKUP_LATE))
