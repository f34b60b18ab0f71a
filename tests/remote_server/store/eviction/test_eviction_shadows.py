"""The shadows of the floor: which keys are in them, by the size of the cache."""

import pytest

from remote_server.protocol import Stretch
from remote_server.store.eviction.floor import MAX_SHADOW
from remote_server.store.eviction.learner import Learner
from remote_server.traces.model_cache import NAMESPACE, key_of

PROMPT = 20


def shadowed_of(num_blocks: int, num_keys: int) -> int:
    """The keys in each shadow after prompts of so many keys in all, for a cache of `num_blocks`."""
    learner = Learner(lambda: 1.0)
    learner.num_blocks = num_blocks
    for begin in range(0, num_keys, PROMPT):
        keys = [key_of(number) for number in range(begin, begin + PROMPT)]
        learner.looked_up(NAMESPACE, keys, [Stretch(PROMPT, 0, 0, 512)], 0)
    (number,) = {len(one) for one in (*learner.floor.shadows.values(), learner.floor.served)}
    return number


@pytest.mark.parametrize("num_blocks", [400, MAX_SHADOW])
def test_every_key_of_a_small_cache_is_in_its_shadows(num_blocks):
    assert shadowed_of(num_blocks, 400) == 400


def test_of_a_larger_cache_so_many_keys_are_in_the_shadows_as_they_have_room_for():
    assert shadowed_of(MAX_SHADOW + 1, 2000) == pytest.approx(1000, rel=0.1)
    assert shadowed_of(5 * MAX_SHADOW, 8000) == pytest.approx(1000, rel=0.15)


def test_a_cache_that_grows_drops_the_keys_that_are_sampled_no_more():
    learner = Learner(lambda: 1.0)
    for num_blocks in (400, 2 * MAX_SHADOW):
        learner.num_blocks = num_blocks
        keys = [key_of(number) for number in range(200)]
        learner.looked_up(f"{num_blocks}", keys, [Stretch(200, 0, 0, 512)], 0)
    for shadow in (*learner.floor.shadows.values(), learner.floor.served):
        assert 0 < len(shadow) < 300
        assert all(learner.floor.sampled(name) for name in shadow.names())
