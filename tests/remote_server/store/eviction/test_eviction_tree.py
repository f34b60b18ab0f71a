"""The tree of prompts against a model of it that knows only sets of paths."""

import random
import tracemalloc

import pytest

from remote_server.store.eviction import tree as eviction_tree
from remote_server.store.eviction.tree import Tree

KINDS = (0, 1, 2)


class Item:
    def __init__(self, path):
        self.path = path
        self.pins = 0
        self.branch = None

    def __repr__(self):
        return f"Item({self.path})"


class Pair:
    """A tree, and the items that it should have by their path."""

    def __init__(self):
        self.tree = Tree()
        self.items: dict[tuple[int, ...], Item] = {}
        self.number = 0

    def put(self, path):
        """A request for `path`: its resident beginning is used, what is missing is added."""
        self.number += 1
        now = float(self.number)
        here = 0
        while here < len(path) and path[: here + 1] in self.items:
            here += 1
        if here:
            self.tree.use(self.items[path[:here]], KINDS, now)
        while here < len(path):
            new = []
            while here < len(path) and path[: here + 1] not in self.items:
                here += 1
                new.append(Item(path[:here]))
            if new:
                before = self.items.get(new[0].path[:-1])
                self.tree.attach(before, new, 0, now, self.number)
                self.items.update((item.path, item) for item in new)
            else:
                here += 1

    def remove(self, item):
        self.tree.remove(item)
        del self.items[item.path]

    def ends(self):
        """The items that no resident one continues."""
        continued = {path[:-1] for path in self.items}
        return {item for path, item in self.items.items() if path not in continued}

    def check(self):
        self.tree.check()
        assert self.tree.num_blocks == len(self.items)
        listed = [item for leaf in self.tree for item in leaf.blocks]
        assert len(listed) == len({*listed})


def random_path(chance):
    return tuple(chance.randrange(3) for _ in range(chance.randint(1, 9)))


@pytest.mark.parametrize("seed", range(2))
def test_only_ends_of_prompts_are_evicted_and_no_prefix_ever_has_a_hole(seed):
    chance, pair = random.Random(seed), Pair()
    for _ in range(400):
        pair.put(random_path(chance))
        while len(pair.items) > 60:
            by_rule = chance.random() < 0.5
            leaf = pair.tree.oldest() if by_rule else chance.choice(pair.tree.leaves)
            assert leaf.blocks[-1] in pair.ends()
            pair.remove(leaf.blocks[-1])
        assert {leaf.blocks[-1] for leaf in pair.tree.leaves} == pair.ends()
        assert all(path[:-1] in pair.items for path in pair.items if len(path) > 1)
        pair.check()


@pytest.mark.parametrize("seed", range(2))
def test_the_oldest_one_is_that_of_lru_by_block(seed):
    chance, pair = random.Random(seed), Pair()
    used: dict[tuple[int, ...], tuple[int, int]] = {}
    for number in range(300):
        path = random_path(chance)
        pair.put(path)
        for end in range(1, len(path) + 1):
            used[path[:end]] = number, -end  # the head of a prompt is the most recently used
        while len(pair.items) > 40:
            item = pair.tree.oldest().blocks[-1]
            assert item.path == min(pair.items, key=lambda one: used[one])
            pair.remove(item)


@pytest.mark.parametrize("seed", range(2))
def test_pinned_ends_are_passed_over_and_come_back(seed):
    chance, pair = random.Random(seed), Pair()
    for _ in range(300):
        pair.put(random_path(chance))
        for item in pair.items.values():
            if item.pins and chance.random() < 0.2:
                item.pins = 0
                if item.branch.aside and item.branch.blocks[-1] is item:
                    pair.tree.refresh(item.branch)
            elif chance.random() < 0.02:
                item.pins = 1
        while len(pair.items) > 50:
            leaf = pair.tree.oldest()
            if leaf is None:
                assert all(item.pins for item in pair.ends())
                break
            assert not leaf.blocks[-1].pins
            pair.remove(leaf.blocks[-1])
        pair.check()


@pytest.mark.parametrize("seed", range(2))
def test_any_block_may_be_removed_and_the_rest_stays(seed):
    chance, pair = random.Random(seed), Pair()
    for _ in range(200):
        pair.put(random_path(chance))
        for item in chance.sample([*pair.items.values()], min(3, len(pair.items))):
            pair.remove(item)
        pair.check()
    while pair.items:
        pair.remove(pair.tree.oldest().blocks[-1])
    pair.check()
    assert [*pair.tree] == []
    assert pair.tree.leaves == []


def test_a_put_in_parts_is_one_segment_and_the_next_request_begins_another():
    tree = Tree()
    first, second, third = ([Item((part, number)) for number in range(4)] for part in range(3))
    tree.attach(None, first, 0, 1.0, 1)
    tree.attach(first[-1], second, 0, 1.5, 1)
    assert len(tree.leaves) == 1
    assert tree.leaves[0].blocks == [*first, *second]
    tree.attach(second[-1], third, 0, 2.0, 2)
    assert tree.leaves[0].blocks == third


def test_a_request_costs_steps_for_its_own_blocks_however_many_there_are():
    tree, chance = Tree(), random.Random(1)
    system = [Item((0, number)) for number in range(30)]
    tree.attach(None, system, 0, 0.0, 0)
    worst = 0
    for number in range(1, 3000):
        items = [Item((number, place)) for place in range(20)]
        before = tree.steps
        tree.use(system[-1], KINDS, float(number))
        tree.attach(system[-1], items, 0, float(number), number)
        if number > 1000:
            for _ in range(20):
                tree.remove(chance.choice(tree.leaves).blocks[-1])
        worst = max(worst, tree.steps - before)
    assert worst < 8 * 20


def test_a_block_in_a_prompt_of_twenty_takes_at_most_thirty_bytes_in_the_tree():
    prompts = [[Item((number, place)) for place in range(20)] for number in range(2000)]
    tree = Tree()
    tracemalloc.start()
    try:
        for number, items in enumerate(prompts):
            tree.attach(None, items, 0, float(number), number)
        # The tree's own, and the times it is given: other threads and coverage allocate too.
        own = [tracemalloc.Filter(True, file) for file in (eviction_tree.__file__, __file__)]
        files = tracemalloc.take_snapshot().filter_traces(own).statistics("filename")
    finally:
        tracemalloc.stop()
    assert sum(file.size for file in files) / tree.num_blocks < 30


def test_a_held_segment_is_no_leaf_and_the_leaves_are_those_of_one_put_however_it_is_cut():
    def leaves_after(parts):
        tree = Tree()
        items = [Item((0, number)) for number in range(9)]
        others = [[Item((prompt, number)) for number in range(2)] for prompt in range(1, 6)]
        tree.attach(None, items[:3], 0, 0.0, 1)
        for number, other in enumerate(others, 2):
            tree.attach(None, other, 0, 0.0, number)
        segment = tree.hold(items[2], 0, 1.0, 9)
        for part in parts:
            assert all(leaf.blocks[-1].path[0] for leaf in tree.leaves)
            tree.remove(tree.leaves[1].blocks[-1])
            tree.extend(segment, items[part.start : part.stop])
        tree.release(segment)
        tree.check()
        return [leaf.blocks[-1].path for leaf in tree.leaves]

    in_parts = leaves_after([range(3, 5), range(5, 9)])
    assert in_parts[-1] == (0, 8)
    assert in_parts == leaves_after([range(3, 9), range(9, 9)])


def test_a_held_segment_that_stays_empty_leaves_nothing_behind():
    tree = Tree()
    items = [Item((0, number)) for number in range(3)]
    tree.attach(None, items, 0, 0.0, 1)
    segment = tree.hold(items[1], 0, 1.0, 2)
    tree.remove(items[2])
    assert not tree.leaves
    assert tree.oldest() is None
    tree.release(segment)
    assert tree.oldest().blocks == items[:2]
    tree.check()


def test_all_gets_of_one_request_are_one_use():
    tree = Tree()
    items = [Item((0, number)) for number in range(4)]
    tree.attach(None, items, 0, 0.0, 1)
    tree.use(items[1], KINDS, 1.0, 2)
    tree.use(items[3], KINDS, 2.0, 2)
    assert items[0].branch.uses == items[3].branch.uses == 2
    assert items[0].branch.used_at == 2.0
    tree.use(items[3], KINDS, 3.0)
    assert items[0].branch.uses == 3
