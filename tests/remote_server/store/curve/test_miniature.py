"""Miniatures and their sums: hot keys apart, the rule that would reign, and the anchor."""

import numpy as np
import pytest

from remote_server.store.curve.miniature import ALL_NAMES, Finds, Miniature
from remote_server.store.curve.sums import Sums, anchored
from remote_server.store.eviction.hazard import Hazards
from remote_server.store.eviction.learner import BY_USES
from remote_server.store.eviction.victims import Rule

SHARES = np.array([0.1, 0.2, 0.4, 0.6, 0.9])
NOW = 2


def test_hot_keys_and_those_behind_them_are_counted_apart() -> None:
    one = Miniature(8.0, Hazards(), 1, ALL_NAMES)
    one.request([1, 2, 3, 4], 2, BY_USES, 1, 0.0, 8)
    found = one.request([1, 2, 3, 5], 2, BY_USES, 2, 1.0, 8)
    assert (found.hot, found.hot_by_lru, found.hot_by_rule) == (2, 2, 2)
    assert (found.keys, found.by_lru, found.by_rule) == (2, 1, 1)
    assert (found.uses, found.uses_by_lru) == (3, 2)


def test_until_the_learned_rule_is_better_a_miniature_finds_what_lru_does() -> None:
    """A loop a little larger than the cache: LRU finds nothing, the learned rule a third."""
    one = Miniature(100.0, Hazards(), 1, ALL_NAMES)
    gains = []
    for number in range(4_000):
        prompt = 5 * (number % 22)
        found = one.request(
            [*range(prompt, prompt + 5)], 0, BY_USES, number + 1, float(number), 100
        )
        gains.append(found.by_rule - found.by_lru)
    assert not any(gains[:40])
    assert sum(gains[-1000:]) > 1000


def test_a_rule_that_loses_hot_keys_gains_less() -> None:
    sums = Sums(1, asked=1000.0, hot=400.0)
    finds = Finds(150, 150, 30, 30, 60, 60, hot=100, hot_by_lru=100, hot_by_rule=100)
    sums.miniatures = np.array([finds], float)
    (kept,) = sums.gain()
    sums.miniatures = np.array([finds._replace(hot_by_rule=90)], float)
    (lost,) = sums.gain()
    assert kept - lost == pytest.approx(0.1 * 400 / 1000)
    sums.miniatures = np.array([finds._replace(hot_by_rule=0)], float)
    assert sums.gain()[0] == 0.0, "LRU would reign"


def test_what_is_found_beyond_the_estimate_leaves_larger_sizes_less_to_miss() -> None:
    moved, _ = anchored(SHARES, np.zeros(5), NOW, 0.52)
    assert moved[NOW] == pytest.approx(0.52)
    assert 1 - moved[NOW + 1 :] == pytest.approx(0.8 * (1 - SHARES[NOW + 1 :]))
    assert moved[:NOW] == pytest.approx(SHARES[:NOW] + 0.12)


@pytest.mark.parametrize("really", [0.0, 0.05, 0.4, 0.7, 1.0])
def test_anchored_shares_are_shares_that_never_fall(really: float) -> None:
    for lru in (SHARES, np.zeros(5), np.ones(5)):
        moved, _ = anchored(lru, np.full(5, 0.1), NOW, really)
        assert moved[NOW] == pytest.approx(really)
        assert (moved >= 0.0).all() and (moved <= 1.0).all() and (np.diff(moved) >= 0.0).all()


def test_what_a_put_brings_takes_room_and_judges_no_rule() -> None:
    one = Miniature(100.0, Hazards(), 1, ALL_NAMES)
    one.request([1, 2], 0, BY_USES, 1, 1.0, 4)
    rates = [one._reign.rate(rule) for rule in Rule]
    judged = one._reign._num_requests
    one.store([3, 4, 5], BY_USES, 2, 2.0, 4)
    assert one._reign._num_requests == judged
    assert [one._reign.rate(rule) for rule in Rule] == rates
    assert one.request([3, 4, 5], 0, BY_USES, 3, 3.0, 4).by_lru == 3
    assert one.request([1, 2], 0, BY_USES, 4, 4.0, 4).by_lru == 1, (
        "the last of a prompt leaves first"
    )


def test_what_a_put_brings_again_is_no_use_of_it() -> None:
    one = Miniature(100.0, Hazards(), 1, ALL_NAMES)
    one.request([1, 2], 0, BY_USES, 1, 1.0, 4)
    one.request([1, 2], 0, BY_USES, 2, 2.0, 4)
    one.store([1, 2], BY_USES, 3, 3.0, 4)
    assert one.request([1, 2], 0, BY_USES, 4, 4.0, 4).uses_by_lru == 6
