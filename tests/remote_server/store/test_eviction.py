from dataclasses import dataclass

import pytest

from remote_server.store.policies import LRU


@dataclass(eq=False)
class Item:
    pins: int = 0


@pytest.fixture
def items():
    return [Item() for _ in range(4)]


@pytest.fixture
def lru(items):
    lru: LRU[Item] = LRU()
    for item in items:
        lru.add(item)
    return lru


def leaving_order(lru):
    order = []
    while (victim := lru.victim()) is not None:
        lru.remove(victim)
        order.append(victim)
    return order


def test_the_one_used_longest_ago_leaves_first(lru, items):
    lru.use(items[0])
    assert leaving_order(lru) == [items[1], items[2], items[3], items[0]]


def test_a_pinned_one_is_never_the_victim(lru, items):
    items[0].pins = items[2].pins = 1
    assert leaving_order(lru) == [items[1], items[3]]
    assert items[0] in lru
    assert items[2] in lru
    assert len(lru) == 2


def test_an_unpinned_one_can_leave_again(lru, items):
    items[0].pins = 1
    assert lru.victim() is items[1]
    items[0].pins = 0
    lru.unpin(items[0])
    assert leaving_order(lru) == [items[1], items[2], items[3], items[0]]
