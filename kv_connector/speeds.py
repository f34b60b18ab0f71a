"""How fast the link and the engine were of late, as far as a tier and a connector can see it.

Medians of a few recent samples: one stall, or one step that compiled something, moves them
little, and a few new samples move them wholly. Below the least number of samples the speed is
unknown.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

KEPT_SAMPLES = 9
LEAST_SAMPLES = 5

# Steps with fewer prompt tokens are ruled by what every step costs, and steps with mostly
# decoding requests by those.
LEAST_PROMPT_TOKENS = 64
LEAST_PROMPT_SHARE = 0.5

# Steps that vLLM may have under way at once, with pipelined workers; more, and an end was missed.
MOST_STEPS_UNDER_WAY = 8


@dataclass
class Recent:
    """The median of the last `KEPT_SAMPLES` values, once there are `LEAST_SAMPLES`."""

    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    def add(self, sample: float) -> None:
        self._samples.append(sample)

    def forget(self) -> None:
        """What was measured is over, as after an outage."""
        self._samples.clear()

    @property
    def value(self) -> float | None:
        """None while there are too few samples to tell."""
        return median(self._samples) if len(self._samples) >= LEAST_SAMPLES else None


@dataclass
class LinkSpeed:
    """From the engine's own loads and lookups; others on the link are part of it."""

    _bytes_per_s: Recent = field(default_factory=Recent)
    _round_trip_s: Recent = field(default_factory=Recent)

    def lookup_took(self, seconds: float) -> None:
        """A lookup was answered, or given up, after `seconds`."""
        self._round_trip_s.add(seconds)

    def load_took(self, num_bytes: int, seconds: float) -> None:
        """A load ended after `seconds` with `num_bytes` landed, none of them perhaps.

        A round trip is taken off, down to half: a load of few bytes is hardly anything else.
        """
        flowing_s = max(seconds - (self._round_trip_s.value or 0.0), seconds / 2, 1e-6)
        self._bytes_per_s.add(num_bytes / flowing_s)

    def forget(self) -> None:
        """The server was away: it may be another one, in another place."""
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
    """How long the engine's recent steps took, and how many prompt tokens a second they computed.
    It learns when each step begins and ends."""

    _tokens_per_s: Recent = field(default_factory=Recent)
    _step_s: Recent = field(default_factory=Recent)
    _under_way: deque[tuple[int, float]] = field(default_factory=deque)
    _last_end_s: float = float("-inf")

    def step_began(self, tokens_by_request: Iterable[int], now_s: float) -> None:
        """The scheduler has planned a step with so many tokens of each request."""
        counts = list(tokens_by_request)
        prompt = sum(count for count in counts if count > 1)
        telling = prompt >= max(LEAST_PROMPT_TOKENS, LEAST_PROMPT_SHARE * sum(counts))
        if len(self._under_way) == MOST_STEPS_UNDER_WAY:
            self._under_way.clear()
        self._under_way.append((prompt if telling else 0, now_s))

    def step_ended(self, now_s: float) -> None:
        """The oldest step under way is done. A pipelined step began when the last one ended."""
        if self._under_way:
            tokens, planned_s = self._under_way.popleft()
            took_s = now_s - max(planned_s, self._last_end_s)
            self._step_s.add(took_s)
            if tokens and took_s > 0:
                self._tokens_per_s.add(tokens / took_s)
        self._last_end_s = now_s

    @property
    def step_s(self) -> float | None:
        """Of any step, also one that computed nothing: an engine that only waits for a server
        takes short ones."""
        return self._step_s.value

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens_per_s.value
