"""The LRU stack: zones of names, by the bytes that were used since."""

import random

import pytest

from remote_server.store.curve.stack import OUTSIDE, SPARE, Stack

ENDS = (100.0, 200.0, 400.0)


def use(stack: Stack, *names: int, num_bytes: float = 10.0, group: int = 0) -> None:
    for name in names:
        stack.use([name], num_bytes, group, 0.0)


def zones(stack: Stack, names: range) -> list[int]:
    return [stack.find(name)[0] for name in names]


def test_a_name_is_in_the_zone_of_what_was_used_since():
    stack = Stack(ENDS)
    use(stack, *range(50))
    assert zones(stack, range(50)) == [3] * 10 + [2] * 20 + [1] * 10 + [0] * 10
    assert stack.filled_bytes == 400.0


def test_zones_are_those_of_caches_of_each_size_under_lru():
    chance, stack = random.Random(1), Stack(ENDS)
    order: list[int] = []  # the oldest first
    for _ in range(5000):
        name = min(int(chance.expovariate(1 / 20)), 80)
        at = len(order) - 1 - order.index(name) if name in order else 1000
        expected = next((zone for zone, end in enumerate(ENDS) if 10 * (at + 1) <= end), 3)
        assert stack.find(name)[0] == expected
        use(stack, name)
        order = [*(one for one in order if one != name), name]
    stack.check()


def test_the_first_of_a_prompt_is_the_last_to_leave():
    stack = Stack(ENDS)
    stack.use([*range(20)], 10.0, 0, 0.0)
    assert stack.find(0)[0] == 0 and stack.find(19)[0] == 1
    assert zones(stack, range(20)) == sorted(zones(stack, range(20)))


def test_uses_are_counted_until_a_name_is_forgotten():
    stack = Stack(ENDS)
    use(stack, 1, 1, 1)
    assert stack.find(1) == (0, 3)
    assert stack.find(2) == (3, 0)


def test_bytes_kept_free_are_missing_at_every_size():
    stack = Stack(ENDS)
    use(stack, *range(40))
    stack.keep_free(60.0)
    assert zones(stack, range(40)) == [3] * 6 + [2] * 20 + [1] * 10 + [0] * 4
    stack.keep_free(1000.0)
    assert len(stack) == 0
    stack.check()


def test_a_touch_is_a_use_that_is_not_counted():
    stack = Stack(ENDS)
    use(stack, *range(40))
    stack.touch([0, 1, 999])
    assert stack.find(0) == (0, 1) and stack.find(1) == (0, 1) and stack.find(999) == (3, 0)
    stack.check()


def test_thinner_samples_stand_for_twice_as_much():
    stack = Stack(ENDS)
    use(stack, *range(20))
    stack.thin(10)
    assert len(stack) == 10 and stack.filled_bytes == 200.0
    assert [name for name in range(20) if name in stack] == [*range(10)]
    stack.check()


def test_names_of_one_group_can_be_dropped():
    stack = Stack(ENDS)
    use(stack, *range(5), group=1)
    use(stack, *range(5, 12), group=2)
    assert sorted(stack.names(1)) == [*range(5)]
    stack.drop(stack.names(1))
    assert sorted(stack.names()) == [*range(5, 12)]
    stack.check()


@pytest.mark.parametrize("names", [range(10), range(1_000_000)])
def test_what_is_outside_takes_no_more_memory_than_what_is_in_it(names: range):
    """Neither new names nor the same ones again and again fill it."""
    chance, stack = random.Random(1), Stack(ENDS)
    for _ in range(5 * SPARE):
        use(stack, chance.choice(names))
    assert stack.num_bytes < 400 * ((1 + OUTSIDE) * 40 + SPARE + 2)
    assert len(stack) <= 40
    stack.check()


def test_a_name_that_stays_came_when_it_came_first():
    stack = Stack(ENDS)
    for now in (1.0, 5.0):
        stack.use([1, 2], 10.0, 0, now)
    stack.use([3], 10.0, 0, 5.0)
    assert stack.older([1, 2, 3, 4], 2.0) == [1, 2]
    use(stack, *range(10, 60))
    stack.use([1], 10.0, 0, 9.0)
    assert stack.older([1], 9.0) == [], "it was outside"
