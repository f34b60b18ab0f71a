"""Blocks whose place in a prompt is not known, under the policy that learns."""

import tracemalloc

import pytest

from remote_server.protocol import Stretch
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.policy import LearnedPolicy
from remote_server.store.eviction.tree import ALONE
from remote_server.traces.model_cache import NAMESPACE, Place, key_of


class Plain:
    """A policy whose blocks are put without chain fields, at times of a clock that the test
    sets."""

    def __init__(self, number: int) -> None:
        self.now = 1.0
        self.learner = Learner(lambda: self.now)
        self.places = [Place(NAMESPACE, key_of(one)) for one in range(number)]
        index = {place.key: place for place in self.places}
        self.policy = LearnedPolicy(self.learner, lambda _, key: index.get(key))
        self.policy.reserve(self.places)
        for place in self.places:
            self.policy.add(place)
            place.pins = 0

    def leaving(self):
        """The places in the order of their eviction."""
        while (victim := self.policy.victim()) is not None:
            self.policy.remove(victim)
            yield self.places.index(victim)


def test_those_that_a_get_used_leave_last_whatever_their_number():
    plain = Plain(6)
    plain.now = 2.0
    plain.policy.use_all([plain.places[number] for number in (4, 0, 2)])
    assert [*plain.leaving()] == [1, 3, 5, 4, 0, 2]
    plain.policy.check()


def test_pinned_ones_are_passed_over_and_come_back_as_the_newest():
    plain = Plain(4)
    for number in (0, 2):
        plain.places[number].pins = 1
    assert plain.policy.victim() is plain.places[1]
    plain.policy.use_all([plain.places[0]])
    plain.places[0].pins = 0
    plain.policy.unpin(plain.places[0])
    assert [*plain.leaving()] == [1, 3, 0]
    plain.policy.remove(plain.places[2])
    plain.policy.check()
    assert len(plain.policy) == 0


@pytest.mark.parametrize("number", [0, 3])
def test_one_that_a_prompt_continues_stays_as_long_as_what_continues_it(number):
    plain = Plain(4)
    keys = [plain.places[number].key, *(key_of(one) for one in range(100, 103))]
    chain = [Stretch(len(keys), 0, 0, 16)]
    plain.now = 3.0
    plain.learner.looked_up(NAMESPACE, keys, chain, 1)
    behind = [Place(NAMESPACE, key) for key in keys[1:]]
    plain.policy.reserve(behind)
    for place in behind:
        plain.policy.add(place)
        place.pins = 0
    plain.places += behind
    assert plain.places[number].branch is not ALONE
    plain.policy.check()
    left = [*plain.leaving()]
    assert left[-4:] == [6, 5, 4, number]
    assert {*left[:3]} == {0, 1, 2, 3} - {number}


def test_one_takes_at_most_a_hundred_bytes():
    places = [Place(NAMESPACE, key_of(one)) for one in range(20_000)]
    policy = LearnedPolicy(Learner(lambda: 1.0), lambda _, key: None)
    tracemalloc.start()
    try:
        policy.reserve(places)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / len(places) < 100
    assert taken == pytest.approx(policy._tree.num_bytes, rel=0.3)


def looked_up(learner, keys, at_once):
    """Look `keys` up without chain fields, so many at once."""
    for begin in range(0, len(keys), at_once):
        learner.looked_up(NAMESPACE, keys[begin : begin + at_once], [], 0)


def test_of_a_long_lookup_few_keys_are_sampled_and_each_has_the_same_chance():
    learner = Learner(lambda: 1.0)
    learner.num_blocks = 100_000
    keys = [key_of(number) for number in range(64_000)]
    looked_up(learner, keys, 1000)
    shadow = learner.floor.served
    assert len(keys) / len(shadow) == pytest.approx(32, rel=0.1)
    place = {learner._numbers(NAMESPACE, [key])[0]: number for number, key in enumerate(keys)}
    late = sum(place[name] % 1000 >= 750 for name in shadow.names())
    assert late / len(shadow) == pytest.approx(0.25, rel=0.2)


def test_the_same_keys_are_sampled_however_many_a_lookup_names():
    keys = [key_of(number) for number in range(6_000)]
    sampled = []
    for at_once in (10, 50, 100):
        learner = Learner(lambda: 1.0)
        learner.num_blocks = 30_000
        learner.looked_up(
            NAMESPACE, [key_of(number) for number in range(10**6, 10**6 + 200)], [], 0
        )
        looked_up(learner, keys, at_once)
        sampled.append(({*learner.floor.served.names()}, {*learner.hazards._waits}))
    assert sampled[0] == sampled[1] == sampled[2]
    assert all(sampled[0])


@pytest.mark.parametrize("num_blocks", [1_000, 8_000, 64_000])
def test_one_long_lookup_does_not_take_the_samples_from_the_others(num_blocks):
    """What is learned of prompts comes from the same samples."""
    learner, before = Learner(lambda: 1.0), Learner(lambda: 1.0)
    learner.num_blocks = num_blocks
    learner.looked_up(NAMESPACE, [key_of(number) for number in range(32_768)], [], 0)
    assert learner.hazards.mask <= max(num_blocks // 512, before.hazards.mask)
    assert learner.floor.mask <= max(num_blocks // 512, before.floor.mask)
