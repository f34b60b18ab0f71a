"""Hot beginnings: found in prompts that share them, forgotten when they are shared no more."""

import numpy as np

from remote_server.store.curve.hot import ENOUGH, EVERY, MOST_KEYS, HotRuns, Names


def names(*numbers: int) -> Names:
    return np.array(numbers, np.uint64)


def prompts(hot: HotRuns, shared: list[int], number: int, first: int = 1_000_000) -> int:
    """So many prompts that begin with `shared`. Returns the hot length of the last."""
    length = 0
    for at in range(number):
        length = hot.length(names(*shared, first + 2 * at, first + 2 * at + 1))
    return length


def test_what_many_prompts_have_in_common_is_hot_to_its_end():
    hot = HotRuns()
    assert prompts(hot, [1, 2, 3], ENOUGH) == 0
    assert prompts(hot, [1, 2, 3], 1, 9) == 3
    assert hot.length(names(1, 2, 7)) == 2
    assert hot.length(names(5, 1, 2, 3)) == 0
    assert hot.num_keys == 3


def test_prompts_that_share_nothing_have_no_hot_part():
    hot = HotRuns()
    assert prompts(hot, [], 3 * EVERY) == 0
    assert hot.num_keys == 0


def test_a_beginning_behind_a_hot_one_is_hot_as_well():
    hot = HotRuns()
    for at in range(4 * ENOUGH):
        hot.length(names(1, 2, 10 + at % 2, 20, 1000 + at))
    assert hot.length(names(1, 2, 10, 20, 5)) == 4
    assert hot.length(names(1, 2, 11, 20, 5)) == 4
    assert hot.length(names(1, 2, 12, 20, 5)) == 2


def test_a_long_beginning_is_several_runs():
    hot, shared = HotRuns(), [*range(1, 2 * MOST_KEYS + 10)]
    prompts(hot, shared, 4 * ENOUGH)
    assert prompts(hot, shared, 1, 5_000_000) == len(shared)


def test_what_is_shared_no_more_is_hot_no_more():
    hot = HotRuns()
    prompts(hot, [1, 2, 3], 2 * ENOUGH)
    prompts(hot, [], 8 * EVERY)
    assert hot.length(names(1, 2, 3)) == 0
    assert hot.num_keys == 0


def test_memory_is_bounded_by_the_requests_of_a_while():
    hot = HotRuns()
    long = np.arange(10_000, dtype=np.uint64)
    for at in range(4 * EVERY):
        hot.length(long + np.uint64(100_000 * (at + 1)))
    assert hot.num_bytes < 4 << 20
