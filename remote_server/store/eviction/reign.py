"""The reign: which of two rules of eviction a cache follows, by what each of them finds of late."""

from collections.abc import Sequence
from math import exp, sqrt

from remote_server.store.eviction.victims import Rule

MEMORY_S, MEMORY_REQUESTS, MOST_REQUESTS = 200.0, 500, 4000
"""A request counts a third after so many seconds and so many requests, whichever is later, but
after the last number of requests at the latest."""

LONG_REQUESTS = 20_000
"""The same, of the count of what was lost to LRU."""

LEAST_KEYS = 500.0
"""Sampled keys, as they count, before the rule may change; and as many as a shadow has."""

HYSTERESIS = 1.01
"""The learned rule reigns when it finds so many times what LRU finds."""

SURE, SURE_AT_ONCE, EARLY_REQUESTS = 0.7, 4.3, 700
"""And when the difference is so many times what chance alone would make it; at the start so many
times more, of which a third is left after so many requests: a short trace cannot earn back what an
early mistake costs. Where most keys are requested with hints that are believed, nothing is added:
a rank by hints has less to learn."""

SURE_OF_LRU = 0.7
"""The same for the way back."""

LOST = 0.0015
"""The share of all keys lost to LRU that makes the learned rule wait for twice the difference."""

MOST_LOST, SURE_OF_LOSS, OF_PLACES = 0.002, 1.0, 0.03
"""LRU reigns again when more is lost than this share of all keys, so many times what chance would
make it and this share of the places, which a change costs even when it is right."""

BATCH = 16
"""Requests whose differences are summed before they are squared: neighbours differ alike."""


class Spread:
    """How far chance alone moves a sum of differences, from their squares."""

    def __init__(self) -> None:
        self._squares = self._batch = 0.0
        self._number = 0

    def add(self, difference: float, keep: float) -> None:
        """Earlier ones count `keep` times from now on."""
        self._squares *= keep
        self._batch += difference
        self._number += 1
        if self._number == BATCH:
            self._squares += self._batch**2
            self._batch, self._number = 0.0, 0

    @property
    def value(self) -> float:
        return sqrt(self._squares + self._batch**2)


class Reign:
    """Decides which rule reigns, by what each found and what the cache found. LRU does at first."""

    def __init__(self, least_keys: float = LEAST_KEYS) -> None:
        """With fewer keys than `least_keys`, as they count, the rule does not change."""
        self.rule = Rule.LRU
        self.num_changes = 0
        self._least_keys = least_keys
        self._found = dict.fromkeys(Rule, 0.0)
        self._total = self._hinted = 0.0
        self._spread = Spread()  # of what both rules find
        self._num_requests = 0
        self._at = 0.0
        self._num_new = 0  # requests since the last time that counts faded
        self._all = 0.0  # as `_total`, over a longer time
        self._lost = 0.0  # keys that LRU would have found; less than 0 for a gain
        self._spread_of_loss = Spread()
        self._reign_lost = 0.0  # since the last change

    def rate(self, rule: Rule) -> float:
        """The share of the keys that it found of late."""
        return self._found[rule] / self._total if self._total else 0.0

    def judge(
        self,
        number: int,
        found: Sequence[int],
        now: float,
        capacity: int,
        *,
        is_hinted: bool = False,
    ) -> None:
        """A request for `number` keys found so many under LRU, under the learned rule, and in the
        cache."""
        by_lru, by_learned, served = found
        self._num_requests += 1
        keep = self._fade(now)
        self._total = self._total * keep + number
        self._hinted = self._hinted * keep + number * is_hinted
        self._spread.add(by_learned - by_lru, keep)
        for rule, one in ((Rule.LRU, by_lru), (Rule.LEARNED, by_learned)):
            self._found[rule] = self._found[rule] * keep + one
        keep = 1.0 - 1.0 / LONG_REQUESTS
        lost = by_lru - served
        self._all = self._all * keep + number
        self._lost = self._lost * keep + lost
        self._spread_of_loss.add(lost, keep)
        self._reign_lost += lost
        if self.rule is Rule.LRU:
            if (
                self._total >= self._least_keys
                and self._all >= capacity
                and self._is_learned_better()
            ):
                self._change(Rule.LEARNED)
        elif self._is_lru_better() or self._is_too_much_lost(capacity):
            self._change(Rule.LRU)

    def _fade(self, now: float) -> float:
        """How much all counts fade with a request now."""
        self._num_new += 1
        passed = max(0.0, now - self._at)
        self._at = now
        if not passed:
            return 1.0
        number, self._num_new = self._num_new, 0
        at_least = min(passed / MEMORY_S, number / MEMORY_REQUESTS)
        return exp(-max(at_least, number / MOST_REQUESTS))

    def _is_learned_better(self) -> bool:
        lru, learned = self._found[Rule.LRU], self._found[Rule.LEARNED]
        sure = SURE
        if self._hinted < self._total / 2:
            sure += SURE_AT_ONCE * exp(-self._num_requests / EARLY_REQUESTS)
        sure *= 1.0 + max(0.0, self._lost) / (LOST * self._all)
        return learned > HYSTERESIS * lru and learned - lru > sure * self._spread.value

    def _is_lru_better(self) -> bool:
        difference = self._found[Rule.LRU] - self._found[Rule.LEARNED]
        return difference > SURE_OF_LRU * self._spread.value

    def _is_too_much_lost(self, capacity: int) -> bool:
        most = MOST_LOST * self._all + SURE_OF_LOSS * self._spread_of_loss.value
        return self._reign_lost > 0.0 and self._lost > most + OF_PLACES * capacity

    def _change(self, rule: Rule) -> None:
        self.rule = rule
        self.num_changes += 1
        self._reign_lost = 0.0
