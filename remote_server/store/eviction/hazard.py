"""Hazards: how soon blocks of each class of requests are used again, learned from sampled keys."""

from collections.abc import Sequence
from itertools import islice, pairwise
from math import log

import numpy as np
import numpy.typing as npt

FIRST_AGE_S = 0.5
PER_OCTAVE = 2
NUM_AGES = 48
"""Ages are counted in this many ranges: up to half a second, and then two an octave, to 49 days."""

EDGES = [0.0, *(FIRST_AGE_S * 2 ** (number / PER_OCTAVE) for number in range(NUM_AGES))]
OF_LOG = PER_OCTAVE / log(2)

LEAST_HELD_S = 4.0
"""The nearest horizon of a rank. Requests that arrive together would otherwise make every block
seem worth keeping for one more moment."""

TURNS = 5
"""The first turn of a conversation, the second, up to the fifth and later."""

MARKS = 6
"""Of requests, by their hints; see `hints`."""

UNKNOWN = TURNS * MARKS
"""The class of blocks whose place in a prompt is not known."""

NUM_CLASSES = UNKNOWN + 1

MAX_SAMPLES = 8192
PER_SAMPLE = 8
"""At most one of so many keys is sampled."""

UPDATE_EVERY = 512
"""Sampled uses from one update of the ranks to the next."""

HALF_LIFE = 5000
"""Sampled uses after which an observation counts half."""

PRIOR, PRIOR_OF_ALL, PRIOR_CHANCE = 10.0, 2.0, 0.01
"""Shrinkage: each class counts so many observations of the class above it; all together so many
with that chance in each range of ages, which ranks blocks by age as LRU does."""

Counts = npt.NDArray[np.float64]
Times = npt.NDArray[np.float64]

_STARTS = np.array(EDGES[1:NUM_AGES])
"""Of all ranges but the first."""


def age_range(age_s: float) -> int:
    """The number of the range that `age_s` is in."""
    if age_s < FIRST_AGE_S:
        return 0
    return min(int(log(age_s / FIRST_AGE_S) * OF_LOG) + 1, NUM_AGES - 1)


def age_ranges(ages_s: Times) -> npt.NDArray[np.int64]:
    """The numbers of the ranges that these ages are in."""
    return _STARTS.searchsorted(ages_s, "right")


def class_of(turn: int, mark: int) -> int:
    """`turn` counts from 0."""
    return (turn if turn < TURNS else TURNS - 1) * MARKS + mark


def is_hinted(kind: int) -> bool:
    """Whether the class `kind` is of blocks with a hint that is believed."""
    return kind % MARKS != 0


class Hazards:
    """The chance that a block is used again, by its class and by its age, and ranks made of it.

    A sampled key waits from one use to the next, whether it is resident or not. Keys that still
    wait, and those dropped because newer ones took their place, count as not used up to their age:
    they are censored, not gone.
    """

    def __init__(self) -> None:
        self.ranks: list[list[float]] = []
        """By class and age range: the best ratio, over all horizons, of expected hits to the time
        that a block is held for them, in hits a second."""
        self.rank_table: Counts = np.zeros((NUM_CLASSES, NUM_AGES))
        """The same, to rank many blocks at once."""
        self.mask = PER_SAMPLE - 1
        """A key is sampled when no bit of its hash is in it."""
        self._waits: dict[int, tuple[int, float, int]] = {}  # hash to class, since when, uses
        self._used = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._dropped = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._num_uses = 0
        self.chances: Counts = np.zeros((NUM_CLASSES, NUM_AGES))
        """That a block which reaches a range of ages is used again within it."""
        self.seen: Counts = np.zeros(NUM_CLASSES)
        """Observations of each class behind them, old ones for less."""
        self._rank(0.0)

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about: rows of samples, counts and ranks."""
        return 150 * len(self._waits) + 4 * 32 * NUM_CLASSES * NUM_AGES

    def fit(self, num_blocks: int) -> None:
        """Sample so few keys that those which wait are from as long ago as four times the
        `num_blocks` of the cache."""
        self.thin(-(-4 * num_blocks // MAX_SAMPLES))

    def thin(self, per_sample: int) -> None:
        """Sample at most one of `per_sample` keys from now on, or somewhat fewer."""
        mask = self.mask
        while mask + 1 < per_sample:
            mask = 2 * mask + 1
        if mask > self.mask:
            self._waits = {one: wait for one, wait in self._waits.items() if not one & mask}
            self.mask = mask

    def use(self, sampled: Sequence[int], kinds: Sequence[int], now: float) -> None:
        """Keys with these hashes, which are sampled, were used by one request. A key becomes of
        that one of `kinds` which has the number of its uses so far, or of the last one."""
        if not sampled:
            return
        waits, most = self._waits, len(kinds) - 1
        for one in sampled:
            wait = waits.pop(one, None)
            if wait is None:
                waits[one] = kinds[0], now, 1
                continue
            kind, since, uses = wait
            self._used[kind][age_range(now - since)] += 1
            waits[one] = kinds[uses if uses < most else most], now, uses + 1
        for one in [*islice(waits, max(0, len(waits) - MAX_SAMPLES))]:
            kind, since, _ = waits.pop(one)
            self._dropped[kind][age_range(now - since)] += 1
        before = self._num_uses
        self._num_uses += len(sampled)
        if before // UPDATE_EVERY != self._num_uses // UPDATE_EVERY:
            self._rank(now)

    def within(self, kind: int, horizon_s: float) -> float:
        """The chance that a block of this class which was just used is used again so soon."""
        left = 1.0
        for chance, (begin, end) in zip(self.chances[kind], pairwise(EDGES), strict=True):
            if horizon_s < end:
                return float(1.0 - left * (1.0 - chance) ** ((horizon_s - begin) / (end - begin)))
            left *= 1.0 - chance
        return 1.0 - left

    def _rank(self, now: float) -> None:
        """Update the ranks, and let old observations count less."""
        keep = 0.5 ** (UPDATE_EVERY / HALF_LIFE)
        used, dropped = np.array(self._used), np.array(self._dropped)
        self._used, self._dropped = (used * keep).tolist(), (dropped * keep).tolist()
        censored = dropped + self._waiting(now)
        ended = used + censored
        self.seen = ended.sum(1)
        later = ended[:, ::-1].cumsum(1)[:, ::-1] - ended
        self.chances = _shrunk(used, later + used + 0.5 * censored)
        # Classes of a turn that were never seen have equal chances, and are ranked once.
        rows, place = np.unique(self.chances, axis=0, return_inverse=True)
        self.rank_table = _gittins(rows)[place.reshape(-1)]
        self.ranks = self.rank_table.tolist()

    def _waiting(self, now: float) -> Counts:
        """Keys that wait, by class and by age range."""
        counts = np.zeros(NUM_CLASSES * NUM_AGES)
        if self._waits:
            kinds, since, _ = (np.array(one) for one in zip(*self._waits.values(), strict=True))
            ages = np.searchsorted(EDGES, now - since, side="right") - 1
            places = kinds * NUM_AGES + ages.clip(0, NUM_AGES - 1)
            counts += np.bincount(places.astype(np.int64), minlength=counts.size)
        by_class: Counts = counts.reshape(NUM_CLASSES, NUM_AGES)
        return by_class


def _shrunk(used: Counts, at_risk: Counts) -> Counts:
    """Chances by class, each drawn to that of the classes of its turn, and these to that of all."""
    all_used, all_at_risk = used.sum(0), at_risk.sum(0)
    of_all = (all_used + PRIOR_OF_ALL * PRIOR_CHANCE) / (all_at_risk + PRIOR_OF_ALL)
    shape = TURNS, MARKS, NUM_AGES
    marked, marked_at_risk = used[:UNKNOWN].reshape(shape), at_risk[:UNKNOWN].reshape(shape)
    of_turn = (marked.sum(1) + PRIOR * of_all) / (marked_at_risk.sum(1) + PRIOR)
    of_mark = (marked + PRIOR * of_turn[:, None]) / (marked_at_risk + PRIOR)
    unknown = (used[UNKNOWN:] + PRIOR * of_all) / (at_risk[UNKNOWN:] + PRIOR)
    chances = np.concatenate((of_mark.reshape(UNKNOWN, NUM_AGES), unknown))
    capped: Counts = np.minimum(chances, 0.98)
    return capped


def _gittins(chances: Counts) -> Counts:
    """From the start of each range of ages: the most hits a second held, over all horizons."""
    edges = np.array(EDGES)
    left = np.concatenate((np.ones((len(chances), 1)), (1 - chances).cumprod(1)), axis=1)
    held = (left[:, :-1] + left[:, 1:]) / 2 * np.diff(edges)
    held = np.concatenate((np.zeros((len(chances), 1)), held.cumsum(1)), axis=1)
    hits = left[:, :, None] - left[:, None, :]
    seconds = held[:, None, :] - held[:, :, None]
    far = edges[None, :] - edges[:, None] >= LEAST_HELD_S
    ratios = np.where(far, hits / np.where(far, seconds, 1.0), 0.0)
    best: Counts = ratios.max(2)[:, :-1]
    return best
