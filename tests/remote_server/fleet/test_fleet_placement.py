"""Homes of runs: spread evenly, the same for every client, and few of them move with the list."""

from collections import Counter
from random import Random

import pytest

from remote_server.fleet.placement import MOST_REMEMBERED, Homes, Placement, homes

DRAW = Random(5)
ANCHORS = [DRAW.randbytes(32) for _ in range(4000)]
NAMES = [f"kvferry-{number}" for number in range(8)]


def named(names: list[str], anchor: bytes) -> tuple[str, str]:
    first, second = homes(names, "ns", anchor)
    return names[first], names[second]


def test_the_homes_do_not_depend_on_the_order_of_the_list():
    for anchor in ANCHORS[:200]:
        assert named(NAMES, anchor) == named(NAMES[::-1], anchor)


def test_two_homes_are_two_servers_and_one_server_is_both():
    assert all(len({*homes(NAMES, "ns", anchor)}) == 2 for anchor in ANCHORS)
    assert homes(["alone"], "ns", ANCHORS[0]) == Homes(0, 0)


def test_each_server_is_the_first_home_of_its_share_and_the_second_of_another():
    for place in (0, 1):
        shares = Counter(named(NAMES, anchor)[place] for anchor in ANCHORS)
        assert len(shares) == len(NAMES)
        assert all(400 < share < 600 for share in shares.values()), shares


@pytest.mark.parametrize("lost", NAMES)
def test_a_server_that_leaves_moves_its_own_runs_only(lost: str):
    left = [name for name in NAMES if name != lost]
    for anchor in ANCHORS[:500]:
        before, after = named(NAMES, anchor), named(left, anchor)
        kept = [name for name in before if name != lost]
        assert list(after[: len(kept)]) == kept, "the second home becomes the first"


def test_a_server_that_joins_takes_its_share_and_the_old_first_home_is_the_second():
    joined = [*NAMES, "kvferry-8"]
    moved = 0
    for anchor in ANCHORS:
        before, after = named(NAMES, anchor), named(joined, anchor)
        if after[0] != before[0]:
            moved += 1
            assert after == ("kvferry-8", before[0])
    assert 0.08 < moved / len(ANCHORS) < 0.14


def test_namespaces_are_placed_apart():
    apart = sum(homes(NAMES, "one", anchor) != homes(NAMES, "two", anchor) for anchor in ANCHORS)
    assert apart > 0.9 * len(ANCHORS)


def test_name_and_namespace_and_anchor_do_not_run_into_each_other():
    keys = [b"anchor-%d" % number for number in range(64)]
    here = [homes(["a", "b", "ab"], "cd", key) for key in keys]
    there = [homes(["a", "b", "ab"], "c", b"d" + key) for key in keys]
    assert here != there


def test_a_remembered_answer_is_the_computed_one_and_the_memory_is_bounded():
    placement = Placement(NAMES)
    for anchor in ANCHORS * 2:
        assert placement.homes("ns", anchor) == homes(NAMES, "ns", anchor)
    for number in range(MOST_REMEMBERED + 10):
        placement.homes("ns", b"%d" % number)
    assert len(placement._known) <= MOST_REMEMBERED
