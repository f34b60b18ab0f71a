"""A store and its follower: evictions, declined puts, clears and pins reach the curve."""

from collections.abc import Iterator

import pytest
from client_helpers import key

from remote_server.protocol import Stretch
from remote_server.shm.mapping import Arena
from remote_server.store.curve.curve import Curve, Learned, Prompt
from remote_server.store.curve.follower import MOST_ARRIVED, Follower
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


def arrive(scene: Scene, first: int, number: int) -> None:
    keys = [key(at) for at in range(first, first + number)]
    scene.follower.arriving(NAMESPACE, keys, [Stretch(number, 0, 16 * first, 16)], BLOCK)


def test_keys_of_puts_wait_until_they_are_many(scene):
    arrive(scene, 0, MOST_ARRIVED - 1)
    assert not scene.follower.is_behind
    arrive(scene, 1000, 1)
    assert scene.follower.is_behind
    scene.follower.catch_up()
    assert not scene.follower.is_behind
    assert scene.curve.report().seen_bytes > 0


@pytest.mark.parametrize(
    "event",
    [
        lambda scene: scene.ask(0, 100),
        lambda scene: scene.follower.touched(NAMESPACE, [key(0)]),
        lambda scene: scene.follower.pinned(NAMESPACE, {key(0): BLOCK}),
        lambda scene: scene.follower.unpinned(NAMESPACE, [key(0)]),
        lambda scene: scene.follower.cleared("another"),
        lambda scene: scene.follower.what_if(by_namespace=False),
    ],
)
def test_an_event_that_depends_on_keys_of_puts_comes_after_them(scene, event):
    shown = recorded_prompts(scene)
    arrive(scene, 0, 100)
    assert not shown
    event(scene)
    assert [len(prompt.keys) for prompt in shown] == [100]


def test_what_is_cleared_after_its_put_does_not_come_back(scene):
    arrive(scene, 0, 100)
    scene.follower.cleared(NAMESPACE)
    scene.follower.catch_up()
    assert scene.curve.report().seen_bytes == 0


def test_messages_of_one_put_are_one_prompt_and_those_of_others_are_not(scene):
    shown = recorded_prompts(scene)
    arrive(scene, 0, 16)
    arrive(scene, 16, 16)
    arrive(scene, 64, 16)  # its start is not the end of those before
    scene.follower.arriving("another", [key(80)], [Stretch(1, 0, 16 * 80, 16)], BLOCK)
    scene.follower.arriving("another", [key(81)], [], BLOCK)
    scene.follower.arriving("another", [key(82)], [], BLOCK)
    scene.follower.catch_up()
    assert [len(prompt.keys) for prompt in shown] == [32, 16, 1, 1, 1]
    assert shown[0].keys == [key(at) for at in range(32)]


def recorded_prompts(scene: Scene) -> list[Prompt]:
    """Those that puts bring to the curve from now on."""
    shown: list[Prompt] = []
    stored = scene.curve.stored

    def record(prompt: Prompt, learned: Learned | None, now: float) -> None:
        shown.append(prompt)
        stored(prompt, learned, now)

    scene.curve.stored = record
    return shown
