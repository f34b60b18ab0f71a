"""Verdicts on spare cores and on the latency of lookups at each point, by rule.

A lookup moves no blocks, so other clients should not slow it down while a thread that needs a core
finds one. Where cores are short all threads wait, and a slower lookup is not the server's fault.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.store_sweep.points import Result

# Above half of the cores, two threads that need one at the same moment often find only one.
_IN_USE_AT_MOST = 0.5

_FLAT = 1.25


class Verdict(NamedTuple):
    """The verdict on one point."""

    result: Result
    to_spare: bool | None
    """Whether cores were to spare. None: not measured."""

    times: float | None
    """Its lookups (p50), relative to those of the point with the fewest at once. None when either
    point has errors."""

    @property
    def flat(self) -> bool | None:
        return None if self.times is None else self.times <= _FLAT

    @property
    def words(self) -> tuple[str, str]:
        """The cells of a table: whether cores were to spare, and whether lookups are flat."""
        to_spare = {None: "-", True: "yes", False: "no"}[self.to_spare]
        if self.times is None:
            return to_spare, "-"
        return to_spare, f"{self.times:.2f}, {'flat' if self.flat else 'not flat'}"


def cores_to_spare(cpu_percent: float | None, cores: int) -> bool | None:
    """Whether at least half of the cores, and at least one whole core, were idle."""
    if cpu_percent is None:
        return None
    idle = cores * (1 - cpu_percent / 100)
    return idle >= max(1.0, cores * (1 - _IN_USE_AT_MOST))


def verdicts(results: Sequence[Result], cores: int) -> list[Verdict]:
    """A verdict on each of `results`, fewest at once first."""
    if not results:
        return []
    fewest = min(results, key=lambda result: result.point.concurrency)
    return [
        Verdict(result, cores_to_spare(result.cpu_percent, cores), _times(result, fewest))
        for result in sorted(results, key=lambda result: result.point.concurrency)
    ]


def conclusion(found: Sequence[Verdict]) -> str:
    """One sentence."""
    to_spare = [one for one in found if one.to_spare and one.times is not None]
    fewest = min((one.result.point.concurrency for one in found), default=0)
    if len(to_spare) < 2 or to_spare[0].result.point.concurrency != fewest:
        return "Whether lookups stay flat is unknown: too few points had cores to spare."
    at = _list([f"{one.result.point.concurrency}" for one in to_spare])
    steep = [one for one in to_spare if not one.flat]
    if not steep:
        return f"Lookups (p50) are flat within 25 % wherever cores were to spare: {at} at once."
    where = _list([f"{one.times:.2f} times at {one.result.point.concurrency}" for one in steep])
    return f"Lookups (p50) are not flat though cores were to spare at {at}: {where} at once."


def _times(result: Result, fewest: Result) -> float | None:
    if result.errors or fewest.errors or not result.lookup.p50 or not fewest.lookup.p50:
        return None
    return result.lookup.p50 / fewest.lookup.p50


def _list(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
