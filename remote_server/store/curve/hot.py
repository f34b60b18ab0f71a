"""Hot beginnings: keys that so many requests share that a sample without them would be far off.

One shared system prompt is a large part of all that is found. In a sample of the keys it counts
many times or not at all, so it is counted exactly instead: a stratum of its own.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]

EVERY = 512
"""Requests after which all counts are halved."""

ENOUGH = 32
"""A beginning is hot when so many requests had it, of `EVERY` or a few more."""

COLD = 8
"""And is no more when a halved count is below this."""

MOST_KEYS = 256
"""Of a run; a longer beginning is several runs."""

MOST_RUNS = 256
"""Hot runs; one more is not hot before another one has become cold."""


class _Candidate(NamedTuple):
    weight: float
    run: Names
    """What all requests that counted have in common, from the candidate on."""


class HotRuns:
    """Finds hot beginnings: runs of keys, each behind another or at the start of a prompt."""

    def __init__(self) -> None:
        self._hot: dict[int, Names] = {}
        """By first key."""
        self._candidates: dict[int, _Candidate] = {}
        self._num_requests = 0

    @property
    def num_keys(self) -> int:
        """Those that are hot now."""
        return sum(map(len, self._hot.values()))

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        runs = [*self._hot.values(), *(one.run for one in self._candidates.values())]
        return sum(run.nbytes for run in runs) + 300 * len(runs)

    def length(self, names: Names) -> int:
        """A request has `names`: how many of the first are hot."""
        at = 0
        while at < len(names):
            rest = names[at : at + MOST_KEYS]
            run = self._hot.get(int(rest[0]))
            same = 0 if run is None else _common(run, rest)
            self._count(rest if run is None else rest[:same])
            at += same
            if run is None or same < len(run):
                break
        self._num_requests += 1
        if self._num_requests % EVERY == 0:
            self._fade()
        return at

    def _count(self, run: Names) -> None:
        first = int(run[0])
        before = self._candidates.get(first)
        if before is None:
            self._candidates[first] = _Candidate(1.0, run.copy())
            return
        weight, run = before.weight + 1.0, before.run[: _common(before.run, run)]
        self._candidates[first] = _Candidate(weight, run)
        if weight >= ENOUGH and first not in self._hot and len(self._hot) < MOST_RUNS:
            self._hot[first] = run

    def _fade(self) -> None:
        """Halve all counts. What only some requests have of a hot run is a run of its own, if it is
        hot as well."""
        self._candidates = {
            first: _Candidate(one.weight / 2, one.run)
            for first, one in self._candidates.items()
            if one.weight >= 2.0
        }
        self._hot = {
            first: one.run
            for first, one in self._candidates.items()
            if first in self._hot and one.weight >= COLD
        }


def _common(one: Names, other: Names) -> int:
    """The length of their common beginning."""
    number = min(len(one), len(other))
    differs = np.flatnonzero(one[:number] != other[:number])
    return int(differs[0]) if len(differs) else number
