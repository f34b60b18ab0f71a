"""Lookups of all requests: the results for vLLM.

vLLM looks up key by key, again in every engine step. `lookup_state` has the state of one request,
and `queries` the lookups under way. This module keeps those states, batches a step's open keys
into one query per prompt, and decides from recent replies whether a query is worth its wait.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kv_connector.pool.anchors import RunAnchors, run_anchors
from kv_connector.pool.room import PoolRoom, Room
from kv_connector.pool.rows import PoolRows
from kv_connector.request_options import bypass_of, hint_in, prefetches
from kv_connector.tier import metrics
from kv_connector.tier.break_even import BreakEven, Judge
from kv_connector.tier.lookup_state import LOOKUPS_TO_USE_A_REPLY, Kind, LookupState, Missed
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.patience import Patience
from kv_connector.tier.queries import Queries
from remote_server.client import CacheClient
from remote_server.client.connection.lookup_breaker import LookupBreaker
from remote_server.protocol import KeyState

logger = init_logger("vllm.kvferry.lookups")

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY
PENDING, READABLE = KeyState.PENDING, KeyState.READABLE

States = Mapping[bytes, KeyState | Missed | None]
"""By key; see `LookupState.states`."""

# Finished requests whose states are kept, and the keys of all of them: 10 MB.
MOST_PAST = 256
MOST_PAST_KEYS = 65_536


class Lookups:
    """Lookup states of all requests. Belongs to the scheduler thread.

    Methods take `namespace=None` while no query is possible: every lookup is then a miss, or waits
    while `workers_missing`.
    """

    def __init__(
        self,
        client: CacheClient,
        rows: PoolRows,
        counters: TierCounters,
        break_even: BreakEven,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
        on_absent: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        """`on_absent` is called with the keys that a reply found absent."""
        self._client = client
        self._rows = rows
        self._patience = patience
        self._counters = counters
        self._judge = Judge(client, rows, break_even)
        self._clock = clock
        self._waits: dict[str, LookupState] = {}
        self._past: dict[str, States] = {}
        """States of the last finished requests: vLLM may store their last blocks later."""
        self._step = 0
        self.workers_missing = False
        """Whether `namespace` is None because not every worker has reported yet."""
        self.unnamed = False
        """Whether `namespace` may change in a few steps; see `RemoteTier.await_epoch`."""
        self._greeted_by_s = -math.inf
        """Deadline for the server's reply to the hello with the newest name; see `renamed`."""
        self.engine_waits = False
        """Whether a request of this step waits for the server."""
        self.breaker = LookupBreaker(clock)
        self._queries = Queries(
            client, counters, break_even.link, patience, clock, self.breaker, on_absent
        )
        self._num_hits = 0
        """Added to the counter at the end of the step, to take its lock once."""
        self._hits_of_step: set[bytes] = set()
        """Keys that were hits in this step. vLLM submits their loads when the step ends."""
        self._last_token = rows.last_token_of_a_prompt
        self._room = PoolRoom(rows)
        self._held_since_s: float | None = None
        """Start of the time in which rows of the pool must not be loaded into."""

    # ── a request, from its first lookup to its end ──────────────────────────────────────

    def begin(self, req_context: ReqContext) -> None:
        self._past.pop(req_context.req_id, None)
        prefetch = prefetches(params := req_context.kv_transfer_params)
        patience = self._patience
        budget_s = patience.longest_s if prefetch else patience.wait_s() + patience.reply_s()
        self._waits[req_context.req_id] = LookupState(
            budget_s=budget_s, bypass=bypass_of(params) is not None, prefetch=prefetch,
            position=req_context.get_offload_key_position, anchors=self.anchors_of(req_context),
            hint=hint_in(params, lambda why: self._counters.count(metrics.BAD_HINTS, label=why)),
        )  # fmt: skip

    def anchors_of(self, req_context: ReqContext) -> RunAnchors | None:
        """The anchors of a request's rows; None with one server, which needs none."""
        if not self._client.places_by_run:
            return None
        wait = self._waits.get(req_context.req_id)
        return wait.anchors if wait is not None else run_anchors(self._rows, req_context)

    def still_waits(self, request_id: str, loading: Collection[bytes]) -> bool:
        """Whether vLLM would defer this request again, found without a walk over its keys: no
        reply came since its last lookup, and a query or a load is under way.

        `loading` are the keys of loads under way. True counts as a lookup of the request.
        """
        if self._queries.answers:
            self._queries.take_answers()
        wait = self._waits.get(request_id)
        if wait is None or wait.news:
            return False
        if not (wait.held or wait.queries or wait.wanted or wait.blocked_on in loading):
            return False
        now_s = self._clock()
        goes_on = self._holds(wait, now_s) if wait.held else not wait.is_out_of_time(now_s)
        if not goes_on:
            return False
        wait.looked_up(now_s=now_s, step=self._step)
        wait.deferred(now_s)
        self.engine_waits = True
        return True

    def answer(
        self, namespace: str | None, key: OffloadKey, req_context: ReqContext
    ) -> LookupResult:
        """MISS, HIT or RETRY, from the present state; never waits.

        The engine calls this for every key of a prompt. Decisions that hold for all keys of a
        request are made once a step; an ordinary key costs a dictionary entry.
        """
        if self._queries.answers:
            self._queries.take_answers()
        wait = self._waits.get(req_context.req_id)
        if wait is None:
            return self._missed(Missed.BYPASS)
        if wait.news or wait.step != self._step:
            self._look_up(wait, namespace, req_context.req_id)
        state = wait.states.get(key, PENDING)
        if state is READABLE and wait.may_load:
            wait.loads += 1
            self._num_hits += 1
            self._hits_of_step.add(key)
            return HIT
        if wait.refusal is not None:
            return self._refuse(wait, key, wait.refusal)
        if wait.held or state is READABLE:
            return RETRY
        if isinstance(state, Missed):
            return self._refuse(wait, key, state)
        if wait.out_of_time:
            return self._refuse(wait, key, Missed.BUDGET_SPENT)
        if state is PENDING:  # never queried, or being written at the last query
            end_token = req_context.get_offload_key_position(key)
            if end_token is not None and end_token > self._last_token:
                return self._refuse(wait, key, Missed.BEYOND_POOL)
            if self._rows.is_partial(end_token):  # such blocks are never put
                return self._refuse(wait, key, Missed.ABSENT)
            wait.states[key] = None
            wait.wanted.append(key)
            wait.wanted_ends.append(end_token)
        return RETRY

    def deferred(self, request_id: str, keys: Iterable[bytes], loading: Collection[bytes]) -> None:
        """vLLM could not admit the request in this step. `keys` are those of its prefix."""
        wait = self._waits.get(request_id)
        if wait is not None:
            wait.deferred(self._clock())
            coming = self._hits_of_step
            wait.blocked_on = next((key for key in keys if key in loading or key in coming), None)

    def load_failed(self, keys: Collection[bytes]) -> None:
        """Loads of these keys failed: they are misses for every request that looked them up."""
        for wait in self._waits.values():
            wait.load_failed(keys)

    def admitted(self, request_id: str, reused_tokens: int) -> States | None:
        """The engine no longer waits for this request's lookups. `reused_tokens` of its prompt were
        found in any level; -1 when that is not known. Returns the states of its keys, valid until
        the next call; None for a request that must not use the server."""
        wait = self._waits.get(request_id)
        if wait is None:
            return None
        if wait.reused < 0:
            wait.reused = reused_tokens
        if wait.lookup_steps and not wait.admitted:
            wait.looked_up(now_s=self._clock(), step=self._step)
            self._observe_wait(wait, wait.waited_s, wait.waited_steps)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(wait.line(request_id))
            if self._client.places_by_run and self._rows.is_one_chain and (cut := wait.cut()):
                self._counters.count(metrics.PREFIX_CUTS, label=cut)
        return None if wait.bypass else wait.states

    def class_of(self, request_id: str) -> int:
        """Tokens of the prompt that were found in any level when the engine first admitted the
        request; -1 when that is not known."""
        wait = self._waits.get(request_id)
        return -1 if wait is None else wait.reused

    def prompt_is(self, request_id: str, num_tokens: int) -> None:
        """The prompt of a request that has begun has so many tokens: what the server may save, and
        so how long the request may wait for it."""
        if (wait := self._waits.get(request_id)) is not None:
            wait.prompt_tokens = num_tokens

    def budget_left_s(self, request_id: str) -> float:
        """How long the request may still wait in vain; without a limit if it is gone."""
        if (wait := self._waits.get(request_id)) is None:
            return math.inf
        return wait.vain_s - max(0.0, wait.owed_s - self._patience.reply_s(wait.computes_s))

    def load_was_silent(self, key: bytes, seconds: float) -> None:
        """Nothing came for a load of `key` for so long: the server may be silent."""
        self.breaker.was_late(self._clock() - seconds)
        self._queries.probe_key, self._queries.probe_s = key, seconds

    def bucket_share(self, request_id: str, keys: Collection[bytes]) -> float:
        """The share of `keys` that the server had in its object store only, by its replies to this
        request."""
        wait = self._waits.get(request_id)
        return 0.0 if wait is None else wait.bucket_share(keys)

    def lacked(self, request_id: str, keys: Collection[bytes]) -> bool:
        """Whether the server lacks all of `keys`, by its replies to this request: it reported each
        of them absent, or did not report it and reported another one absent, behind which the
        request's blocks are new."""
        wait, absent = self._waits.get(request_id), Missed.ABSENT
        states = self._past.get(request_id) or (wait.states if wait is not None else {})
        return absent in states.values() and all(states.get(key, absent) is absent for key in keys)

    def _scheduled(self, request_id: str) -> None:
        """The request was scheduled. A bare tier detects the admission only here, and sees no
        deferral."""
        wait = self._waits.get(request_id)
        if wait is not None:
            wait.scheduled = True
            if wait.lookup_steps and not wait.admitted:
                waited_s = self._clock() - wait.first_lookup_s
                self._observe_wait(wait, waited_s, self._step - wait.first_step)
        self._room.release(request_id)

    def _observe_wait(self, wait: LookupState, seconds: float, steps: int) -> None:
        wait.admitted = True
        self._counters.observe(metrics.WAIT_SECONDS, seconds)
        self._counters.observe(metrics.WAIT_STEPS, steps)

    def finished(self, request_id: str) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is not None and wait.states:
            self._past[request_id] = wait.states
            while (
                len(self._past) > MOST_PAST or sum(map(len, self._past.values())) > MOST_PAST_KEYS
            ):
                del self._past[next(iter(self._past))]
        self._room.finished(request_id)

    def forget_answers(self) -> None:
        """The weights may have changed: drop replies that belong to the old ones."""
        self._past.clear()
        for wait in self._waits.values():
            wait.forget_answers()

    def renamed(self) -> None:
        """A hello with another namespace goes to the connected server, which is not ready until it
        replies. Requests that are looked up meanwhile wait for the reply within their budget."""
        self._greeted_by_s = self._clock() + self._patience.wait_s()

    def hold_loads(self) -> None:
        """Load nothing into the pool until `release_loads`: copies from before a reset may still
        land in it. Lookups of blocks on the server wait, as long as the request may."""
        self._held_since_s = self._clock()

    def release_loads(self) -> None:
        """The last copy from before a reset has ended, in all workers."""
        self._held_since_s = None

    def _look_up(self, wait: LookupState, namespace: str | None, request_id: str) -> None:
        """The first lookup of a request in a step: decide what holds for all of its keys."""
        now_s = self._clock()
        wait.looked_up(now_s=now_s, step=self._step)
        if wait.prompt_tokens and not wait.queried:
            self._may_take(wait, wait.prompt_tokens)
        wait.refusal, wait.may_load = None, False
        # Whether a server that cannot be queried yet may be ready soon.
        may_come = wait.held or self.workers_missing or now_s <= self._greeted_by_s
        wait.held = False
        reachable = namespace is not None and self._client.ready
        if reachable:
            self._greeted_by_s = -math.inf
        if wait.bypass:
            wait.refusal = Missed.BYPASS
        elif self.unnamed if reachable else may_come:
            wait.held = self._holds(wait, now_s)
        if wait.held:
            self.engine_waits = True
        elif wait.refusal is not None:
            return
        elif not reachable:
            wait.refusal = Missed.UNAVAILABLE
        elif not wait.queried and not self.breaker.left_s(wait.budget_s):
            wait.refusal = Missed.LOOKUP_PAUSED
        elif not wait.queried and self._judge.declines(wait):
            wait.refusal = Missed.BREAK_EVEN
        else:
            self.engine_waits = True
            if readable := wait.readable():
                self._decide(wait, readable, request_id, now_s)

    def _holds(self, wait: LookupState, now_s: float) -> bool:
        """Whether a held request stays held. It does until every worker has reported, the server
        has replied to the first hello and the epoch has its name, within the request's budget."""
        if not (self.workers_missing or self.unnamed) and (
            self._client.ready or self._client.absent
        ):
            return False
        in_time = now_s - wait.first_lookup_s <= wait.budget_s
        return in_time or wait.lookup_steps <= LOOKUPS_TO_USE_A_REPLY

    def hold_nothing(self) -> None:
        """No namespace is expected soon: until there is one, requests are misses, and an idle
        engine does not step."""
        self.workers_missing = False
        self.retry_held()

    def retry_held(self) -> None:
        """Look held requests up again."""
        for wait in self._waits.values():
            wait.news, wait.held = wait.news or wait.held, False

    def _decide(
        self, wait: LookupState, readable: list[bytes], request_id: str, now_s: float
    ) -> None:
        """Whether the blocks that the server holds may be loaded in this step."""
        if self._held_since_s is not None:
            if now_s - self._held_since_s > wait.budget_s:
                wait.give_up(readable, Missed.POOL_BUSY)
            return
        readable = self._judge.without_slow(wait, readable)
        if not readable:
            return
        if not wait.judged and not self._judge.is_worth(wait, readable, round_trips=1):
            wait.give_up(readable, Missed.BREAK_EVEN)
        elif wait.loads_too_often:
            wait.give_up(readable, Missed.EVICTED_AGAIN)
        else:
            room = self._room.take(
                request_id, len(readable), now_s=now_s, step=self._step, wait_s=wait.budget_s,
                is_slow=self._judge.is_slow(wait, readable),
            )  # fmt: skip
            wait.may_load = room is Room.GRANTED
            if room is Room.NEVER:
                wait.give_up(readable, Missed.POOL_BUSY)
        wait.judged = True

    def _refuse(self, wait: LookupState, key: bytes, reason: Missed) -> LookupResult:
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
        """Send this step's open keys to the server: one query per prompt.

        `scheduled` are the requests that the engine computes for the first time, `preempted`
        those that it will look up again.
        """
        self._queries.take_answers()
        self._step += 1
        self.engine_waits = False
        self._counters.count(metrics.HIT_BLOCKS, self._num_hits)
        self._num_hits = 0
        self._hits_of_step.clear()
        if namespace is not None:
            self._queries.probe(namespace)
        for request_id in scheduled:
            self._scheduled(request_id)
        for request_id in preempted:
            if (wait := self._waits.get(request_id)) is not None:
                wait.restart()
                self._room.preempted(request_id)
        for wait in self._waits.values():
            if wait.wanted:
                if not self._queries.has_room(len(wait.wanted)):
                    break  # the others are sent in a later step; their budget has not begun
                self._query(wait, namespace)
            elif wait.missed_for_now and not wait.scheduled:
                self._query_again(wait, namespace)

    def _query(self, wait: LookupState, namespace: str | None) -> None:
        keys, ends = wait.take_wanted()
        if namespace is None:
            wait.give_up(keys, Missed.UNAVAILABLE)
        elif not wait.queried and not self._judge.is_worth(wait, keys, round_trips=2):
            wait.give_up(keys, Missed.BREAK_EVEN)
        elif not self._may_wait(wait, keys, ends):
            wait.give_up(keys, Missed.LOOKUP_PAUSED)
        else:
            self._queries.send_for(wait, namespace, Kind.AWAITED, keys, ends, self._rows)

    def _may_wait(
        self, wait: LookupState, keys: Sequence[bytes], ends: Sequence[int | None]
    ) -> bool:
        """Set how long the request waits for its first query, by what computing the tokens of its
        keys takes. False when the server is known to need longer."""
        if wait.queried:
            return True
        self._may_take(wait, self._rows.tokens_of(len(keys)), self._rows.start_of(ends))
        wait.budget_s = self.breaker.left_s(wait.budget_s)
        return wait.budget_s > 0

    def _may_take(self, wait: LookupState, num_tokens: int, position: int = 0) -> None:
        """Set how long the request waits for the server, to which so many tokens are looked up."""
        if not wait.prefetch:
            wait.computes_s = self._patience.compute_s(num_tokens, position)
            wait.vain_s = self._patience.wait_s(wait.computes_s)
            wait.budget_s = wait.vain_s + self._patience.reply_s(wait.computes_s)

    def _query_again(self, wait: LookupState, namespace: str | None) -> None:
        """The engine could not admit this request, whose lookup was late or not sent. Send another
        lookup of what was a miss. Until its reply is here the keys stay misses: no time is lost."""
        if namespace is None or wait.queried_again or not self._client.ready:
            return
        if self.breaker.paused and not wait.queried:
            return
        if wait.ask_again_at_s and self._clock() < wait.ask_again_at_s:
            return
        keys = [*wait.missed_for_now]
        if self._queries.has_room(len(keys)):
            wait.queried_again = True
            ends = [*map(wait.position, keys)]
            self._queries.send_for(wait, namespace, Kind.AGAIN, keys, ends, self._rows)
