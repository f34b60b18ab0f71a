"""Arrival times of an open load: at a rate, or at the times of a trace."""

from collections.abc import Iterable, Iterator
from random import Random

from benchmarks.storage_workload.load.driver import Source
from benchmarks.storage_workload.traffic.requests import Request

GAMMA_SHAPE = 0.5
"""Below 1, so arrivals cluster more than in a Poisson process."""


def round_robin(source: Source, users: int) -> Iterator[Request]:
    """The next request of each user in turn, until none has any."""
    streams = [source.requests_of(user) for user in range(users)]
    while streams:
        left = []
        for stream in streams:
            request = next(stream, None)
            if request is not None:
                left.append(stream)
                yield request
        streams = left


def times(kind: str, rate: float, seed: int) -> Iterator[float]:
    """Seconds since the run began: `fixed`, `poisson` or `gamma`, `rate` of them a second."""
    draw = Random(f"{seed} arrivals")
    now = 0.0
    while True:
        yield now
        if kind == "fixed":
            now += 1 / rate
        elif kind == "poisson":
            now += draw.expovariate(rate)
        else:
            now += draw.gammavariate(GAMMA_SHAPE, 1 / (rate * GAMMA_SHAPE))


def at_rate(
    requests: Iterable[Request], kind: str, rate: float, seed: int
) -> Iterator[tuple[float, Request]]:
    return zip(times(kind, rate, seed), requests, strict=False)


def as_recorded(requests: Iterable[Request], speed: float) -> Iterator[tuple[float, Request]]:
    """`speed` times as fast, from the first on. Each request must have its arrival time."""
    timed = [(request.arrival_s or 0.0, request) for request in requests]
    timed.sort(key=lambda each: each[0])
    for arrival_s, request in timed:
        yield (arrival_s - timed[0][0]) / speed, request
