"""The requests of each user, from a seed alone: what answers, and when, changes none of them.

Every user has a generator of random numbers of its own, made from the seed and the user's number.
So a run with the same seed asks for the same things in the same order, user by user, however the
threads and the device behave; only how far each user gets depends on those.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from benchmarks.storage_workload.entries import AnyEntry, Entry, Kind
from benchmarks.storage_workload.models import Model
from benchmarks.storage_workload.personas import (
    PERSONAS,
    QOS_CLASSES,
    THINK_SWING,
    Persona,
    QosClass,
)

CONTINUE = 0.8
"""How often a user goes on with its conversation rather than begin another."""

MAX_TURNS = 50
MAX_CONTEXT_TOKENS = 32_768
"""A conversation that would grow beyond this ends, as it does in a service."""

SYSTEM_SHARE = 0.2
"""Of the conversations: those that begin with one of the system prompts."""

SYSTEM_TOKENS = (512, 1024, 2048)

DOCUMENT_SHARE = 0.1
"""Of the requests, with `documents`: those that bring chunks of a document."""

CHUNK_TOKENS = 512
MAX_CHUNK_BYTES = 256 << 20
TOP_K = 5
DOCUMENT_TOKENS = (4_000, 12_000)
DOCUMENT_TOKENS_LARGE_MODEL = (1_024, 4_096)

PREFILL_ONLY_TOKENS = 10_000
DECODE_BATCH_TOKENS = 32
"""The source reads a request's own entry once for so many generated tokens."""

_IRRATIONAL = [number**0.5 % 1 for number in (2, 5, 3, 7, 11)]

DIGEST_REQUESTS = 100
"""Of each user: what the digest of a workload covers."""


class Request(NamedTuple):
    """One request, decided before anything is served."""

    user: int
    number: int
    qos: QosClass
    persona: str
    think_s: float
    """How long the user pauses before it sends this."""

    prefix: tuple[AnyEntry, ...]
    """What the prompt begins with, in its order: found up to the first block that is missing."""

    chunks: tuple[Entry, ...]
    """Parts of documents, each found or not by itself."""

    new: Entry | None
    """What the user adds; it is in no cache yet. None where a trace says all in `prefix`."""

    generation_tokens: int
    conversation: int
    turn: int
    arrival_s: float | None = None
    """Of a recorded request, since the trace began."""

    @property
    def context_tokens(self) -> int:
        """Of the whole prompt."""
        own = self.new.tokens if self.new is not None else 0
        return own + sum(entry.tokens for entry in (*self.prefix, *self.chunks))

    @property
    def decode_reads(self) -> int:
        """How often its own entry is read while it generates; 0 for one that is only read in."""
        if self.new is None or self.context_tokens >= PREFILL_ONLY_TOKENS:
            return 0
        return -(-self.generation_tokens // DECODE_BATCH_TOKENS)

    @property
    def phase(self) -> str:
        return "prefill_decode" if self.decode_reads else "prefill"


class Workload(NamedTuple):
    """What decides all requests."""

    model: Model
    seed: int
    multi_turn: bool = True
    system_prompts: bool = True
    num_documents: int = 0

    def documents(self) -> tuple[tuple[Entry, ...], ...]:
        """The chunks of each document."""
        return _documents(self)

    def requests_of(self, user: int) -> Iterator[Request]:
        """Without end."""
        return _User(self, user).requests()

    def digest(self, users: int) -> str:
        """Of the first requests of so many users: equal for equal sequences."""
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
    """One line that says all of it."""
    fields = request._asdict() | {"qos": request.qos.name}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def digest_of(requests: Sequence[Request]) -> str:
    """Of requests that are all known before, as those of a trace are."""
    sha = hashlib.sha256()
    for request in requests:
        sha.update(encode(request))
    return sha.hexdigest()


def retrieve(draw: Random, num_chunks: int) -> list[int]:
    """The chunks that a question brings: five at most, the first ones far more often.

    Chunk i is as likely as 1 / (i + 1); none comes twice.
    """
    weights = [1 / (place + 1) for place in range(num_chunks)]
    left = list(range(num_chunks))
    chosen = []
    for _ in range(min(TOP_K, num_chunks)):
        place = draw.choices(range(len(left)), [weights[number] for number in left])[0]
        chosen.append(left.pop(place))
    return chosen


class _Character(NamedTuple):
    """What a user is like for the whole run."""

    persona: Persona
    qos: QosClass
    context_tokens: int
    generation_tokens: int
    think_s: float


def _character(seed: int, user: int) -> _Character:
    """Drawn so that the first users, however many, are as mixed as all of them.

    Each draw is the one before plus an irrational part of the range, from a place that the seed
    says: one of ten users would otherwise be interactive in one run and five in another, and the
    most users that a machine can serve would depend on that rather than on the machine.
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
    """The whole number at `place`, from 0 to 1, of `limits`, both of which may come."""
    low, high = limits
    return low + int(place * (high - low + 1))


def _quarter_or_more(draw: Random, most: int) -> int:
    return draw.randint(max(1, most // 4), most)


class _User:
    """One user: who it is, and the conversation it is in."""

    def __init__(self, workload: Workload, number: int) -> None:
        self._draw = Random(f"{workload.seed} user {number}")
        self._number = number
        self._workload = workload
        self._documents = _documents(workload)
        self._is = _character(workload.seed, number)
        self._conversation = -1
        self._said: list[Entry] = []
        """What the conversation holds: perhaps a system prompt, then its turns."""

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
        # Everything above is drawn whatever is switched off, so that a switch changes only
        # what it is about.
        if not (goes_on and self._workload.multi_turn and self._has_room(context)):
            self._conversation += 1
            self._turn = 0
            self._said = []
            if with_system and self._workload.system_prompts:
                self._said = [Entry(Kind.SYSTEM, SYSTEM_TOKENS[system], system)]
        self._turn += 1
        new = Entry(Kind.TURN, context, self._number, self._conversation, self._turn)
        prefix = tuple(self._said)
        self._said.append(new)
        return Request(
            self._number, index, self._is.qos, self._is.persona.name, think_s, prefix,
            self._chunks() if with_document and self._documents else (),
            new, generation, self._conversation, self._turn,
        )  # fmt: skip

    def _has_room(self, context: int) -> bool:
        said = sum(entry.tokens for entry in self._said)
        return bool(self._said) and self._turn < MAX_TURNS and said + context <= MAX_CONTEXT_TOKENS

    def _chunks(self) -> tuple[Entry, ...]:
        document = self._draw.choice(self._documents)
        return tuple(document[place] for place in retrieve(self._draw, len(document)))
