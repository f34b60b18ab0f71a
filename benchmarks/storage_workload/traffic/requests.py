"""The requests of each user, from a seed alone: independent of answers and their times.

Every user has its own generator of random numbers, made from the seed and the user's number. So a
run with the same seed makes the same requests in the same order, user by user, however the threads
and the device behave; only the number of each user's requests depends on those.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from benchmarks.storage_workload.traffic.entries import AnyEntry, Entry, Kind
from benchmarks.storage_workload.traffic.models import Model
from benchmarks.storage_workload.traffic.personas import (
    PERSONAS,
    QOS_CLASSES,
    THINK_SWING,
    Persona,
    QosClass,
)

CONTINUE = 0.8
"""The probability that a user continues its conversation."""

MAX_TURNS = 50
MAX_CONTEXT_TOKENS = 32_768
"""The longest conversation in tokens; a longer one ends, as in a service."""

SYSTEM_SHARE = 0.2
"""The share of conversations that begin with a system prompt."""

SYSTEM_TOKENS = (512, 1024, 2048)

DOCUMENT_SHARE = 0.1
"""The share of requests, with `documents`, that have chunks of a document."""

CHUNK_TOKENS = 512
MAX_CHUNK_BYTES = 256 << 20
TOP_K = 5
DOCUMENT_TOKENS = (4_000, 12_000)
DOCUMENT_TOKENS_LARGE_MODEL = (1_024, 4_096)

PREFILL_ONLY_TOKENS = 10_000
DECODE_BATCH_TOKENS = 32
"""The source reads a request's own entry once for this many generated tokens."""

_IRRATIONAL = [number**0.5 % 1 for number in (2, 5, 3, 7, 11)]

DIGEST_REQUESTS = 100
"""Requests of each user in the digest of a workload."""


class Request(NamedTuple):
    """One request, decided before anything is served."""

    user: int
    number: int
    qos: QosClass
    persona: str
    think_s: float
    """The user's pause before this request."""

    prefix: tuple[AnyEntry, ...]
    """The cached beginning of the prompt, in order: found up to the first missing block."""

    chunks: tuple[Entry, ...]
    """Parts of documents; each is found or not by itself."""

    new: Entry | None
    """The user's new tokens, not yet cached. None where a trace has all in `prefix`."""

    generation_tokens: int
    conversation: int
    turn: int
    arrival_s: float | None = None
    """Arrival of a recorded request, since the trace began."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the whole prompt."""
        own = self.new.tokens if self.new is not None else 0
        return own + sum(entry.tokens for entry in (*self.prefix, *self.chunks))

    @property
    def decode_reads(self) -> int:
        """The reads of its own entry during generation; 0 for a request without generation."""
        if self.new is None or self.context_tokens >= PREFILL_ONLY_TOKENS:
            return 0
        return -(-self.generation_tokens // DECODE_BATCH_TOKENS)

    @property
    def phase(self) -> str:
        return "prefill_decode" if self.decode_reads else "prefill"


class Workload(NamedTuple):
    """The settings that determine all requests."""

    model: Model
    seed: int
    multi_turn: bool = True
    system_prompts: bool = True
    num_documents: int = 0

    def documents(self) -> tuple[tuple[Entry, ...], ...]:
        """The chunks of each document."""
        return _documents(self)

    def requests_of(self, user: int) -> Iterator[Request]:
        """The requests of a user, without end."""
        return _User(self, user).requests()

    def digest(self, users: int) -> str:
        """A digest of the first requests of `users` users: equal for equal sequences."""
        sha = hashlib.sha256()
        for user in range(users):
            for request in itertools.islice(self.requests_of(user), DIGEST_REQUESTS):
                sha.update(encode(request))
        return sha.hexdigest()


@functools.cache
def _documents(workload: Workload) -> tuple[tuple[Entry, ...], ...]:
    draw = Random(f"{workload.seed} documents")
    is_large = workload.model.is_large
    lowest, highest = DOCUMENT_TOKENS_LARGE_MODEL if is_large else DOCUMENT_TOKENS
    size = chunk_tokens(workload.model)
    documents = []
    for number in range(workload.num_documents):
        tokens = draw.randint(lowest, highest)
        sizes = [size] * (tokens // size) + ([tokens % size] if tokens % size else [])
        documents.append(
            tuple(Entry(Kind.CHUNK, each, number, place) for place, each in enumerate(sizes))
        )
    return tuple(documents)


def chunk_tokens(model: Model) -> int:
    """512, or fewer where those would be more than 256 MiB."""
    return max(1, min(CHUNK_TOKENS, MAX_CHUNK_BYTES // model.bytes_per_token))


def encode(request: Request) -> bytes:
    """One line with all of its fields."""
    fields = request._asdict() | {"qos": request.qos.name}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def digest_of(requests: Sequence[Request]) -> str:
    """A digest of requests that are all known before, as those of a trace."""
    sha = hashlib.sha256()
    for request in requests:
        sha.update(encode(request))
    return sha.hexdigest()


def retrieve(draw: Random, num_chunks: int) -> list[int]:
    """The chunks of a question: five at most, the first ones far more often.

    The weight of chunk i is 1 / (i + 1); none is drawn twice.
    """
    weights = [1 / (place + 1) for place in range(num_chunks)]
    left = list(range(num_chunks))
    chosen = []
    for _ in range(min(TOP_K, num_chunks)):
        place = draw.choices(range(len(left)), [weights[number] for number in left])[0]
        chosen.append(left.pop(place))
    return chosen


class _Character(NamedTuple):
    """The constant properties of a user."""

    persona: Persona
    qos: QosClass
    context_tokens: int
    generation_tokens: int
    think_s: float


def _character(seed: int, user: int) -> _Character:
    """Drawn so that the first users, however many, are as mixed as all of them.

    Each draw is the one before plus an irrational part of the range, from a start that the seed
    determines. Independent draws would make one of ten users interactive in one run and five in
    another, and the most users that a machine can serve would depend on that.
    """
    draw = Random(f"{seed} users")
    kind, place, context, generation, think = (
        (draw.random() + user * step) % 1 for step in _IRRATIONAL
    )
    persona = PERSONAS[int(kind * len(PERSONAS))]
    bounds = itertools.accumulate(qos.share for qos in QOS_CLASSES)
    above = (qos for qos, bound in zip(QOS_CLASSES, bounds, strict=True) if place < bound)
    return _Character(
        persona,
        next(above, QOS_CLASSES[-1]),
        _within(persona.context_tokens, context),
        _within(persona.generation_tokens, generation),
        persona.think_s[0] + think * (persona.think_s[1] - persona.think_s[0]),
    )


def _within(limits: tuple[int, int], place: float) -> int:
    """The whole number at `place`, from 0 to 1, within `limits`, both included."""
    low, high = limits
    return low + int(place * (high - low + 1))


def _quarter_or_more(draw: Random, most: int) -> int:
    return draw.randint(max(1, most // 4), most)


class _User:
    """One user: its properties, and its present conversation."""

    def __init__(self, workload: Workload, number: int) -> None:
        self._draw = Random(f"{workload.seed} user {number}")
        self._number = number
        self._workload = workload
        self._documents = _documents(workload)
        self._is = _character(workload.seed, number)
        self._conversation = -1
        self._history: list[Entry] = []
        """The entries of the conversation: perhaps a system prompt, then its turns."""

        self._turn = 0

    def requests(self) -> Iterator[Request]:
        for index in itertools.count():
            yield self._next(index)

    def _next(self, index: int) -> Request:
        draw = self._draw
        think_s = round(self._is.think_s * draw.uniform(*THINK_SWING), 6)
        context = _quarter_or_more(draw, self._is.context_tokens)
        generation = _quarter_or_more(draw, self._is.generation_tokens)
        goes_on = draw.random() < CONTINUE
        with_system = draw.random() < SYSTEM_SHARE
        system = draw.randrange(len(SYSTEM_TOKENS))
        with_document = draw.random() < DOCUMENT_SHARE
        # All values above are drawn whatever is switched off, so that a switch changes only its
        # own subject.
        if not (goes_on and self._workload.multi_turn and self._has_room(context)):
            self._conversation += 1
            self._turn = 0
            self._history = []
            if with_system and self._workload.system_prompts:
                self._history = [Entry(Kind.SYSTEM, SYSTEM_TOKENS[system], system)]
        self._turn += 1
        new = Entry(Kind.TURN, context, self._number, self._conversation, self._turn)
        prefix = tuple(self._history)
        self._history.append(new)
        return Request(
            self._number, index, self._is.qos, self._is.persona.name, think_s, prefix,
            self._chunks() if with_document and self._documents else (),
            new, generation, self._conversation, self._turn,
        )  # fmt: skip

    def _has_room(self, context: int) -> bool:
        held = sum(entry.tokens for entry in self._history)
        return (
            bool(self._history) and self._turn < MAX_TURNS and held + context <= MAX_CONTEXT_TOKENS
        )

    def _chunks(self) -> tuple[Entry, ...]:
        document = self._draw.choice(self._documents)
        return tuple(document[place] for place in retrieve(self._draw, len(document)))
