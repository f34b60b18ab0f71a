"""Traffic of agents, of batch jobs and of retrieval, made up with a seed, without an end.

Each stream gives requests in the order of their arrival, in blocks that are the `new` ones. Where a
number is not from a source that is named here, it was chosen.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.remote_kv_cache.replay.requests.workloads import ANSWER_TOKENS
from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

# ── agents ───────────────────────────────────────────────────────────────────────────────

SYSTEM_BLOCKS = 20
"""The system prompt and the descriptions of the tools: 10,240 tokens, the same in each session."""

STEPS_MEDIAN, STEPS_SPREAD, MOST_STEPS = 15, 1.0, 60
"""Steps of a branch, lognormal. In TraceLab's 4,265 sessions of coding agents
(tracelab.cs.washington.edu) the median is 15 steps that a tool begins. There one session in ten has
135 or more, and a prompt has 150,000 tokens in the mean; the steps are cut off here."""

STEP_TOKENS = 600
"""The result of a tool and the answer before it: the median, lognormal with a spread of 1."""

PAUSE_S, PAUSE_SPREAD, LONGEST_PAUSE_S = 12.0, 1.7, 3600.0
"""Between two steps, lognormal: a tenth of the pauses is longer than 106 s, and a hundredth longer
than 10 min. Most tools take seconds; builds, tests and persons take minutes."""

FORKS = 0.06
"""The chance of a step of a session's first branch that another one begins at it, or at a step
before it: another attempt, or a second agent with the same past."""


class _Branch(NamedTuple):
    """The next step of a branch: ordered by time."""

    at: float
    number: int
    ends: tuple[int, ...]
    """Tokens of the prompt at each step before."""

    blocks: tuple[int, ...]
    steps: int
    """So many are left."""

    is_first: bool


def agents(
    chance: random.Random, new: Iterator[int], sessions_per_second: float
) -> Iterator[Request]:
    """Sessions of agents with one system prompt. Each step sends all that came before it."""
    shared = tuple(itertools.islice(new, SYSTEM_BLOCKS))
    numbers = itertools.count()
    begin = (SYSTEM_BLOCKS * TOKENS_PER_BLOCK,)

    def session(now: float) -> _Branch:
        at = now + chance.expovariate(sessions_per_second)
        return _Branch(at, next(numbers), begin, shared, _steps(chance), True)

    upcoming = [session(0.0)]
    while True:
        branch = heapq.heappop(upcoming)
        now, ends = branch.at, branch.ends
        if ends == begin:
            heapq.heappush(upcoming, session(now))
        tokens = ends[-1] + int(chance.lognormvariate(math.log(STEP_TOKENS), 1.0))
        more = tokens // TOKENS_PER_BLOCK - len(branch.blocks)
        blocks = (*branch.blocks, *itertools.islice(new, more))
        yield Request(now, tokens, ANSWER_TOKENS, blocks)
        ends = (*ends, tokens)
        if branch.steps > 1:
            again, left = now + _pause(chance), branch.steps - 1
            one = _Branch(again, next(numbers), ends, blocks, left, branch.is_first)
            heapq.heappush(upcoming, one)
        if branch.is_first and chance.random() < FORKS:
            kept = ends[: chance.randrange(2, len(ends) + 1)]
            past = blocks[: kept[-1] // TOKENS_PER_BLOCK]
            again = now + _pause(chance)
            one = _Branch(again, next(numbers), kept, past, _steps(chance), False)
            heapq.heappush(upcoming, one)


def _steps(chance: random.Random) -> int:
    steps = chance.lognormvariate(math.log(STEPS_MEDIAN), STEPS_SPREAD)
    return 1 + min(int(steps), MOST_STEPS)


def _pause(chance: random.Random) -> float:
    return min(chance.lognormvariate(math.log(PAUSE_S), PAUSE_SPREAD), LONGEST_PAUSE_S)


# ── batch jobs ───────────────────────────────────────────────────────────────────────────

TEMPLATE_BLOCKS = 4, 16
"""The instructions and examples of a job: 2,000 to 8,000 tokens."""

ITEM_BLOCKS = 1, 6
"""The item that a prompt of a job is for: 500 to 3,000 tokens."""

JOB_PROMPTS, JOB_SPREAD, MOST_PROMPTS = 1200, 0.5, 4000
"""Prompts of a job, lognormal. A batch of OpenAI's interface has at most 50,000 requests."""

JOB_PER_SECOND = 5.0
RUNS_AGAIN = 0.5
"""The chance of a job that the next day has it too, with the same prompts in the same order."""

BEGIN = 0.1
"""Jobs begin in this part of a day."""

OVERLAP = 0.3, 0.9
"""A job begins when the one before has sent this part of its prompts."""


def batch(
    chance: random.Random, new: Iterator[int], jobs_a_day: int, day_s: float,
    prompts: int = JOB_PROMPTS,
) -> Iterator[Request]:  # fmt: skip
    """Jobs of each day. Each has a template, and a prompt for each of its items, sent once. A job
    ends on the day on which it begins: its prompts that would be later are omitted."""
    jobs: list[list[tuple[int, ...]]] = []
    for day in itertools.count():
        jobs = [job for job in jobs if chance.random() < RUNS_AGAIN]
        while len(jobs) < jobs_a_day:
            jobs.append(_job(chance, new, prompts))
        sent: list[Request] = []
        begin = day * day_s + chance.uniform(0.0, BEGIN * day_s)
        for job in jobs:
            now = begin
            for blocks in job:
                now += chance.expovariate(JOB_PER_SECOND)
                if now < (day + 1) * day_s:
                    sent.append(_request(now, blocks))
            begin += chance.uniform(*OVERLAP) * len(job) / JOB_PER_SECOND
        yield from sorted(sent, key=lambda one: one.arrival_s)


def _job(chance: random.Random, new: Iterator[int], prompts: int) -> list[tuple[int, ...]]:
    """The prompts of a new job."""
    template = [*itertools.islice(new, chance.randint(*TEMPLATE_BLOCKS))]
    number = min(int(chance.lognormvariate(math.log(prompts), JOB_SPREAD)), MOST_PROMPTS)
    items = (itertools.islice(new, chance.randint(*ITEM_BLOCKS)) for _ in range(number))
    return [(*template, *item) for item in items]


# ── retrieval ────────────────────────────────────────────────────────────────────────────

RAG_SYSTEM_BLOCKS = 2
DOCUMENTS = 2000
"""Their popularity follows Zipf's law with the exponent 1: 3 % of them are 57 % of the requests.
The RAGCache paper (arXiv 2404.12457) found 60 %."""

DOCUMENT_BLOCKS = 2, 8
"""1,000 to 4,000 tokens."""

TAKEN = 2, 4
"""Documents of a prompt."""

RELATED = 5
"""The document that is asked for, and those that a search returns beside it, by relevance. Which
ones are taken and in which order differs from question to question: the relevance of each has a
noise as large as the step from one to the next. Prompts share what is equal from the first document
on; search results in other orders share nothing (arXiv 2606.19667)."""

QUESTION_BLOCKS = 1, 2
DRIFT_S = 30.0
"""So often a document takes another place in the order of popularity, which is high with the chance
of a high one to be asked for: the news."""


def rag(chance: random.Random, new: Iterator[int], per_second: float) -> Iterator[Request]:
    """Questions with documents in front of them, and a system prompt in front of these."""
    system = tuple(itertools.islice(new, RAG_SYSTEM_BLOCKS))
    lengths = [chance.randint(*DOCUMENT_BLOCKS) for _ in range(DOCUMENTS)]
    shares = [*itertools.accumulate(1 / rank for rank in range(1, DOCUMENTS + 1))]
    ranked = [*range(DOCUMENTS)]

    def asked() -> int:
        return chance.choices(range(DOCUMENTS), cum_weights=shares)[0]

    beside = [[one, *(asked() for _ in range(RELATED - 1))] for one in range(DOCUMENTS)]
    behind: dict[tuple[int, int], tuple[int, ...]] = {}
    """The blocks of a document behind a block."""

    now, drifted = 0.0, 0.0
    while True:
        now += chance.expovariate(per_second)
        while drifted + DRIFT_S < now:
            drifted += DRIFT_S
            ranked.insert(asked(), ranked.pop(chance.randrange(DOCUMENTS)))
        blocks = system
        found = [*dict.fromkeys(beside[ranked[asked()]])]
        noisy = {one: place + chance.gauss(0.0, 1.0) for place, one in enumerate(found)}
        for one in sorted(found, key=noisy.__getitem__)[: chance.randint(*TAKEN)]:
            place = blocks[-1], one
            if place not in behind:
                behind[place] = tuple(itertools.islice(new, lengths[one]))
            blocks = (*blocks, *behind[place])
        yield _request(now, (*blocks, *itertools.islice(new, chance.randint(*QUESTION_BLOCKS))))


def _request(now: float, blocks: tuple[int, ...]) -> Request:
    return Request(now, len(blocks) * TOKENS_PER_BLOCK, ANSWER_TOKENS, blocks)
