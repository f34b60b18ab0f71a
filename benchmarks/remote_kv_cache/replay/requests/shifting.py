"""More workloads made up with a seed. Constants of the floor were chosen with these in view.

What is right changes while they last, or they are short, or the clock of their requests is unusual.
"""

import itertools
import math
import random
from collections.abc import Callable

from benchmarks.remote_kv_cache.replay.requests.workloads import (
    ANSWER_TOKENS,
    PER_SECOND,
    PROMPT_BLOCKS,
)
from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

REQUESTS = 6_000


def recent(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Each prompt is one of the last ones, the later the likelier: LRU is right."""
    chance = random.Random(seed)
    return tuple(_at(chance, _recent_prompts(chance, capacity, REQUESTS)))


def dense(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """The same, a hundred times as fast."""
    return tuple(one._replace(arrival_s=one.arrival_s / 100) for one in recent(capacity, seed))


def minutes(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """The same, with times in whole minutes."""
    return tuple(one._replace(arrival_s=one.arrival_s // 60 * 60) for one in recent(capacity, seed))


def alternating(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """By turns five hundred requests of `recent` and of a loop that is larger than the cache."""
    chance = random.Random(seed)
    names = _recent_prompts(chance, capacity, REQUESTS)
    loop = itertools.cycle(range(10**6, 10**6 + int(1.3 * capacity / PROMPT_BLOCKS) + 2))
    mixed = [next(loop) if number // 500 % 2 else name for number, name in enumerate(names)]
    return tuple(_at(chance, mixed))


def polluted(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """A thousand requests for prompts that fit, and a thousand of which most never return, by
    turns. Half of the prompts that fit are others after each turn."""
    chance, new = random.Random(seed), itertools.count(10**6)
    fit = int(0.8 * capacity / PROMPT_BLOCKS) + 1
    names = []
    for number in range(REQUESTS):
        is_hot = not number // 1000 % 2 or chance.random() < 0.3
        hot = chance.randrange(fit) + number // 2000 * (fit // 2)
        names.append(hot if is_hot else next(new))
    return tuple(_at(chance, names))


def young(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Two thousand requests of chats: there is hardly time to learn."""
    return _chats(random.Random(seed), 2_000, 0.0, 1.6)


def batches(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Chats, and every few minutes hundreds of prompts that share a beginning and never return."""
    chance = random.Random(seed)
    made = [*_chats(chance, REQUESTS // 2, 0.0, 0.8)]
    now, end, name = 0.0, made[-1].arrival_s, 10**7
    while now < end:
        now += chance.uniform(300, 900)
        shared = _blocks(name, 6)
        for name in range(name + 1, name + chance.randint(100, 600)):  # noqa: B020
            now += chance.expovariate(10)
            made.append(_request(now, [*shared, *_blocks(name, chance.randint(5, 30))]))
        name += 1
    return tuple(sorted(made, key=lambda one: one.arrival_s)[:REQUESTS])


SHIFTING: dict[str, Callable[[int, int], tuple[Request, ...]]] = {
    "recent": recent, "dense": dense, "minutes": minutes, "alternating": alternating,
    "polluted": polluted, "young": young, "batches": batches,
}  # fmt: skip
"""By name: made for a cache of so many blocks, with a seed."""


def _blocks(name: int, number: int = PROMPT_BLOCKS) -> range:
    return range(name * 1000, name * 1000 + number)


def _request(now: float, blocks: list[int] | range) -> Request:
    return Request(now, len(blocks) * TOKENS_PER_BLOCK, ANSWER_TOKENS, tuple(blocks))


def _at(chance: random.Random, names: list[int]) -> list[Request]:
    """Requests for the prompts with these numbers, at random times."""
    times = itertools.accumulate(chance.expovariate(PER_SECOND) for _ in names)
    return [_request(now, _blocks(name)) for now, name in zip(times, names, strict=True)]


def _recent_prompts(chance: random.Random, capacity: int, number: int) -> list[int]:
    """Numbers of prompts by their place in the order of use, half a cache ago in the mean."""
    stack: list[int] = []
    names = []
    for new in range(number):
        place = int(chance.expovariate(2 * PROMPT_BLOCKS / capacity))
        stack.append(stack.pop(-1 - place) if place < len(stack) else new)
        names.append(stack[-1])
    return names


def _chats(
    chance: random.Random, number: int, begin: float, per_second: float
) -> tuple[Request, ...]:
    """Conversations of two turns in the mean, with one beginning."""
    made: list[Request] = []
    new, now = itertools.count(5), begin
    while len(made) < number:
        now += chance.expovariate(per_second)
        at, blocks, added = now, [0, 1, 2, 3], 14
        while True:
            blocks = [*blocks, *itertools.islice(new, 1 + int(chance.expovariate(1 / added)))]
            made.append(_request(at, blocks))
            if chance.random() < 0.5:
                break
            at += chance.lognormvariate(math.log(150), 1)
            added = 6
    return tuple(sorted(made, key=lambda one: one.arrival_s)[:number])
