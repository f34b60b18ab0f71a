"""A store and its follower: evictions, declined puts, clears and pins reach the curve."""

from collections.abc import Iterator

import pytest
from client_helpers import key

from remote_server.protocol import Stretch
from remote_server.shm.mapping import Arena
from remote_server.store.curve.curve import Curve
from remote_server.store.curve.follower import Follower
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end
from remote_server.values import MiB

BLOCK = 4096
NAMESPACE = "ns"


class Scene:
    """A store of 256 blocks, 1 MiB, and a clock."""

    def __init__(self, ttl_s: float = 0.0) -> None:
        self.now = 1000.0
        self.arena = Arena(MiB)
        memory = MemoryTier(self.arena, clock=lambda: self.now)
        self.curve = Curve(lambda: self.now, {"memory": MiB})
        self.follower = Follower(self.curve, lambda: self.now, seed=1)
        self.store = Store(memory, lambda: self.now, ttl_s=ttl_s, follower=self.follower)
        self.store.namespaces.declare(NAMESPACE, NamespaceInfo(block_bytes=BLOCK))

    def put(self, first: int, number: int) -> None:
        keys = [key(at) for at in range(first, first + number)]
        chain = [Stretch(number, 0, 0, 16)]
        offered = Offered(NAMESPACE, keys, [BLOCK] * number, [None] * number, chain)
        begun = self.store.puts.begin(offered, force=False)
        self.store.puts.end(begun, [True] * len(begun.blocks))

    def ask(self, first: int, number: int) -> int:
        self.now += 10.0
        keys = [key(at) for at in range(first, first + number)]
        return self.store.gets.lookup(NAMESPACE, keys, [Stretch(number, 0, 0, 16)]).prefix

    @property
    def missed(self) -> dict[str, float]:
        what_if = self.store.what_if(by_namespace=False)
        assert what_if is not None
        return what_if.total.missed


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.store.tier_stack.check()
    made.arena.close()


def test_what_was_evicted_is_missed_as_evicted(scene):
    scene.put(0, 200)
    assert scene.ask(0, 200) == 200
    scene.put(1000, 200)
    scene.put(2000, 200)
    assert scene.ask(0, 200) == 0
    assert scene.missed == {"evicted_60": pytest.approx(0.5)}


def test_what_was_cleared_is_missed_as_removed(scene):
    scene.put(0, 200)
    scene.store.clear(NAMESPACE)
    scene.ask(0, 200)
    assert scene.missed == {"removed": 1.0}


def test_what_was_too_old_is_missed_as_removed():
    scene = Scene(ttl_s=5.0)
    scene.put(0, 200)
    scene.ask(0, 200)
    assert scene.missed == {"removed": 1.0}
    scene.arena.close()


def test_a_put_without_room_is_missed_as_declined(scene):
    scene.put(0, 256)
    keys = [key(at) for at in range(256)]
    pinned = scene.store.memory.pin_all(NAMESPACE, keys)
    scene.put(1000, 200)
    scene.store.memory.unpin_all([block for block in pinned if block is not None])
    scene.ask(1000, 200)
    assert scene.missed == {"declined": 1.0}


def test_what_another_store_reads_as_news_is_the_same_with_a_follower(scene):
    presence = scene.store.watch()
    scene.put(0, 3)
    news = presence.take()
    assert all(one.has_come for one in news)
    assert [each for one in news for each in one.keys] == [key(2), key(1), key(0)]


def test_pins_of_operators_reach_the_curve_and_end_with_it(scene):
    scene.put(0, 100)
    keys = [key(at) for at in range(100)]
    to_end(scene.store.pin(NAMESPACE, keys))
    assert scene.curve._pinned_bytes == 100 * BLOCK
    to_end(scene.store.unpin(NAMESPACE, keys[:50]))
    assert scene.curve._pinned_bytes == 50 * BLOCK
    scene.store.clear(None)
    assert scene.curve._pinned_bytes == 0


def test_a_clear_of_one_namespace_ends_its_pins_in_the_curve(scene):
    scene.put(0, 100)
    to_end(scene.store.pin(NAMESPACE, None))
    scene.store.clear(NAMESPACE)
    assert scene.curve._pinned_bytes == 0


def test_without_a_follower_there_is_no_curve():
    with_none = Store(MemoryTier(Arena(MiB)))
    assert with_none.what_if(by_namespace=True) is None


def test_a_failure_of_the_models_costs_no_request_and_is_logged_once(scene, caplog):
    scene.curve.request = scene.curve.stored = None  # calling it fails
    scene.put(0, 100)
    assert scene.ask(0, 100) == 100
    scene.put(1000, 200)
    scene.put(2000, 200)
    scene.store.clear(None)
    assert scene.ask(0, 100) == 0
    assert scene.store.what_if(by_namespace=True) is None
    (record,) = caplog.records
    assert record.message == "what other sizes would find is not known until the next start"
