"""Beginnings of runs that many clients get are marked, at a cost that does not grow with a get."""

import random
from collections.abc import Sequence

import pytest
from client_helpers import Clock

from remote_server.protocol import UNKNOWN, Stretch
from remote_server.server.transfer.hot_keys import (
    ENOUGH_CLIENTS,
    MOST_KEYS,
    WITHIN_S,
    HotKeys,
    beginnings,
    is_beginning,
)


def rows(first: int, number: int, tokens: int, group: int = 0) -> list[Stretch]:
    """Rows of a prompt, `number` of them from row `first` on."""
    return [Stretch(1, group, row * tokens, tokens) for row in range(first, first + number)]


def right(chain: Sequence[Stretch]) -> list[int]:
    return [at for at, one in enumerate(chain) if is_beginning(one)]


def count(hot: HotKeys, client: bytes, namespace: str, key: bytes) -> bool:
    """Count a get of a key that begins a run."""
    return hot.count(client, namespace, [(3, key)], lambda _: Stretch(1, 0, 0, 16)) == [3]


class Reader:
    """Chain fields of blocks, and how many were read."""

    def __init__(self, chain: Sequence[Stretch]) -> None:
        self._chain = chain
        self.num_reads = 0

    def __call__(self, position: int) -> Stretch:
        self.num_reads += 1
        return self._chain[position]

    def beginnings(self) -> list[int]:
        return beginnings(self, len(self._chain))


@pytest.mark.parametrize("tokens", [1, 7, 16, 48, 256, 1000, 1024, 1500, 4096])
def test_the_beginnings_of_a_prompt_are_those_of_its_runs(tokens: int):
    chance = random.Random(tokens)
    for _ in range(40):
        chain = rows(chance.randrange(0, 300), chance.randrange(1, 400), tokens)
        assert Reader(chain).beginnings() == right(chain)


def test_a_long_get_needs_few_chain_fields():
    reader = Reader(rows(0, 16_384, 16))
    assert len(reader.beginnings()) == 9 and reader.num_reads == 2


def test_two_groups_behind_each_other_and_a_gap_are_found_all_the_same():
    chain = rows(0, 300, 16) + rows(0, 300, 16, group=1)
    assert Reader(chain).beginnings() == right(chain) == [0, 64, 128, 256, 300, 364, 428, 556]
    with_gap = rows(0, 100, 16) + rows(103, 200, 16)
    assert Reader(with_gap).beginnings() == right(with_gap)


def test_no_block_without_chain_fields_is_a_beginning():
    assert Reader([UNKNOWN] * 500).beginnings() == [] == Reader([]).beginnings()
    assert Reader([UNKNOWN, *rows(0, 1, 16)]).beginnings() == [1]


def test_mixed_prompts_cost_a_bounded_number():
    chance = random.Random(3)
    chain = [Stretch(1, 0, 16 * chance.randrange(2000), 16) for _ in range(5000)]
    reader = Reader(chain)
    reader.beginnings()
    assert reader.num_reads < 100


def test_a_key_is_hot_for_the_fifth_connection_within_a_minute():
    clock = Clock()
    hot = HotKeys(clock)
    counted = [count(hot, b"%d" % number, "ns", b"k") for number in range(ENOUGH_CLIENTS)]
    assert counted == [False] * 4 + [True]
    assert not count(hot, b"0", "other", b"k") and not count(hot, b"0", "ns", b"other")
    clock.now += WITHIN_S
    assert not count(hot, b"9", "ns", b"k")


def test_one_connection_makes_no_key_hot():
    hot = HotKeys(Clock())
    assert not any(count(hot, b"%d" % (number % 4), "ns", b"k") for number in range(1000))


def test_a_key_that_goes_on_being_got_stays_hot():
    clock = Clock()
    hot = HotKeys(clock)
    counted = []
    for number in range(100):
        clock.now += 10
        counted.append(count(hot, b"%d" % number, "ns", b"k"))
    assert all(counted[ENOUGH_CLIENTS:])
    clock.now += WITHIN_S - 10
    assert not count(hot, b"x", "ns", b"k")


def test_the_key_that_was_got_longest_ago_is_forgotten_for_another():
    hot = HotKeys(Clock())
    for number in range(ENOUGH_CLIENTS - 1):
        count(hot, b"%d" % number, "ns", b"first")
        count(hot, b"%d" % number, "ns", b"second")
    for number in range(MOST_KEYS - 1):
        count(hot, b"c", "ns", b"%d" % number)
    assert len(hot) == MOST_KEYS
    assert count(hot, b"5", "ns", b"second")
    assert not count(hot, b"5", "ns", b"first")


def test_a_hot_key_that_begins_no_run_is_not_named_and_its_fields_are_read_once():
    hot, reader = HotKeys(Clock()), Reader(rows(1, 1, 16))
    for number in range(20):
        assert hot.count(b"%d" % number, "ns", [(0, b"k")], reader) == []
    assert reader.num_reads == 1
