"""Requests as the eviction that learns sees them: lookups, and the gets that follow."""

import random

import numpy as np
import pytest

from remote_server.protocol import Stretch
from remote_server.store.eviction.hazard import Hazards
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.paths import FEW, Turns
from remote_server.store.eviction.policy import LearnedPolicy
from remote_server.store.eviction.tree import Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims
from remote_server.traces.model_cache import NAMESPACE, OneLevel, Place, key_of

KEYS = [key_of(number) for number in range(12)]


def chain(keys):
    return [Stretch(len(keys), 0, 0, 16)]


@pytest.mark.parametrize("first", [KEYS[8:], KEYS[2:], KEYS])
@pytest.mark.parametrize("second", [KEYS[8:], KEYS[2:], KEYS])
def test_lookups_with_the_same_end_are_one_request_whatever_part_of_it_each_names(first, second):
    here = {key: Place(NAMESPACE, key) for key in KEYS}
    now = [1.0]
    learner = Learner(lambda: now[0])
    policy = LearnedPolicy(learner, lambda _, key: here.get(key))
    learner.arriving(NAMESPACE, KEYS, chain(KEYS))
    policy.reserve([*here.values()])
    for place in here.values():
        policy.add(place)
    now[0] = 10.0
    learner.looked_up(NAMESPACE, first, chain(first), 1)
    learner.looked_up(NAMESPACE, second, chain(second), len(second))
    policy.use_all([here[key] for key in reversed(second)])
    segment = here[KEYS[-1]].branch
    assert isinstance(segment, Segment)
    assert segment.uses == 2, "the put and both lookups"
    policy.check()


@pytest.mark.parametrize("second", [KEYS, KEYS[4:]], ids=["all", "its rest"])
def test_a_served_prompt_that_is_looked_up_again_at_once_is_another_request(second):
    """A lookup of the rest of it, whose first part is above, is the same one."""
    level = OneLevel(100, "learned")
    level.request(1.0, KEYS)
    level.learner.looked_up(NAMESPACE, second, chain(second), len(second))
    path = level.learner.paths.of(NAMESPACE, KEYS[-1])
    assert path is not None
    assert path.number == (2 if second == KEYS else 1)


def test_victims_that_were_chosen_long_ago_decline_no_put():
    """They rank lower meanwhile."""
    hazards, tree = Hazards(), Tree()
    victims = Victims(tree, hazards, 1)
    old = [Place(NAMESPACE, key, pins=0) for key in KEYS]
    for number, place in enumerate(old):
        tree.attach(None, [place], 0, 0.0, number)
    own = hazards.ranks[0][0]
    assert victims.by_rank(0.0, own) == (None, True)
    segment, declined = victims.by_rank(1000.0, own)
    assert segment is not None
    assert not declined
    assert victims.by_rank(0.0, None)[0] is segment
    assert victims.by_rank(2000.0, hazards.ranks[0][23]) == (segment, False), "ranked anew"


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("arrives", [True, False], ids=["for one put", "for several"])
def test_a_prompt_that_has_lost_its_end_loses_no_pinned_block(rule, arrives):
    now = [1.0]
    here: dict[bytes, Place] = {}
    learner = Learner(lambda: now[0], rule)
    policy = LearnedPolicy(learner, lambda _, key: here.get(key))
    for keys in (KEYS[:3], KEYS[3:6]):
        here.update({key: Place(NAMESPACE, key, pins=0) for key in keys})
        learner.arriving(NAMESPACE, keys, chain(keys))
        policy.reserve([here[key] for key in keys])
        for key in keys:
            policy.add(here[key])
        now[0] += 10.0
    if arrives:
        learner.arriving(NAMESPACE, KEYS[6:9], chain(KEYS[6:9]))
        policy.arrive(NAMESPACE, KEYS[6], may_refuse=False)
    victims = []
    for _ in range(4):
        victim = policy.victim()
        victims.append(KEYS.index(victim.key))
        policy.remove(here.pop(victim.key))
        here[KEYS[1]].pins = 1
    assert victims == [2, 5, 4, 3]
    assert policy.victim() is None


@pytest.mark.parametrize("rule", Rule)
def test_a_touch_of_a_prompt_is_one_use_in_the_shadows_and_cuts_no_segment(rule):
    """However many of its keys are sampled."""
    keys = [key_of(number) for number in range(60)]
    learner = Learner(lambda: 1.0)
    learner.num_blocks = 1000
    learner.looked_up(NAMESPACE, keys, chain(keys), 0)
    shadow = learner.floor.shadows[rule]
    assert len(shadow) > 10
    before = shadow.num_bytes
    learner.touched(NAMESPACE, keys[::-1])
    assert shadow.num_bytes == before
    assert {item.branch.uses for item in shadow._items.values()} == {2}


def test_the_turn_of_a_long_prompt_is_that_of_a_short_one():
    """Hashes of many keys are an array."""
    chance = random.Random(1)
    short, long = Turns(), Turns()
    hashes = [chance.getrandbits(64) for _ in range(3 * FEW)]
    ends = [*(chance.randrange(1, len(hashes)) for _ in range(40)), len(hashes)]
    for end in [*ends, *ends]:
        of_few = short.turn_of(hashes[:end])
        assert long.turn_of(np.array(hashes[:end], np.uint64)) == of_few
        assert long.continued == short.continued
    assert long.turn_of(np.array([], np.uint64)) == 0
