"""One request's view of the server: the answers it has, and the time that the server has cost it.

vLLM looks up one key at a time, again in every engine step, and waits for ever while a tier
answers RETRY. This state turns that into one question per prompt and one budget per request. It
has no socket and no clock of its own. The scheduler thread alone uses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto

from remote_server.protocol import KeyState


class Missed(StrEnum):
    """Why a key was answered as a miss although the server might hold it. Counted by reason."""

    ABSENT = auto()  # the server does not hold it: the ordinary miss
    UNAVAILABLE = auto()  # no server, or the breaker is open
    LOOKUP_LATE = auto()  # the answer took longer than lookup_timeout_ms
    LOOKUP_PAUSED = auto()  # lookups are always late just now: not asked
    LOOKUP_FAILED = auto()  # the server refused the lookup
    BUDGET_SPENT = auto()  # the server owed this request an answer for wait_budget_ms
    BEYOND_POOL = auto()  # so far into the prompt that the pool could not hold what is before it
    POOL_BUSY = auto()  # rows for this prompt did not become free in the pool
    LOAD_FAILED = auto()  # a load of this key has failed; asking again would loop
    EVICTED_AGAIN = auto()  # loaded, and evicted from the pool before it was used, several times
    BREAK_EVEN = auto()  # it would take longer to load than to compute
    BYPASS = auto()  # this request does not use the server (a LoRA adapter)


FOR_NOW = frozenset(
    {Missed.LOOKUP_LATE, Missed.LOOKUP_PAUSED, Missed.UNAVAILABLE, Missed.BUDGET_SPENT}
)
"""Misses that come from the state of the server at one moment. A queued request may outlive it."""

# One look to ask, one to use the answer: a budget that ends before the second would decline
# every block that is being written, on an engine whose steps are longer than the budget.
LOOKS_TO_USE_AN_ANSWER = 2

# A row that was loaded for a request may leave the pool before the engine can admit the request.
# It is loaded again so often; without a limit two prompts could evict each other's rows for ever.
MOST_LOADS_OF_A_KEY = 4

_STATES: dict[int, KeyState | Missed] = {
    KeyState.ABSENT: Missed.ABSENT,
    KeyState.PENDING: KeyState.PENDING,
    KeyState.READABLE: KeyState.READABLE,
}


@dataclass(slots=True)
class Waiting:
    """One request's questions and answers, from its first lookup until it is finished.

    A *look* is one step in which the engine looked the request up. A step without one is a step
    in which the engine was busy, and no time of such a step is the server's.
    """

    budget_s: float
    bypass: bool = False
    prefetch: bool = False
    """Nobody waits for its answer: what the server holds is worth loading however long it takes."""
    step: int = -2
    """Of the last look."""
    looks: int = 0
    first_look_s: float = 0.0
    first_step: int = 0
    asked: bool = False
    """Whether a question was sent, and so it was decided that an answer is worth it."""
    judged: bool = False
    """Whether it was decided that what the answers found is worth loading."""
    admitted: bool = False
    refusal: Missed | None = None
    """At the last look: why every key is a miss, if it is."""
    out_of_time: bool = False
    """At the last look: the server has owed an answer for longer than this request may wait. A
    key that is readable is a hit all the same: the wait for it is over."""
    held: bool = False
    """At the last look: the server may not be asked yet, because a worker was not heard or the
    server has not answered the engine's first greeting."""
    may_load: bool = False
    """At the last look: whether what is readable may be loaded."""
    states: dict[bytes, KeyState | Missed | None] = field(default_factory=dict)
    """Per key: the server's answer, why it is a miss, or None while a question is under way."""
    wanted: list[bytes] = field(default_factory=list)
    """Keys to ask for at the end of this engine step, in prefix order."""
    questions: int = 0
    """Under way."""
    news: bool = False
    """Whether an answer came since the last look."""
    blocked_on: bytes | None = None
    """One of its keys that a load was bringing, or was about to, at the last look."""
    missed_for_now: dict[bytes, None] = field(default_factory=dict)
    """Keys that are a miss `FOR_NOW`, in prefix order. Until the engine admits the request they are
    looked up again, and no admission waits for that."""
    asks_again: bool = False
    """Whether such a lookup is under way."""
    loads: int = 0
    """Keys that were answered as hits, and so loaded."""
    owed_s: float = 0.0
    """For how long the server has owed this request an answer."""
    waited_s: float = 0.0
    waited_steps: int = 0
    """For how long the engine could not admit this request because of the tier."""
    counted: set[bytes] = field(default_factory=set)
    """Misses that have been counted: a request that waits for the engine is looked up again."""
    generation: int = 0
    """Grows when answers are forgotten. An answer to an older generation's question is dropped."""
    _owed_since_s: float | None = None
    _deferred_at_s: float | None = None
    """Of the last look, if it deferred the request."""

    # ── looks ────────────────────────────────────────────────────────────────────────────

    def look(self, *, now_s: float, step: int) -> None:
        """The engine looks this request up, for the first time in this step or since news."""
        if step != self.step:
            looked_last_step = step == self.step + 1
            if looked_last_step and self._deferred_at_s is not None:
                self.waited_s += now_s - self._deferred_at_s
                self.waited_steps += 1
            if self._owed_since_s is not None and not self.questions:
                # A block that is being written is asked for once a step. While the engine does
                # not look, nothing is asked, and the server owes nothing.
                if looked_last_step:
                    self.owed_s += now_s - self._owed_since_s
                self._owed_since_s = now_s
            self._deferred_at_s = None
            if not self.looks:
                self.first_look_s, self.first_step = now_s, step
            self.step = step
            self.looks += 1
        self.news = False
        self.out_of_time = self.is_out_of_time(now_s)

    def is_out_of_time(self, now_s: float) -> bool:
        """Whether the server has owed an answer for longer than this request may wait."""
        owed_s = self.owed_s
        if self.questions and self._owed_since_s is not None:
            owed_s += now_s - self._owed_since_s
        return owed_s > self.budget_s and self.looks > LOOKS_TO_USE_AN_ANSWER

    def deferred(self, now_s: float) -> None:
        """The engine cannot admit the request in this step, because of the tier."""
        self._deferred_at_s = now_s

    @property
    def loads_too_often(self) -> bool:
        """Whether what was loaded for this request keeps leaving the pool before it is used."""
        return self.loads >= MOST_LOADS_OF_A_KEY * len(self.states)

    def readable(self) -> list[bytes]:
        """The keys that the server can give us now."""
        return [key for key, state in self.states.items() if state is KeyState.READABLE]

    # ── questions and answers ────────────────────────────────────────────────────────────

    def take_wanted(self) -> list[bytes]:
        """The keys to ask for now; the caller sends one lookup for all of them."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def sent(self, now_s: float) -> None:
        """A question was sent: from now on the server owes an answer."""
        self.asked = True
        self.questions += 1
        if self._owed_since_s is None:
            self._owed_since_s = now_s

    def answered(self, keys: Iterable[bytes], states: bytes, now_s: float) -> None:
        """The server's reply to a lookup of `keys`, which came at `now_s`."""
        self._question_ended(now_s)
        for key, state in zip(keys, states, strict=True):
            if self.states.get(key) is None:  # else given up meanwhile
                self.states[key] = _STATES[state]
        if KeyState.PENDING in states:
            self._owed_since_s = now_s

    def unanswered(self, keys: Iterable[bytes], reason: Missed, now_s: float) -> None:
        """A question ended without an answer: its keys are misses for this request."""
        self._question_ended(now_s)
        self.give_up(keys, reason)

    def _question_ended(self, now_s: float) -> None:
        self.news = True
        self.questions -= 1
        if self._owed_since_s is not None:
            self.owed_s += max(0.0, now_s - self._owed_since_s)
            self._owed_since_s = now_s if self.questions else None

    def give_up(self, keys: Iterable[bytes], reason: Missed) -> None:
        """These keys are misses for this request; `FOR_NOW`, or whatever the server holds."""
        for key in keys:
            self.states[key] = reason
            if reason in FOR_NOW:
                self.missed_for_now[key] = None

    def answered_again(self, keys: Iterable[bytes], states: bytes | None) -> None:
        """The reply to a lookup of keys that were a miss for now, or None when there was none."""
        self.asks_again = False
        for key, state in zip(keys, states or (), strict=states is not None):
            if self.missed_for_now.pop(key, True) is None:  # else forgotten meanwhile
                self.states[key] = _STATES[state]
                self.news = True

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """A load failed: a miss for every request that asked for the key, or it would loop."""
        self.give_up([key for key in keys if key in self.states], Missed.LOAD_FAILED)

    def ask_again(self) -> None:
        """The engine preempted the request, and will look it up anew: what it knew is old. Only
        loads that failed are remembered."""
        failed = [key for key, state in self.states.items() if state is Missed.LOAD_FAILED]
        self._forget()
        self.give_up(failed, Missed.LOAD_FAILED)

    def forget_answers(self) -> None:
        """The weights may have changed: what was found belongs to the old ones."""
        self._forget()

    def _forget(self) -> None:
        self.states, self.wanted = {}, []
        self.generation += 1
        self.questions, self._owed_since_s = 0, None
        self.asked = self.judged = self.held = False
        self.owed_s, self.looks, self.loads = 0.0, 0, 0
        self.blocked_on = None
        self.missed_for_now, self.asks_again = {}, False
