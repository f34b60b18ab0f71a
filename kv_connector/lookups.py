"""The lookups of all requests: the answer that vLLM gets now, and the question for the server.

vLLM looks up key by key, again in every engine step. The state of one request is in `waiting`.
This module keeps those states, turns a step's open keys into one question per prompt, and decides
from recent answers whether asking is worth it at all.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kv_connector import tier_metrics as metrics
from kv_connector.break_even import BreakEven
from kv_connector.config import RemoteConfig
from kv_connector.guard import never_raises
from kv_connector.patience import LookupPause, Patience
from kv_connector.pool_rows import PoolRoom, PoolRows, Room
from kv_connector.request_options import bypass_of, prefetches
from kv_connector.tier_metrics import TierCounters
from kv_connector.waiting import LOOKS_TO_USE_AN_ANSWER, Missed, Waiting
from remote_server.client import RemoteClient
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Found, KeyState

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY
PENDING, READABLE = KeyState.PENDING, KeyState.READABLE


# Keys asked for and not yet answered, over all requests: what a server answers in half the default
# deadline of a lookup. Without it a burst of long prompts would make each other's lookups late.
MOST_KEYS_UNDER_WAY = 32_768

# Taken for the speed of the link, in bytes a second, until loads have been measured.
UNMEASURED_LINK = 512 << 20


class Answer(NamedTuple):
    """A lookup that ended, handed from the client's I/O thread to the scheduler's."""

    asked_s: float
    ended_s: float
    wait: Waiting | None
    """Of the request that asked; None for a probe, which no request waits for."""
    generation: int
    keys: list[bytes]
    states: bytes | None
    """The server's answer, one state a key; None when there was none."""
    reason: Missed
    """Why there was none."""
    is_awaited: bool
    """Whether the request waited for it."""


class Lookups:
    """Belongs to the scheduler thread. Answers and deadlines come on the client's I/O thread,
    which only appends to one deque; the scheduler thread applies them at its next lookup.

    `namespace` is None where there is nothing to ask: every lookup is a miss then, or waits while
    `workers_unheard`.
    """

    def __init__(
        self,
        client: RemoteClient,
        rows: PoolRows,
        config: RemoteConfig,
        counters: TierCounters,
        break_even: BreakEven,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._rows = rows
        self._config = config
        self._counters = counters
        self._break_even = break_even
        self._patience = patience
        self._clock = clock
        self._waits: dict[str, Waiting] = {}
        self._step = 0
        self.workers_unheard = False
        """Whether `namespace` is None only because not every worker was heard yet."""
        self.unnamed = False
        """Whether `namespace` may be another one in a few steps: see `RemoteTier.await_epoch`."""
        self._greeted_by_s = -math.inf
        """Until then the server may take to welcome the newest name: see `renamed`."""
        self.engine_waits = False
        """Whether a request of this step waits for the server."""
        self._answers: deque[Answer] = deque()
        self._keys_under_way = 0
        self._num_hits = 0
        """Counted at the end of the step: the counter's lock would cost each key."""
        self._hits_of_step: set[bytes] = set()
        """Keys answered as hits in this step. vLLM submits their loads when the step ends."""
        self._last_token = rows.last_token_of_a_prompt
        self._room = PoolRoom(config.load_timeout_ms / 1000)
        self._resumed: set[str] = set()
        """Requests that were preempted. vLLM does not report when they are scheduled again, so
        they take no room."""
        self._held_since_s: float | None = None
        """Since when rows of the pool must not be loaded into."""
        self._pause = LookupPause(clock)
        self._probe_key: OffloadKey | None = None
        """The key that a lookup which no request waits for may ask."""

    @property
    def paused(self) -> bool:
        """Whether lookups are always late just now, and so not waited for."""
        return self._pause.paused

    # ── a request, from its first lookup to its end ──────────────────────────────────────

    def begin(self, req_context: ReqContext) -> None:
        params = req_context.kv_transfer_params
        prefetch = prefetches(params)
        budget_ms = self._config.load_timeout_ms if prefetch else self._config.wait_budget_ms
        self._waits[req_context.req_id] = Waiting(
            budget_s=budget_ms / 1000, bypass=bypass_of(params) is not None, prefetch=prefetch
        )

    def still_waits(self, request_id: str, loading: Collection[bytes]) -> bool:
        """Whether vLLM would defer this request again, found without a walk over its keys: no
        answer came since the last look, and a question or a load of ours is under way.

        `loading` are the keys of loads under way. True counts as a look.
        """
        if self._answers:
            self._take_answers()
        wait = self._waits.get(request_id)
        if wait is None or wait.news:
            return False
        if not (wait.held or wait.questions or wait.wanted or wait.blocked_on in loading):
            return False
        now_s = self._clock()
        goes_on = self._holds(wait, now_s) if wait.held else not wait.is_out_of_time(now_s)
        if not goes_on:
            return False
        wait.look(now_s=now_s, step=self._step)
        wait.deferred(now_s)
        self.engine_waits = True
        return True

    def answer(
        self, namespace: str | None, key: OffloadKey, req_context: ReqContext
    ) -> LookupResult:
        """MISS, HIT or RETRY, from what is known now; never waits.

        The engine calls this for every key of a prompt: what holds for all keys of a request is
        decided once a look, and an ordinary key costs a dictionary entry.
        """
        if self._answers:
            self._take_answers()
        wait = self._waits.get(req_context.req_id)
        if wait is None:
            return self._missed(Missed.BYPASS)
        if wait.news or wait.step != self._step:
            self._look(wait, namespace, key, req_context.req_id)
        state = wait.states.get(key, PENDING)
        if state is READABLE and wait.may_load:
            wait.loads += 1
            self._num_hits += 1
            self._hits_of_step.add(key)
            return HIT
        if wait.refusal is not None:
            return self._refuse(wait, key, wait.refusal)
        if wait.held:
            return RETRY
        if state is READABLE:
            return RETRY
        if isinstance(state, Missed):
            return self._refuse(wait, key, state)
        if wait.out_of_time:
            return self._refuse(wait, key, Missed.BUDGET_SPENT)
        if state is PENDING:  # never asked, or being written when it was asked last
            end_token = req_context.get_offload_key_position(key)
            if end_token is not None and end_token > self._last_token:
                return self._refuse(wait, key, Missed.BEYOND_POOL)
            if self._rows.is_partial(end_token):  # nothing puts these
                return self._refuse(wait, key, Missed.ABSENT)
            wait.states[key] = None
            wait.wanted.append(key)
        return RETRY

    def deferred(self, request_id: str, keys: Iterable[bytes], loading: Collection[bytes]) -> None:
        """vLLM could not admit the request in this step, whose prefix has `keys`."""
        wait = self._waits.get(request_id)
        if wait is not None:
            wait.deferred(self._clock())
            coming = self._hits_of_step
            wait.blocked_on = next((key for key in keys if key in loading or key in coming), None)

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """A miss from now on for every request that saw these keys fail."""
        lost = list(keys)
        for wait in self._waits.values() if lost else ():
            wait.load_failed(lost)

    def admitted(self, request_id: str) -> None:
        """The engine no longer waits for this request's lookups."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.looks and not wait.admitted:
            wait.look(now_s=self._clock(), step=self._step)
            self._observe_wait(wait, wait.waited_s, wait.waited_steps)

    def uses_server(self, request_id: str) -> bool:
        """False for requests that opted out, or must not use the server."""
        wait = self._waits.get(request_id)
        return wait is not None and not wait.bypass

    def states_of(self, request_id: str) -> Mapping[bytes, KeyState | Missed | None]:
        """What is known of this request's keys. To be read at once."""
        wait = self._waits.get(request_id)
        return {} if wait is None else wait.states

    def _scheduled(self, request_id: str) -> None:
        """A tier that is used bare learns of the admission only now, and sees no deferral."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.looks and not wait.admitted:
            waited_s = self._clock() - wait.first_look_s
            self._observe_wait(wait, waited_s, self._step - wait.first_step)
        self._room.release(request_id)

    def _observe_wait(self, wait: Waiting, seconds: float, steps: int) -> None:
        wait.admitted = True
        self._counters.observe(metrics.WAIT_SECONDS, seconds)
        self._counters.observe(metrics.WAIT_STEPS, steps)

    def finished(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
        self._room.release(request_id)
        self._resumed.discard(request_id)

    def forget_answers(self) -> None:
        """The weights may have changed: what was found belongs to the old ones."""
        for wait in self._waits.values():
            wait.forget_answers()

    def renamed(self) -> None:
        """A server that is there is greeted under another name. It is not ready until it has
        answered. A request that is looked up meanwhile waits for that within its budget."""
        self._greeted_by_s = self._clock() + self._config.wait_budget_ms / 1000

    def hold_loads(self) -> None:
        """Load nothing until `release_loads`."""
        self._held_since_s = self._clock()

    def release_loads(self) -> None:
        """Load again what the server holds."""
        self._held_since_s = None

    def _look(self, wait: Waiting, namespace: str | None, key: OffloadKey, request_id: str) -> None:
        """The first lookup of a request in a step: everything that holds for all of its keys."""
        now_s = self._clock()
        wait.look(now_s=now_s, step=self._step)
        wait.refusal, wait.may_load = None, False
        held, wait.held = wait.held, False
        reachable = namespace is not None and self._client.ready
        if reachable:
            self._greeted_by_s = -math.inf
        if wait.bypass:
            wait.refusal = Missed.BYPASS
        elif self.unnamed if reachable else self._may_come(held, now_s):
            wait.held = self._holds(wait, now_s)
        if wait.held:
            self.engine_waits = True
        elif wait.refusal is not None:
            return
        elif not reachable:
            wait.refusal = Missed.UNAVAILABLE
        elif self._pause.paused and not wait.asked:
            self._probe_key = key
            wait.refusal = Missed.LOOKUP_PAUSED
        else:
            self.engine_waits = True
            if readable := wait.readable():
                self._decide(wait, readable, request_id, now_s)

    def _may_come(self, held: bool, now_s: float) -> bool:
        """Whether a server that cannot be asked yet may be one soon. `held`: this request has
        waited for it before."""
        return held or self.workers_unheard or now_s <= self._greeted_by_s

    def _holds(self, wait: Waiting, now_s: float) -> bool:
        """Whether a request that is held stays so: until every worker was heard, the server has
        answered the first greeting, and the epoch has its name, within the request's budget."""
        if not (self.workers_unheard or self.unnamed) and (
            self._client.ready or self._client.absent
        ):
            return False
        in_time = now_s - wait.first_look_s <= wait.budget_s
        return in_time or wait.looks <= LOOKS_TO_USE_AN_ANSWER

    def hold_nothing(self) -> None:
        """There will be no namespace soon: requests are misses from now on."""
        self.workers_unheard = False
        self.look_again()

    def look_again(self) -> None:
        """Requests that are held are looked up anew."""
        for wait in self._waits.values():
            wait.news = wait.news or wait.held
            wait.held = False

    def _decide(self, wait: Waiting, readable: list[bytes], request_id: str, now_s: float) -> None:
        """Whether the blocks that the server holds may be loaded in this step."""
        if self._held_since_s is not None:
            if now_s - self._held_since_s > self._config.load_timeout_ms / 1000:
                wait.give_up(readable, Missed.POOL_BUSY)
            return
        if not wait.judged and not self._worth_fetching(wait, readable, round_trips=1):
            wait.give_up(readable, Missed.BREAK_EVEN)
        elif wait.loads_too_often:
            wait.give_up(readable, Missed.EVICTED_AGAIN)
        elif request_id in self._resumed:
            wait.may_load = True
        else:
            room = self._room.take(
                request_id,
                len(readable),
                most_rows=min(self._rows.rows_for_loads, self._rows_in_time()),
                now_s=now_s,
                step=self._step,
            )
            wait.may_load = room is Room.GRANTED
            if room is Room.NEVER:
                wait.give_up(readable, Missed.POOL_BUSY)
        wait.judged = True

    def _rows_in_time(self) -> int:
        """Rows that the link brings in half the time that a load may take. With more under way
        a healthy link would still miss the deadline of the last ones."""
        bytes_per_s = self._break_even.link.bytes_per_s or UNMEASURED_LINK
        seconds = self._config.load_timeout_ms / 1000 / 2
        return int(bytes_per_s * seconds / self._rows.block_bytes)

    def _refuse(self, wait: Waiting, key: bytes, reason: Missed) -> LookupResult:
        """A miss: for this request, or for now."""
        if wait.states.get(key) is not reason:
            wait.give_up((key,), reason)
        if key not in wait.counted:
            wait.counted.add(key)
            self._missed(reason)
        return MISS

    def _missed(self, reason: Missed) -> LookupResult:
        self._counters.count(metrics.MISSED_BLOCKS, label=reason)
        return MISS

    # ── the end of a step ────────────────────────────────────────────────────────────────

    def end_step(
        self, namespace: str | None, scheduled: Iterable[str], preempted: Iterable[str]
    ) -> None:
        """Ask what this step's lookups could not answer: one question per prompt.

        `scheduled` are the requests that the engine computes for the first time, `preempted`
        those that it will look up again.
        """
        self._take_answers()
        self._step += 1
        self.engine_waits = False
        self._counters.count(metrics.HIT_BLOCKS, self._num_hits)
        self._num_hits = 0
        self._hits_of_step.clear()
        if namespace is not None:
            self._probe(namespace)
        for request_id in scheduled:
            self._scheduled(request_id)
        for request_id in preempted:
            if (wait := self._waits.get(request_id)) is not None:
                wait.ask_again()
                self._room.release(request_id)
                self._resumed.add(request_id)
        for wait in self._waits.values():
            if wait.wanted:
                keys_then = self._keys_under_way + len(wait.wanted)
                if self._keys_under_way and keys_then > MOST_KEYS_UNDER_WAY:
                    break  # the others keep their turn: nothing is owed to them yet
                self._ask_for(wait, namespace)
            elif wait.missed_for_now and not wait.admitted:
                self._ask_again(wait, namespace)

    def server_came_back(self) -> None:
        """What was learned of the server before it went away no longer counts."""
        self._pause.forget()

    def _ask_for(self, wait: Waiting, namespace: str | None) -> None:
        keys = wait.take_wanted()
        if namespace is None:
            wait.give_up(keys, Missed.UNAVAILABLE)
        elif not wait.asked and not self._worth_fetching(wait, keys, round_trips=2):
            wait.give_up(keys, Missed.BREAK_EVEN)
        else:
            now_s = self._clock()
            wait.sent(now_s)
            self._keys_under_way += len(keys)
            self._ask(namespace, keys).add_done_callback(
                partial(self._on_found, wait, wait.generation, keys, now_s, is_awaited=True)
            )

    def _ask_again(self, wait: Waiting, namespace: str | None) -> None:
        """The engine had no place for this request, whose lookup was late or not sent. Look up
        once more what was a miss: until the answer is here it stays one, so no time is lost."""
        if namespace is None or wait.asks_again or self._pause.paused or not self._client.ready:
            return
        wait.asks_again = True
        keys = [*wait.missed_for_now]
        self._keys_under_way += len(keys)
        self._ask(namespace, keys).add_done_callback(
            partial(self._on_found, wait, wait.generation, keys, self._clock(), is_awaited=False)
        )

    def _ask(self, namespace: str, keys: list[bytes]) -> "Future[Found]":
        return self._client.lookup(namespace, keys, timeout_s=self._patience.lookup_s)

    def _probe(self, namespace: str) -> None:
        key = self._probe_key
        if key is not None and self._client.ready and self._pause.take_probe():
            self._ask(namespace, [key]).add_done_callback(
                partial(self._on_found, None, 0, [key], self._clock(), is_awaited=False)
            )

    def _worth_fetching(self, wait: Waiting, keys: list[bytes], *, round_trips: int) -> bool:
        if wait.prefetch:
            return True
        num_bytes = len(keys) * self._rows.block_bytes
        num_tokens = self._rows.tokens_of(len(keys))
        return self._break_even.admits(num_bytes, num_tokens, round_trips=round_trips)

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def _take_answers(self) -> None:
        """Apply what the I/O thread has handed over, in the order in which it came."""
        while self._answers:
            answer = self._answers.popleft()
            self._learn(answer)
            wait = answer.wait
            if wait is not None:
                self._keys_under_way -= len(answer.keys)
            if wait is None or answer.generation != wait.generation:
                continue
            if not answer.is_awaited:
                wait.answered_again(answer.keys, answer.states)
            elif answer.states is not None:
                wait.answered(answer.keys, answer.states, answer.ended_s)
            else:
                wait.unanswered(answer.keys, answer.reason, answer.ended_s)

    def _learn(self, answer: Answer) -> None:
        """How long the round trip took, where the server or its silence decided that."""
        in_time = answer.states is not None
        if not answer.is_awaited:
            self._pause.probed(in_time=in_time)
        elif in_time or answer.reason is Missed.LOOKUP_LATE:
            seconds = answer.ended_s - answer.asked_s
            self._counters.observe(metrics.LOOKUP_DURATION, seconds)
            self._break_even.link.lookup_took(seconds)
            self._pause.ended(in_time=in_time, asked_s=answer.asked_s)

    # ── on the client's I/O thread ───────────────────────────────────────────────────────

    @never_raises(lambda: None)
    def _on_found(
        self,
        wait: Waiting | None,
        generation: int,
        keys: list[bytes],
        asked_s: float,
        reply: "Future[Found]",
        *,
        is_awaited: bool,
    ) -> None:
        states, reason = None, Missed.LOOKUP_FAILED
        if not reply.cancelled():
            error = reply.exception()
            if error is None:
                states = reply.result().states
            elif isinstance(error, DeadlineExceeded):
                reason = Missed.LOOKUP_LATE
            elif isinstance(error, ServerUnavailable):
                reason = Missed.UNAVAILABLE
        answer = Answer(asked_s, self._clock(), wait, generation, keys, states, reason, is_awaited)
        self._answers.append(answer)

    def count_hook_error(self, hook: str) -> None:
        """One exception of ours was kept from the client's thread."""
        self._counters.count(metrics.HOOK_ERRORS, label=hook)
