"""Rules for a server's operating point, and the number of servers for a load."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.store_sweep.points import Result
from remote_server.errors import ConfigError

# Reads up to this factor slower than the fastest count as low latency.
_LOW_LATENCY = 1.10

# From this part of the peak on, more clients only increase waiting.
_NEAR_PEAK = 0.95


MOST_SERVERS = 100_000


class OperatingPoint(NamedTuple):
    """A recommendation and the rule behind it."""

    profile: str
    result: Result
    rule: str


def operating_points(results: Sequence[Result]) -> list[OperatingPoint]:
    """Four points, from low latency to maximum; points with errors or without reads are excluded.

    On the source's table these rules choose what its authors chose: 8, 32, 64 and 80.
    """
    usable = [result for result in results if not result.errors and result.read.p50]
    if not usable:
        return []

    def read(result: Result) -> float:
        assert result.read.p50 is not None
        return result.read.p50

    fastest = min(map(read, usable))
    peak = max(usable, key=lambda result: result.tokens_per_s)
    low = [result for result in usable if read(result) <= _LOW_LATENCY * fastest]
    high = [result for result in usable if result.tokens_per_s >= _NEAR_PEAK * peak.tokens_per_s]
    return [
        OperatingPoint("low latency", max(low, key=lambda result: result.tokens_per_s),
                       "the most tokens with reads (p50) within 10 % of the fastest"),
        OperatingPoint("balanced", max(usable, key=lambda r: r.tokens_per_s / read(r)),
                       "the knee: the most tokens per millisecond of a read (p50)"),
        OperatingPoint("high throughput", min(high, key=lambda r: r.point.concurrency),
                       "the fewest clients that reach 95 % of the peak"),
        OperatingPoint("maximum", peak, "the peak"),
    ]  # fmt: skip


def best_within(results: Sequence[Result], read_p50_ms: float) -> Result:
    """The most tokens with reads (p50) faster than the limit. Raises `ConfigError` if there are
    none."""
    usable = [
        result
        for result in results
        if not result.errors and result.read.p50 is not None and result.read.p50 < read_p50_ms
    ]
    if not usable:
        known = [result.read.p50 for result in results if result.read.p50 is not None]
        fastest = f"; the fastest measured is {min(known):g} ms" if known else ""
        raise ConfigError(f"read_p50_ms: no point reads within {read_p50_ms:g} ms{fastest}")
    return max(usable, key=lambda result: result.tokens_per_s)


def servers_for(
    target_tokens_per_s: float, tokens_per_s_of_one: float,
    uneven: Callable[[int], float] = lambda servers: 1.0,
) -> int:  # fmt: skip
    """Whole servers: 1,000,000 tokens a second at 55,000 each are 19. `uneven` is the load of the
    busiest of so many servers, relative to the mean: that one must carry its part."""
    if not (target_tokens_per_s > 0 and tokens_per_s_of_one > 0):
        raise ConfigError("tokens per second: both the target and one server's must be above 0")
    servers = math.ceil(target_tokens_per_s / tokens_per_s_of_one)
    while servers < MOST_SERVERS and (
        servers * tokens_per_s_of_one < target_tokens_per_s * uneven(servers)
    ):
        servers += 1
    if servers >= MOST_SERVERS:
        raise ConfigError(f"tokens per second: the load takes {MOST_SERVERS:,} servers or more")
    return servers


class WithinSla(NamedTuple):
    """The best configuration for one limit on reads (p50)."""

    limit_ms: float
    result: Result | None
    """The point with the most tokens whose reads are faster; None without one."""


# The source's limits, and the same in units of its fastest read, 18.81 ms.
SOURCE_SLAS_MS = (25.0, 30.0, 45.0, 60.0)
_IN_FASTEST_READS = (1.33, 1.6, 2.4, 3.2)


def slas_for(results: Sequence[Result]) -> list[float]:
    """The source's limits. Where those choose only one point, the first of them, and limits in the
    same proportion to the fastest read."""
    reads = [one.read.p50 for one in results if one.read.p50 is not None and not one.errors]
    chosen = {one.result and one.result.point for one in within_slas(results, SOURCE_SLAS_MS)}
    if not reads or len(chosen) > 1:
        return [*SOURCE_SLAS_MS]
    scaled = [float(f"{times * min(reads):.2g}") for times in _IN_FASTEST_READS]
    return sorted({*scaled, SOURCE_SLAS_MS[0]})


def within_slas(results: Sequence[Result], limits_ms: Sequence[float]) -> list[WithinSla]:
    """The best point for each limit."""
    found: list[WithinSla] = []
    for limit in limits_ms:
        try:
            found.append(WithinSla(limit, best_within(results, limit)))
        except ConfigError:
            found.append(WithinSla(limit, None))
    return found
