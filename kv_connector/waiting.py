"""What one request knows of the server, and how long it may go on asking.

vLLM asks for one key at a time, again in every engine step, and waits for ever while a tier
answers RETRY. This is the state that turns that into one question per prompt and one budget
per request. It has no socket and no clock of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from remote_server.protocol import KeyState


class Verdict(Enum):
    """The answer to one lookup: vLLM's MISS, HIT and RETRY."""

    MISS = auto()
    HIT = auto()
    RETRY = auto()


class Missed(StrEnum):
    """Why a key was answered as a miss although the server might hold it. Counted by reason."""

    ABSENT = auto()  # the server does not hold it: the ordinary miss
    UNAVAILABLE = auto()  # no server, or the breaker is open
    LOOKUP_LATE = auto()  # the answer took longer than lookup_timeout_ms
    LOOKUP_PAUSED = auto()  # lookups are always late just now: not asked
    LOOKUP_FAILED = auto()  # the server refused the lookup
    BUDGET_SPENT = auto()  # the request has waited long enough
    BEYOND_POOL = auto()  # so far into the prompt that the pool could not hold what is before it
    LOAD_FAILED = auto()  # a load of this key has failed; asking again would loop
    BREAK_EVEN = auto()  # it would take longer to load than to compute
    BYPASS = auto()  # this request does not use the server (a LoRA adapter)


# One step to ask, one to use the answer: a budget that ends before the second would decline
# every hit of an engine whose steps are longer than the budget.
STEPS_TO_USE_AN_ANSWER = 2


@dataclass
class Waiting:
    """One request's questions and answers, from its first lookup until it is finished.

    The scheduler thread calls everything but `answer` and `give_up`, which the client's I/O
    thread calls when a reply or its deadline comes; they only assign dictionary entries.
    """

    budget_s: float
    bypass: str | None = None
    started_s: float | None = None
    first_step: int = 0
    asked: bool = False
    """Whether a question was sent, and so it was decided that an answer is worth it."""
    judged: bool = False
    """Whether it was decided that what the answers found is worth loading."""
    admitted: bool = False
    states: dict[bytes, KeyState | Missed | None] = field(default_factory=dict)
    """Per key: the server's answer, why it is a miss, or None while a question is under way."""
    wanted: list[bytes] = field(default_factory=list)
    """Keys to ask for at the end of this engine step, in prefix order."""

    def verdict(self, key: bytes, *, now_s: float, step: int) -> Verdict | Missed:
        """HIT, RETRY, or the reason why this is a miss. A miss stays a miss for this request."""
        if self.bypass is not None:
            return Missed.BYPASS
        if self.started_s is None:
            self.started_s, self.first_step = now_s, step
        state = self.states.get(key, KeyState.PENDING)
        if isinstance(state, Missed):
            return state
        if self._spent(now_s, step):
            self.states[key] = Missed.BUDGET_SPENT
            return Missed.BUDGET_SPENT
        if state is KeyState.READABLE:
            return Verdict.HIT
        if state is KeyState.PENDING:  # never asked, or being written when we asked last
            self.states[key] = None
            self.wanted.append(key)
        return Verdict.RETRY

    def take_wanted(self) -> list[bytes]:
        """The keys to ask for now; the caller sends one lookup for all of them."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def admit(self, *, now_s: float, step: int) -> tuple[float, int] | None:
        """The engine no longer waits for us: seconds and engine steps since the first lookup.
        None the second time, and when nothing was ever looked up."""
        if self.started_s is None or self.admitted:
            return None
        self.admitted = True
        return now_s - self.started_s, step - self.first_step

    def readable(self) -> list[bytes]:
        """The keys that the server can give us now."""
        return [key for key, state in self.states.items() if state is KeyState.READABLE]

    def answer(self, keys: Iterable[bytes], states: bytes) -> None:
        """The server's reply to a lookup of `keys`."""
        for key, state in zip(keys, states, strict=True):
            self.states[key] = Missed.ABSENT if state == KeyState.ABSENT else KeyState(state)

    def give_up(self, keys: Iterable[bytes], reason: Missed) -> None:
        """These keys are misses for this request from now on, whatever the server holds."""
        for key in keys:
            self.states[key] = reason

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """A load failed: a miss for everyone who asked for the key, so that nobody loops."""
        self.give_up([key for key in keys if key in self.states], Missed.LOAD_FAILED)

    def _spent(self, now_s: float, step: int) -> bool:
        assert self.started_s is not None
        return (
            now_s - self.started_s > self.budget_s
            and step - self.first_step >= STEPS_TO_USE_AN_ANSWER
        )
