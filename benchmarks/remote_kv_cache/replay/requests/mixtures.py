"""Workloads of one kind of traffic, of several kinds at once, and of kinds that replace others.

As with the trace, the size does not depend on that of the cache; about as many requests arrive in
an hour.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from benchmarks.remote_kv_cache.replay.requests import traffic
from benchmarks.remote_kv_cache.replay.requests.workloads import PER_SECOND, WORKLOADS, chats
from remote_server.traces import Request

REQUESTS = 9_000
DAY_S = 86_400.0
HALF_S = 1500.0
"""The first half of a workload whose traffic changes, and the second."""

SHORT_DAY_S = 1500.0
"""Beside other traffic, jobs run again after this time."""

REQUESTS_A_SESSION, REQUESTS_A_CHAT = 47, 1.73
"""In the mean, with all branches of a session."""

Stream = Callable[[random.Random, Iterator[int], float], Iterator[Request]]
"""Made with a number of requests a second."""


def _agents(chance: random.Random, new: Iterator[int], per_second: float) -> Iterator[Request]:
    return traffic.agents(chance, new, per_second / REQUESTS_A_SESSION)


def _batch(chance: random.Random, new: Iterator[int], per_second: float) -> Iterator[Request]:
    prompts = int(per_second * SHORT_DAY_S / 2)
    return traffic.batch(chance, new, 2, SHORT_DAY_S, prompts)


def _chat(chance: random.Random, new: Iterator[int], per_second: float) -> Iterator[Request]:
    return chats(chance, new, per_second / REQUESTS_A_CHAT)


BY_DAY: tuple[Stream, ...] = _chat, traffic.rag
BY_NIGHT: tuple[Stream, ...] = _agents, _batch


def agents(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Sessions of agents alone."""
    return _first(_agents(random.Random(seed), itertools.count(), PER_SECOND))


def batch(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Three jobs on each of three days, each in some minutes of it."""
    made = traffic.batch(random.Random(seed), itertools.count(), 3, DAY_S)
    return tuple(itertools.takewhile(lambda one: one.arrival_s < 3 * DAY_S, made))


def rag(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Questions to documents alone."""
    return _first(traffic.rag(random.Random(seed), itertools.count(), PER_SECOND))


def mixture(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """All kinds of traffic at once, each as frequent as the others."""
    return phases([(*BY_DAY, *BY_NIGHT)], 2 * HALF_S, seed)


def evening(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Chats and questions to documents, and from the middle on agents and batch jobs."""
    return phases([BY_DAY, BY_NIGHT], HALF_S, seed)


def morning(capacity: int, seed: int = 1) -> tuple[Request, ...]:
    """Agents and batch jobs, and from the middle on chats and questions to documents."""
    return phases([BY_NIGHT, BY_DAY], HALF_S, seed)


def phases(kinds: Sequence[Sequence[Stream]], seconds: float, seed: int) -> tuple[Request, ...]:
    """The streams of each phase at once, for so many seconds each. At its end they end, in the
    middle of a session. All have an equal share of `PER_SECOND`."""
    new, made = itertools.count(), list[Request]()
    for phase, streams in enumerate(kinds):
        begun = [
            stream(random.Random(f"{seed}, {phase}, {number}"), new, PER_SECOND / len(streams))
            for number, stream in enumerate(streams)
        ]
        merged = heapq.merge(*begun, key=lambda one: one.arrival_s)
        for one in itertools.takewhile(lambda one: one.arrival_s < seconds, merged):
            made.append(one._replace(arrival_s=phase * seconds + one.arrival_s))
    return tuple(made)


MIXTURES: dict[str, Callable[[int, int], tuple[Request, ...]]] = {
    "agents": agents, "batch": batch, "rag": rag, "mixture": mixture, "evening": evening,
    "morning": morning,
}  # fmt: skip
"""By name: made with a seed. The first argument, the size of a cache, changes nothing."""

MADE = WORKLOADS | MIXTURES
"""All workloads by name."""


def _first(made: Iterator[Request]) -> tuple[Request, ...]:
    return tuple(itertools.islice(made, REQUESTS))
