"""Workloads made up with a seed, each of which a rule of eviction may be bad at.

Prompts have as many blocks as those of the conversation trace in the mean, and arrive as often; but
those of `chat` and `few` are as long as their conversation.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator

from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

REQUESTS = 9_000
"""At least so many; `uniform` has more for a large cache, to request twice what fills it."""

PER_SECOND = 3.3
PROMPT_BLOCKS = 23
ANSWER_TOKENS = 200

LOOP = 1.1
"""A loop is so many times as large as the cache."""


def uniform(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Each prompt is any of those that fill the cache twice, with equal chance."""
    chance = random.Random(seed)
    prompts = 2 * capacity // PROMPT_BLOCKS
    names = (chance.randrange(prompts) for _ in itertools.count())
    return _requests(chance, names, max(REQUESTS, prompts))


def scan(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Half of the requests are for prompts that fill half of the cache; the others never return."""
    chance = random.Random(seed)
    prompts = max(1, capacity // 2 // PROMPT_BLOCKS)
    new = itertools.count(prompts)
    return _requests(
        chance,
        (chance.randrange(prompts) if chance.random() < 0.5 else next(new) for _ in new),
    )


def loop(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """The same prompts again and again in one order; they are a little more than the cache."""
    prompts = int(LOOP * capacity / PROMPT_BLOCKS)
    return _requests(random.Random(seed), itertools.cycle(range(prompts)))


def zipf(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Prompts of Zipf's law that would fill the cache sixteen times."""
    chance = random.Random(seed)
    prompts = 16 * capacity // PROMPT_BLOCKS
    weights = [*itertools.accumulate(1 / rank for rank in range(1, prompts + 1))]
    return _requests(chance, iter(chance.choices(range(prompts), cum_weights=weights, k=REQUESTS)))


def turnover(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """A loop, and from the middle on prompts that return at once or never: the older ones of the
    first half are what would have stayed."""
    first = loop(capacity, seed)[: REQUESTS // 2]
    chance = random.Random(seed)
    new, recent = itertools.count(1_000_000), [1_000_000]

    def names() -> Iterator[int]:
        while True:
            if chance.random() < 0.5:
                recent.append(next(new))
                yield recent[-1]
            else:
                yield recent[-1 - int(min(chance.expovariate(1 / 20), len(recent) - 1))]

    begin = first[-1].arrival_s
    later = _requests(chance, names())[: REQUESTS // 2]
    return (*first, *(one._replace(arrival_s=one.arrival_s + begin) for one in later))


def chat(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Conversations, of which three in ten are continued, and of those that are three in five once
    more: each prompt is the one before with some blocks behind it, half a minute to half an hour
    later. All begin with the same four blocks."""
    made = chats(random.Random(seed), itertools.count(), PER_SECOND / 2)
    return tuple(itertools.islice(made, REQUESTS))


def chats(
    chance: random.Random, new: Iterator[int], conversations_per_second: float
) -> Iterator[Request]:
    """The requests of `chat` without an end. Its blocks are the `new` ones."""
    shared = [*itertools.islice(new, 4)]
    upcoming = [(chance.expovariate(conversations_per_second), shared, 0)]
    while True:
        now, blocks, turn = heapq.heappop(upcoming)
        if not turn:
            upcoming.append((now + chance.expovariate(conversations_per_second), shared, 0))
        blocks = [*blocks, *itertools.islice(new, int(chance.lognormvariate(2.5, 1)) + 1)]
        yield Request(now, len(blocks) * TOKENS_PER_BLOCK, ANSWER_TOKENS, tuple(blocks))
        if chance.random() < (0.6 if turn else 0.3):
            upcoming.append((now + chance.lognormvariate(5.0, 1), blocks, turn + 1))
        heapq.heapify(upcoming)


def few(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Thirty conversations, any of which goes on each second, and begins anew once it takes an
    eighth of the cache."""
    chance = random.Random(seed)
    new, now, made = itertools.count(), 0.0, list[Request]()
    blocks: list[list[int]] = [[] for _ in range(30)]
    for _ in range(6_000):
        now += chance.expovariate(1.0)
        number = chance.randrange(len(blocks))
        before = blocks[number] if len(blocks[number]) <= capacity // 8 else []
        blocks[number] = one = [*before, *itertools.islice(new, chance.randint(1, 5))]
        made.append(Request(now, len(one) * TOKENS_PER_BLOCK, ANSWER_TOKENS, tuple(one)))
    return tuple(made)


WORKLOADS: dict[str, Callable[[int, int], tuple[Request, ...]]] = {
    "uniform": uniform, "scan": scan, "loop": loop, "zipf": zipf, "turnover": turnover,
    "chat": chat, "few": few,
}  # fmt: skip
"""By name: made for a cache of so many blocks, with a seed."""


def _requests(
    chance: random.Random, names: Iterator[int], number: int = REQUESTS
) -> tuple[Request, ...]:
    """A request for each of the first `number` prompts with these numbers, at random times."""
    now, made = 0.0, []
    for name in itertools.islice(names, number):
        now += chance.expovariate(PER_SECOND)
        blocks = tuple(range(name * PROMPT_BLOCKS, (name + 1) * PROMPT_BLOCKS))
        tokens = PROMPT_BLOCKS * TOKENS_PER_BLOCK
        made.append(Request(now, tokens, ANSWER_TOKENS, blocks))
    return tuple(made)
