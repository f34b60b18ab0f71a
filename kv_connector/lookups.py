"""The lookups of all requests: what vLLM is answered now, and what the server is asked next.

vLLM asks key by key, again in every engine step. What one request knows is in `waiting`; here
those are kept, a step's open keys become one question per prompt, and what the answers took
decides whether asking is worth it at all.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kv_connector import tier_metrics as metrics
from kv_connector.break_even import BreakEven
from kv_connector.config import RemoteConfig
from kv_connector.guard import never_raises
from kv_connector.lookup_pause import LookupPause
from kv_connector.pool_rows import PoolRows
from kv_connector.request_options import BYPASS_KEY
from kv_connector.tier_metrics import TierCounters
from kv_connector.waiting import Missed, Verdict, Waiting
from remote_server.client import RemoteClient
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Found


class RoundTrip(NamedTuple):
    """A lookup that was answered, or given up, after `seconds`."""

    seconds: float
    in_time: bool
    probe: bool = False
    """Nobody waited for it."""


class Lookups:
    """Belongs to the scheduler thread; replies and deadlines come on the client's I/O thread,
    which only writes into the request's own `Waiting` and appends to one deque.

    `namespace` is None where there is nothing to ask: every lookup is a miss then.
    """

    def __init__(
        self,
        client: RemoteClient,
        rows: PoolRows,
        config: RemoteConfig,
        counters: TierCounters,
        break_even: BreakEven,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._rows = rows
        self._config = config
        self._counters = counters
        self._break_even = break_even
        self._clock = clock
        self._waits: dict[str, Waiting] = {}
        self._step = 0
        self.engine_waits = False
        """Whether a request of this step waits for the server."""
        self._round_trips: deque[RoundTrip] = deque()
        """Those that ended, from the I/O thread to the scheduler's."""
        self._pause = LookupPause(clock)
        self._probe_key: OffloadKey | None = None
        """What a lookup that nobody waits for may ask."""

    @property
    def paused(self) -> bool:
        """Whether lookups are always late just now, and so not waited for."""
        return self._pause.paused

    # ── a request, from its first lookup to its end ──────────────────────────────────────

    def begin(self, req_context: ReqContext) -> None:
        params = req_context.kv_transfer_params or {}
        self._waits[req_context.req_id] = Waiting(
            budget_s=self._config.wait_budget_ms / 1000, bypass=params.get(BYPASS_KEY)
        )

    def answer(
        self, namespace: str | None, key: OffloadKey, req_context: ReqContext
    ) -> LookupResult:
        """MISS, HIT or RETRY, from what is known now; never waits."""
        wait = self._waits.get(req_context.req_id)
        if wait is None:
            return self._missed(Missed.BYPASS)
        if not self._client.ready or namespace is None:
            wait.give_up([key], Missed.UNAVAILABLE)
        elif self._rows.beyond_one_prompt(key, req_context):
            wait.give_up([key], Missed.BEYOND_POOL)
        elif self._pause.paused and not wait.asked:
            self._probe_key = key
            wait.give_up([key], Missed.LOOKUP_PAUSED)
        verdict = wait.verdict(key, now_s=self._clock(), step=self._step)
        if verdict is Verdict.HIT and not wait.judged:
            wait.judged = True
            if not self._worth_fetching(wait.readable(), round_trips=1):
                wait.give_up(wait.readable(), Missed.BREAK_EVEN)
                verdict = Missed.BREAK_EVEN
        if isinstance(verdict, Missed):
            return self._missed(verdict)
        self.engine_waits = True
        if verdict is Verdict.RETRY:
            return LookupResult.RETRY
        self._counters.count(metrics.HIT_BLOCKS)
        return LookupResult.HIT

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """A miss from now on for every request that saw these keys fail."""
        lost = list(keys)
        for wait in self._waits.values() if lost else ():
            wait.load_failed(lost)

    def admitted(self, request_id: str) -> None:
        """The engine no longer waits for this request's lookups."""
        wait = self._waits.get(request_id)
        if wait and (waited := wait.admit(now_s=self._clock(), step=self._step)):
            seconds, steps = waited
            self._counters.observe(metrics.WAIT_SECONDS, seconds)
            self._counters.observe(metrics.WAIT_STEPS, steps)

    def finished(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def forget_answers(self) -> None:
        """The weights may have changed: what was found belongs to the old ones."""
        for wait in self._waits.values():
            wait.states = {}

    # ── the end of a step ────────────────────────────────────────────────────────────────

    def end_step(self, namespace: str | None, admitted: Iterable[str]) -> None:
        """Ask what this step's lookups could not answer: one question per prompt."""
        self._step += 1
        self.engine_waits = False
        self._learn()
        if namespace is not None:
            self._probe(namespace)
        for request_id in admitted:
            self.admitted(request_id)
        for wait in self._waits.values():
            keys = wait.take_wanted()
            if not keys or namespace is None:
                continue
            if not wait.asked and not self._worth_fetching(keys, round_trips=2):
                wait.give_up(keys, Missed.BREAK_EVEN)
                continue
            wait.asked = True
            self._ask(namespace, keys).add_done_callback(
                partial(self._on_found, wait, keys, self._clock())
            )

    def server_came_back(self) -> None:
        """What was learned of the server before it went away no longer counts."""
        self._pause.forget()

    def _ask(self, namespace: str, keys: list[bytes]) -> "Future[Found]":
        timeout_s = self._config.lookup_timeout_ms / 1000
        return self._client.lookup(namespace, keys, timeout_s=timeout_s)

    def _learn(self) -> None:
        while self._round_trips:
            ended = self._round_trips.popleft()
            if ended.probe:
                self._pause.probed(in_time=ended.in_time)
            else:
                self._counters.observe(metrics.LOOKUP_DURATION, ended.seconds)
                self._break_even.link.lookup_took(ended.seconds)
                self._pause.ended(in_time=ended.in_time)

    def _probe(self, namespace: str) -> None:
        key = self._probe_key
        if key is not None and self._client.ready and self._pause.take_probe():
            self._ask(namespace, [key]).add_done_callback(partial(self._on_probed, self._clock()))

    def _worth_fetching(self, keys: list[bytes], *, round_trips: int) -> bool:
        num_bytes = len(keys) * self._rows.block_bytes
        num_tokens = self._rows.tokens_of(len(keys))
        return self._break_even.admits(num_bytes, num_tokens, round_trips=round_trips)

    def _missed(self, reason: Missed) -> LookupResult:
        self._counters.count(metrics.MISSED_BLOCKS, label=reason)
        return LookupResult.MISS

    # ── on the client's I/O thread ───────────────────────────────────────────────────────

    @never_raises(lambda: None)
    def _on_probed(self, asked_s: float, reply: "Future[Found]") -> None:
        in_time = not reply.cancelled() and reply.exception() is None
        self._round_trips.append(RoundTrip(self._clock() - asked_s, in_time, probe=True))

    @never_raises(lambda: None)
    def _on_found(
        self, wait: Waiting, keys: list[bytes], asked_s: float, reply: "Future[Found]"
    ) -> None:
        if reply.cancelled():
            wait.give_up(keys, Missed.LOOKUP_FAILED)
        elif (error := reply.exception()) is None:
            wait.answer(keys, reply.result().states)
            self._round_trips.append(RoundTrip(self._clock() - asked_s, in_time=True))
        elif isinstance(error, DeadlineExceeded):
            wait.give_up(keys, Missed.LOOKUP_LATE)
            self._round_trips.append(RoundTrip(self._clock() - asked_s, in_time=False))
        elif isinstance(error, ServerUnavailable):
            wait.give_up(keys, Missed.UNAVAILABLE)
        else:
            wait.give_up(keys, Missed.LOOKUP_FAILED)

    def count_hook_error(self, hook: str) -> None:
        """One exception of ours was kept from the client's thread."""
        self._counters.count(metrics.HOOK_ERRORS, label=hook)
