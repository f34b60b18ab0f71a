"""Sums over the requests of one namespace, and the shares of its tokens that they estimate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add

import numpy as np
import numpy.typing as npt

from remote_server.store.curve.miniature import Finds

Floats = npt.NDArray[np.float64]


@dataclass
class Sums:
    """Tokens, by `num_sizes` sizes of caches and really.

    Those of a sampled key count as often as its sample is small, so that a changed share of
    sampled keys changes no sum. `uses` are sums in which each token also counts as often as its key
    had been used.
    """

    num_sizes: int
    asked: float = 0.0
    found: dict[str, float] = field(default_factory=dict)
    """Really: in each tier and those above it."""

    hot: float = 0.0
    sampled: float = 0.0
    uses: float = 0.0
    stocked: float = 0.0
    """Of the sampled ones: really found when they were asked for first, as on a disk that is older
    than the server."""

    missed: dict[str, float] = field(default_factory=dict)
    """By reason, of the sampled ones."""

    def __post_init__(self) -> None:
        self.hot_found = [0.0] * self.num_sizes
        """These three by the least size that finds a token; and then also by those above it."""
        self.lru_found = [0.0] * self.num_sizes
        self.lru_uses = [0.0] * self.num_sizes
        self.miniatures: Floats = np.zeros((self.num_sizes, len(Finds._fields)))

    def add(self, other: "Sums") -> None:
        self.asked += other.asked
        _add(self.found, other.found)
        self.hot += other.hot
        self.sampled += other.sampled
        self.uses += other.uses
        self.stocked += other.stocked
        _add(self.missed, other.missed)
        self.hot_found = [*map(add, self.hot_found, other.hot_found)]
        self.lru_found = [*map(add, self.lru_found, other.lru_found)]
        self.lru_uses = [*map(add, self.lru_uses, other.lru_uses)]
        self.miniatures += other.miniatures

    def lru(self) -> Floats:
        """The share of the tokens that LRU finds at each size."""
        if not self.asked:
            return np.zeros(self.num_sizes)
        rest = self.asked - self.hot
        hot, found, uses = np.cumsum([self.hot_found, self.lru_found, self.lru_uses], axis=1)
        shares: Floats = (hot + _corrected(found, uses, self.sampled, self.uses, rest)) / self.asked
        return shares

    @property
    def stocked_share(self) -> float:
        """Of the tokens, those that were found when they were asked for first."""
        rest = (self.asked - self.hot) / max(self.asked, 1.0)
        return self.stocked / max(self.sampled, 1.0) * rest

    def gain(self) -> Floats:
        """How much more the learned rule finds at each size. It never finds less than LRU, which
        would reign then."""
        if not self.asked:
            return np.zeros(self.num_sizes)
        rest = self.asked - self.hot
        keys, uses, by_lru, uses_by_lru, by_rule, uses_by_rule, hot, hot_lru, hot_rule = (
            self.miniatures.T
        )
        lru = _corrected(by_lru, uses_by_lru, keys, uses, rest)
        rule = _corrected(by_rule, uses_by_rule, keys, uses, rest)
        of_hot = self.hot * (hot_rule - hot_lru) / np.maximum(hot, 1.0)
        gain: Floats = np.maximum(0.0, rule - lru + of_hot) / self.asked
        return gain


def _add(to: dict[str, float], more: Mapping[str, float]) -> None:
    for name, count in more.items():
        to[name] = to.get(name, 0.0) + count


def _corrected(
    found: Floats, found_uses: Floats, sampled: Floats | float, uses: Floats | float,
    everything: float,
) -> Floats:  # fmt: skip
    """`found` of the `sampled` tokens, for `everything`.

    The sample has more tokens than it should, or fewer, for the most part because keys with many
    uses are in it, or are not. So the difference is found as often as such keys are: a regression
    estimator. (SHARDS counts all of it as found, which is too much at small sizes.)
    """
    often = found_uses / np.maximum(uses, 1.0)
    corrected: Floats = np.clip(found + (everything - sampled) * often, 0.0, everything)
    return corrected


def anchored(
    lru: Floats, gain: Floats, now: int, really: float, stocked: float = 0.0
) -> tuple[Floats, Floats]:
    """`lru` plus the `gain` of the rule in force, and `lru`, where value number `now` of the sum is
    what is found `really`.

    If that is less, every gain is so much less, as far as there is any. What is left moves all
    sizes alike: misses that no size mends, which LRU would have as well. If it is more, that moves
    smaller sizes alike; of larger ones it scales what is missed, which is less there. LRU would
    find as much more as is `stocked`. The shares stay between 0 and 1, and never fall as the size
    grows."""
    off = really - lru[now] - gain[now]
    of_gain = min(-off, gain[now]) if off < 0.0 else 0.0
    rest = off + of_gain
    rule = _moved(lru + np.maximum(0.0, gain - of_gain), now, rest)
    return _rising(rule, now), _rising(_moved(lru, now, min(stocked, rest)), now)


def _moved(shares: Floats, now: int, more: float) -> Floats:
    moved: Floats = shares + more
    if more > 0.0 and shares[now] < 1.0:
        moved[now:] = 1.0 - (1.0 - shares[now:]) * (1.0 - more / (1.0 - shares[now]))
    return moved


def _rising(shares: Floats, now: int) -> Floats:
    """`shares` as a curve that never falls and keeps its value number `now`."""
    kept = np.clip(shares, 0.0, 1.0)
    larger = np.maximum.accumulate(kept[now:])
    smaller = np.minimum.accumulate(kept[now::-1])[::-1]
    return np.concatenate((smaller[:-1], larger))
