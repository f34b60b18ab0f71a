"""Lookups of one request: its queries and the server's replies to them.

vLLM looks up one key at a time, again in every engine step, and waits for ever while a tier
returns RETRY. `LookupState` reduces that to one query per prompt and one time budget per request.
It uses no socket and no clock. Only the scheduler thread uses it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from remote_server.client import ABSENT_SO_FAR, UNANSWERED, UNANSWERED_LATE
from remote_server.protocol import Hint, KeyState, Stretch, lowest_start

if TYPE_CHECKING:
    from kv_connector.pool.anchors import RunAnchors
    from kv_connector.pool.rows import PoolRows


class Missed(StrEnum):
    """Why a lookup of a key was a miss; the label of the metric."""

    ABSENT = auto()  # the server does not hold it: the ordinary miss
    UNAVAILABLE = auto()  # no server, or the breaker is open
    LOOKUP_LATE = auto()  # the reply took longer than the request waits
    LOOKUP_PAUSED = auto()  # recent lookups were late: no query was sent
    LOOKUP_FAILED = auto()  # the server refused the lookup
    BUDGET_SPENT = auto()  # the request has waited as long as its `patience` lets it
    BEYOND_POOL = auto()  # the pool cannot hold the prompt up to this block
    POOL_BUSY = auto()  # rows for this prompt did not become free in the pool
    LOAD_FAILED = auto()  # a load of this key has failed; a second query would loop
    EVICTED_AGAIN = auto()  # loaded, and evicted from the pool before it was used, several times
    BREAK_EVEN = auto()  # it would take longer to load than to compute
    BUCKET_SLOW = auto()  # the same, because the server has it in its object store only
    BYPASS = auto()  # this request does not use the server (a LoRA adapter)


FOR_NOW = frozenset(
    {Missed.LOOKUP_LATE, Missed.LOOKUP_PAUSED, Missed.UNAVAILABLE, Missed.BUDGET_SPENT}
)
"""Misses that come from the state of the server at one moment. A queued request may outlive it."""

# One lookup to send a query, one to use its reply. On an engine with steps longer than the budget,
# a budget that ends before the second would decline every block that is being written.
LOOKUPS_TO_USE_A_REPLY = 2

# The client ends a query when the budget is spent, and its reply has what those of several servers
# hold that answered in time. The request must not give up before, and on a busy host the end comes
# late.
UNTIL_A_QUERY_ENDS_S = 0.25

# A row that was loaded for a request may be evicted from the pool before the engine can admit the
# request. Without a limit on loads, two prompts could evict each other's rows for ever.
MOST_LOADS_OF_A_KEY = 4

_STATES: dict[int, KeyState | Missed] = {
    KeyState.ABSENT: Missed.ABSENT,
    KeyState.PENDING: KeyState.PENDING,
    KeyState.READABLE: KeyState.READABLE,
    UNANSWERED: Missed.UNAVAILABLE,
    UNANSWERED_LATE: Missed.LOOKUP_LATE,
    ABSENT_SO_FAR: Missed.ABSENT,
}

# Pause before a queued request looks up again what no server has answered: of several servers one
# may be away for long, while the others answer at once.
ASK_AGAIN_S = 0.25


_CUTS = {Missed.UNAVAILABLE: "dead", Missed.LOOKUP_LATE: "late"}


@dataclass(slots=True)
class LookupState:
    """One request's queries and replies, from its first lookup until it is finished.

    A *lookup step* is one in which the engine looked the request up. In other steps the engine was
    busy; their time does not count as waiting for the server.
    """

    budget_s: float
    """How long it waits for the server in all; see `patience`."""
    bypass: bool = False
    prefetch: bool = False
    """No user waits for its output: blocks on the server are loaded, however slow that is."""
    hint: Hint | None = None
    """Of the client that sent the request, about the future of its prompt."""
    position: Callable[[Any], int | None] = lambda _: None
    """Where the tokens of a key end in the prompt."""
    anchors: "RunAnchors | None" = None
    """None where keys have none: one server."""

    vain_s: float = field(default=inf, init=False)
    """How much of its budget is beyond the time that a reply takes."""
    computes_s: float = field(default=0.0, init=False)
    """How long computing what it looks up would take."""
    prompt_tokens: int = field(default=0, init=False)
    """Of its whole prompt; 0 where that is not known."""
    step: int = field(default=-2, init=False)
    """Step of the last lookup."""
    first_lookup_s: float = field(default=0.0, init=False)
    first_step: int = field(default=0, init=False)
    admitted: bool = field(default=False, init=False)
    """Whether its wait was observed. The engine may lack the blocks for it all the same."""
    scheduled: bool = field(default=False, init=False)
    """Whether the engine computes it."""
    refusal: Missed | None = field(default=None, init=False)
    """At the last lookup: why every key is a miss, or None."""
    out_of_time: bool = field(default=False, init=False)
    """At the last lookup: the request has waited for replies for its whole budget. A readable key
    is still a hit: its wait is over."""
    may_load: bool = field(default=False, init=False)
    """At the last lookup: whether readable blocks may be loaded."""
    above: int = field(default=-1, init=False)
    """Tokens of the prompt before the first block that was queried: the engine's levels have
    them. -1 before the first query."""
    reused: int = field(default=-1, init=False)
    """Tokens of the prompt that were found in any level when the engine first admitted the request;
    -1 when that is not known."""
    absent_so_far: set[bytes] = field(default_factory=set, init=False)
    """Absent keys that a server may hold which could not be asked."""
    news: bool = field(default=False, init=False)
    """Whether a reply came since the last lookup."""
    ask_again_at_s: float = field(default=0.0, init=False)
    """Time before which no lookup of `missed_for_now` is sent."""
    waited_s: float = field(default=0.0, init=False)
    waited_steps: int = field(default=0, init=False)
    """Time for which the engine could not admit this request because of the tier."""
    counted: set[bytes] = field(default_factory=set, init=False)
    """Misses already counted: a request that waits for the engine is looked up again."""
    generation: int = field(default=0, init=False)
    """Grows when replies are dropped. A reply to an older generation's query is ignored."""
    _deferred_at_s: float | None = field(default=None, init=False)
    """Time of the last lookup, if it deferred the request."""

    # The others end with the replies: `_begin` sets them.

    states: dict[bytes, KeyState | Missed | None] = field(init=False)
    """Per key: the server's reply, why it is a miss, or None while a query is under way."""
    wanted: list[bytes] = field(init=False)
    """Keys for the query at the end of this engine step, in prefix order."""
    wanted_ends: list[int | None] = field(init=False)
    """Where the tokens of each end in the prompt."""
    queries: int = field(init=False)
    """Queries under way."""
    queried: bool = field(init=False)
    """Whether a query was sent, so that break-even has accepted its wait."""
    weighed: bool = field(init=False)
    """Whether break-even was applied to its whole prompt."""
    declined: bool = field(init=False)
    """Whether nothing of it is worth fetching."""
    is_probe: bool = field(init=False)
    """Whether it is fetched although that is too slow, to measure the server again."""
    judged: bool = field(init=False)
    """Whether break-even was applied to the blocks that the replies found."""
    bucket_judged: bool = field(init=False)
    """Whether it was applied to those in the server's object store."""
    in_bucket: set[bytes] = field(init=False)
    """Keys that the server has in its object store only."""
    held: bool = field(init=False)
    """At the last lookup: no query may be sent yet, because a worker has not reported or the server
    has not replied to the engine's first hello."""
    blocked_on: bytes | None = field(init=False)
    """At the last lookup: one of its keys in a load that was under way or about to begin."""
    missed_for_now: dict[bytes, None] = field(init=False)
    """Keys that are a miss `FOR_NOW`, in prefix order. They are queried again until the engine
    schedules the request. No admission waits for that."""
    queried_again: bool = field(init=False)
    """Whether such a query is under way."""
    lookup_steps: int = field(init=False)
    loads: int = field(init=False)
    """Hits, each of which leads to a load."""
    owed_s: float = field(init=False)
    """Time for which this request has waited for replies."""
    _owed_since_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.states, self.wanted, self.wanted_ends = {}, [], []
        self.queries, self._owed_since_s = 0, None
        self.queried = self.judged = self.bucket_judged = self.held = False
        self.weighed = self.declined = self.is_probe = False
        self.in_bucket = set()
        self.owed_s, self.lookup_steps, self.loads = 0.0, 0, 0
        self.blocked_on = None
        self.missed_for_now, self.queried_again = {}, False

    # ── lookup steps ─────────────────────────────────────────────────────────────────────

    def looked_up(self, *, now_s: float, step: int) -> None:
        """The engine looks this request up, for the first time in this step or since news."""
        if step != self.step:
            looked_up_last_step = step == self.step + 1
            if looked_up_last_step and self._deferred_at_s is not None:
                self.waited_s += now_s - self._deferred_at_s
                self.waited_steps += 1
            if self._owed_since_s is not None and not self.queries:
                # A block that is being written is queried once a step. While the engine makes no
                # lookup, no query is open and no time counts.
                if looked_up_last_step:
                    self.owed_s += now_s - self._owed_since_s
                self._owed_since_s = now_s
            self._deferred_at_s = None
            if not self.lookup_steps:
                self.first_lookup_s, self.first_step = now_s, step
            self.step = step
            self.lookup_steps += 1
        self.news = False
        self.out_of_time = self.is_out_of_time(now_s)

    def is_out_of_time(self, now_s: float) -> bool:
        """Whether the request has waited for replies for its whole budget."""
        owed_s, budget_s = self.owed_s, self.budget_s
        if self.queries and self._owed_since_s is not None:
            owed_s += now_s - self._owed_since_s
            budget_s += UNTIL_A_QUERY_ENDS_S
        return owed_s > budget_s and self.lookup_steps > LOOKUPS_TO_USE_A_REPLY

    def deferred(self, now_s: float) -> None:
        """The engine cannot admit the request in this step, because of the tier."""
        self._deferred_at_s = now_s

    @property
    def loads_too_often(self) -> bool:
        """Whether loaded rows of this request are evicted from the pool before they are used."""
        return self.loads >= MOST_LOADS_OF_A_KEY * len(self.states)

    def readable(self) -> list[bytes]:
        """The keys that the server holds readable."""
        return [key for key, state in self.states.items() if state is KeyState.READABLE]

    def bucket_share(self, keys: Collection[bytes]) -> float:
        """The share of `keys` that the server has in its object store only."""
        if not self.in_bucket:
            return 0.0
        return sum(key in self.in_bucket for key in keys) / max(1, len(keys))

    # ── queries and answers ────────────────────────────────────────────────────────────

    def take(self, answer: "Answer") -> None:
        """A query of this request ended. No effect if its replies were dropped meanwhile."""
        (kind, _, generation, keys, _), states = answer.query, answer.states
        if generation != self.generation:
            return
        if kind is Kind.AGAIN:
            self.queried_again = False
        for first, number in zip(answer.remote[::2], answer.remote[1::2], strict=False):
            self.in_bucket.update(keys[first : first + number])
        if kind is Kind.AWAITED and states is not None:
            self.answered(keys, states, answer.ended_s)
        elif kind is Kind.AWAITED:
            self.unanswered(keys, answer.reason, answer.ended_s)
        elif states is not None:
            self.replied_late(keys, states, answer.ended_s)

    def take_wanted(self) -> tuple[list[bytes], list[int | None]]:
        """The keys to query now, and their ends; the caller sends one lookup for all of them."""
        wanted, self.wanted = self.wanted, []
        ends, self.wanted_ends = self.wanted_ends, []
        return wanted, ends

    def cut(self) -> str | None:
        """Why the prefix that the servers hold ends where it does: `dead` or `late` where no server
        answered; where a block is absent and a later one is there, `dead` if a server could not be
        asked, else `evicted`; else None. For requests whose keys are one chain."""
        after = iter(self.states.items())
        cut = next(((key, state) for key, state in after if isinstance(state, Missed)), None)
        if cut is None:
            return None
        key, reason = cut
        if reason is not Missed.ABSENT:
            return _CUTS.get(reason)
        if not any(state in (KeyState.READABLE, KeyState.PENDING) for _, state in after):
            return None
        return "dead" if key in self.absent_so_far else "evicted"

    def chain(
        self, rows: "PoolRows", keys: list[bytes], ends: Sequence[int | None]
    ) -> list[Stretch]:
        """The chain fields of a query. The class of its request is what levels above have of it."""
        chain = rows.chain(keys, ends, [self.above] * len(keys))
        if chain and self.above < 0:
            self.above = lowest_start(chain)
            chain = [replace(stretch, known=self.above) for stretch in chain]
        return chain

    def sent(self, now_s: float) -> None:
        """A query was sent: the wait for its reply begins."""
        self.queried = True
        self.queries += 1
        if self._owed_since_s is None:
            self._owed_since_s = now_s

    def answered(self, keys: Iterable[bytes], states: bytes, now_s: float) -> None:
        """The server's reply to a lookup of `keys`, which came at `now_s`."""
        self._question_ended(now_s)
        for key, state in zip(keys, states, strict=True):
            if self.states.get(key) is None:  # else a miss by now
                self.states[key] = _STATES[state]
        if ABSENT_SO_FAR in states:
            held = zip(keys, states, strict=True)
            self.absent_so_far |= {key for key, state in held if state == ABSENT_SO_FAR}
        if UNANSWERED in states or UNANSWERED_LATE in states:
            self.ask_again_at_s = now_s + ASK_AGAIN_S
            for key, state in zip(keys, states, strict=True):
                if state in (UNANSWERED, UNANSWERED_LATE) and self.states[key] is _STATES[state]:
                    self.missed_for_now[key] = None
        if KeyState.PENDING in states:
            self._owed_since_s = now_s

    def unanswered(self, keys: Iterable[bytes], reason: Missed, now_s: float) -> None:
        """A query ended without a reply: its keys are misses for this request."""
        self._question_ended(now_s)
        self.give_up(keys, reason)

    def _question_ended(self, now_s: float) -> None:
        self.news = True
        self.queries -= 1
        if self._owed_since_s is not None:
            self.owed_s += max(0.0, now_s - self._owed_since_s)
            self._owed_since_s = now_s if self.queries else None

    def give_up(self, keys: Iterable[bytes], reason: Missed) -> None:
        """Make these keys misses for this request: `FOR_NOW`, or even if the server holds them."""
        for key in keys:
            self.states[key] = reason
            if reason in FOR_NOW:
                self.missed_for_now[key] = None

    def replied_late(self, keys: Iterable[bytes], states: bytes, now_s: float) -> None:
        """A reply on keys that were a miss for now: late, or to another query."""
        for key, state in zip(keys, states, strict=True):
            if state in (UNANSWERED, UNANSWERED_LATE):
                self.ask_again_at_s = now_s + ASK_AGAIN_S
            elif self.missed_for_now.pop(key, True) is None:  # else forgotten meanwhile
                self.states[key] = _STATES[state]
                self.news = True

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """A load failed: the keys are misses for this request, which would otherwise loop."""
        self.give_up([key for key in keys if key in self.states], Missed.LOAD_FAILED)

    def restart(self) -> None:
        """The engine preempted the request and will look it up again: drop replies, and remember
        only failed loads."""
        failed = [key for key, state in self.states.items() if state is Missed.LOAD_FAILED]
        self.forget_answers()
        self.give_up(failed, Missed.LOAD_FAILED)
        self.scheduled = False

    def forget_answers(self) -> None:
        """Drop replies: the weights may have changed since them."""
        self.generation += 1
        self._begin()

    def line(self, request_id: str) -> str:
        """For the engine's log at debug level, when it admits the request: how long the request
        could wait, and what became of that."""
        states = Counter(self.states.values())
        found = [f"{states[KeyState.READABLE]} of {len(self.states)} blocks from the server"]
        found += [f"{number} {why}" for why, number in states.items() if isinstance(why, Missed)]
        return (
            f"request {request_id}: computing takes {self.computes_s:.3g} s, so it may wait "
            f"{self.budget_s:.3g} s; it waited {self.owed_s:.3g} s for replies, "
            f"{self.waited_s:.3g} s in {self.waited_steps} steps in all; {', '.join(found)}"
        )


class Kind(Enum):
    """The relation of a request to a reply."""

    AWAITED = auto()  # the request waits for it
    AGAIN = auto()  # to a second query of a queued request, which does not wait for it
    LATE = auto()  # came after the deadline of an awaited one
    PROBE = auto()  # no request needs it


class Query(NamedTuple):
    """A lookup that was sent."""

    kind: Kind
    wait: "LookupState | None"
    """State of the request; None for a probe, which no request waits for."""
    generation: int
    keys: list[bytes]
    sent_s: float


class Answer(NamedTuple):
    """The end of a query, passed from the client's I/O thread to the scheduler thread."""

    query: Query
    ended_s: float
    states: bytes | None
    """The server's reply, one state a key; None without a reply."""
    reason: Missed
    """Why there was no reply."""
    remote: Sequence[int] = ()
    """Of the reply: see `protocol.Found`."""
