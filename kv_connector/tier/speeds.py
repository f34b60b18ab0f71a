"""Measured speeds: of the link to the server, and of the engine."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

KEPT_SAMPLES = 9
LEAST_SAMPLES = 3

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

    @property
    def so_far(self) -> float | None:
        """The same from the first value on, for decisions that a factor of two does not harm."""
        return median(self._samples) if self._samples else None

    @property
    def high(self) -> float | None:
        """Most values are below this one, from the first value on: the largest but for one, which
        may be an exception."""
        if len(self._samples) < LEAST_SAMPLES:
            return max(self._samples, default=None)
        return sorted(self._samples)[-2]


@dataclass
class LinkSpeed:
    """Link speed, from the engine's own loads and lookups. Other users of the link lower it."""

    _bytes_per_s: Recent = field(default_factory=Recent)
    _round_trip_s: Recent = field(default_factory=Recent)

    def lookup_took(self, seconds: float) -> None:
        """A reply to a lookup came after `seconds`, in time or late."""
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

    def beyond(self) -> "LinkSpeed":
        """The speed of a store behind this link, or of one of its servers: its round trips are the
        same."""
        return LinkSpeed(_round_trip_s=self._round_trip_s)

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s.value

    @property
    def round_trip_s(self) -> float | None:
        return self._round_trip_s.value

    @property
    def usual_reply_s(self) -> float | None:
        """How long a reply takes, from the first one on."""
        return self._round_trip_s.so_far

    @property
    def reply_s(self) -> float | None:
        """How long most replies take, from the first one on."""
        return self._round_trip_s.high


# A token takes two operations for each of about 12 * hidden**2 weights of a layer, and
# four * hidden for each token that it attends to.
EVEN_AT_HIDDEN_SIZES = 6
"""`EngineSpeed.even_at` in hidden sizes of a dense model."""
OPERATIONS_OF_A_LAYER = 24
"""For one token, in squares of the hidden size."""

PRIOR_OPERATIONS_PER_S = {"cpu": 1e11}
"""By vLLM's type of device: of a few cores."""
PRIOR_OF_ACCELERATORS = 1e14
"""A third of what dense models reach on large ones, and more than small ones do."""
LEAST_PRIOR_S = {"cpu": 3.0}
"""Other programs on the same cores make an engine many times slower."""


class Chunk(NamedTuple):
    """Tokens of one request in a step of the engine."""

    tokens: int
    position: int = 0
    """Tokens of the request before them."""


def work_of(chunk: Chunk, even_at: float) -> float:
    """How often as long a chunk takes as one token at the beginning of a prompt.

    A token attends to all tokens before it, so its time grows with its position in a straight
    line: `even_at` is the position at which attention takes as long as all else.
    """
    attended = chunk.tokens * (chunk.position + chunk.tokens / 2)
    return chunk.tokens + attended / even_at


class _Step(NamedTuple):
    """One that is under way."""

    tokens: int
    """Of prompts; 0 where they do not measure the engine's speed."""
    work: float
    planned_s: float
    has_prompts: bool


class EngineSpeed:
    """Duration of the engine's recent steps, and prompt tokens computed a second."""

    def __init__(self, even_at: float = inf) -> None:
        self.even_at = even_at
        """See `work_of`; infinite where the model is not known."""
        self.prior_work_per_s: float | None = None
        """Taken for its speed until it is measured; None where the model is not known. A wrong one
        is harmless: it sets the wait of one prompt, as a share of the time."""
        self.least_prior_s = 0.0
        """The shortest time that is expected by it."""
        self._tokens_per_s, self._work_per_s = Recent(), Recent()
        self._prompt_step_s, self._answer_step_s = Recent(), Recent()
        """Steps with tokens of prompts may be many times as long as those without."""
        self._under_way: deque[_Step] = deque()
        self._last_end_s = -inf
        self._is_busy = False
        self._has_prompts = False
        """Whether the last step had tokens of prompts, or the next one has."""
        self._queued = 0.0
        """Work of the prompts that the engine has begun and not finished."""

    def expect(self, hidden_size: int, num_layers: int, device: str, num_workers: int) -> None:
        """Set what is known of a model's speed before it computes. `device` is vLLM's type."""
        operations = OPERATIONS_OF_A_LAYER * num_layers * hidden_size**2
        per_s = PRIOR_OPERATIONS_PER_S.get(device, PRIOR_OF_ACCELERATORS)
        self.even_at = EVEN_AT_HIDDEN_SIZES * hidden_size
        self.prior_work_per_s = per_s * num_workers / operations
        self.least_prior_s = LEAST_PRIOR_S.get(device, 0.0)

    def step_began(
        self, chunks: Iterable[Chunk], now_s: float, *, others: int = 0,
        unfinished: Iterable[Chunk] = (),
    ) -> None:  # fmt: skip
        """The scheduler planned a step with these chunks of prompts and so many `others`, tokens
        of answers. `unfinished` is what is left of prompts that were begun."""
        chunks = list(chunks)
        tokens = sum(chunk.tokens for chunk in chunks)
        if tokens < max(LEAST_PROMPT_TOKENS, LEAST_PROMPT_SHARE * (tokens + others)):
            tokens = 0
        if len(self._under_way) == MOST_STEPS_UNDER_WAY:
            self._under_way.clear()
        self._under_way.append(_Step(tokens, self._work(chunks), now_s, bool(chunks)))
        self._queued = self._work(unfinished)
        self._is_busy = bool(chunks) or others > 0
        self._has_prompts = bool(chunks) or self._queued > 0

    def step_ended(self, now_s: float) -> None:
        """The oldest step in flight ended. A pipelined step began when the one before it ended."""
        if self._under_way:
            step = self._under_way.popleft()
            took_s = now_s - max(step.planned_s, self._last_end_s)
            (self._prompt_step_s if step.has_prompts else self._answer_step_s).add(took_s)
            if step.tokens and took_s > 0:
                self._tokens_per_s.add(step.tokens / took_s)
                self._work_per_s.add(step.work / took_s)
        self._last_end_s = now_s

    def _work(self, chunks: Iterable[Chunk]) -> float:
        return sum(work_of(chunk, self.even_at) for chunk in chunks)

    @property
    def step_s(self) -> float:
        """How long a step takes now. An engine that computes nothing takes none to speak of."""
        if not self._is_busy:
            return 0.0
        kinds = self._answer_step_s, self._prompt_step_s
        now, other = reversed(kinds) if self._has_prompts else kinds
        return now.so_far or other.value or 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens_per_s.value

    def compute_s(self, chunk: Chunk) -> float | None:
        """How long computing these tokens takes, behind the prompts that the engine has begun.
        None where nothing is known of its speed."""
        work = self._queued + self._work([chunk])
        if work_per_s := self._work_per_s.so_far:
            return work / work_per_s
        if not self.prior_work_per_s:
            return None
        return max(self.least_prior_s, work / self.prior_work_per_s)
