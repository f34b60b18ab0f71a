"""Which namespace leaves for a new one, and what is forgotten of those that stay."""

import pytest

from remote_server.shm.mapping import Arena
from remote_server.store import namespaces
from remote_server.store.memory.slabs import slot_bytes_for
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end
from remote_server.values import MiB


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch):
    """With room for four namespaces."""
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 4)
    arena = Arena(1 * MiB)
    store = Store(MemoryTier(arena))
    yield store
    store.tier_stack.check()
    arena.close()


def declare(store: Store, *names: str, by: bytes = b"", block_bytes: int = 64) -> None:
    for name in names:
        store.namespaces.declare(name, NamespaceInfo(block_bytes=block_bytes, connection=by))


def fill(store: Store, *names: str) -> None:
    for name in names:
        reserved = store.puts.begin(Offered(name, [b"key"], [8], [None]), force=False)
        store.puts.end(reserved, [True])


def test_the_longest_unused_leaves_with_its_blocks(store: Store):
    declare(store, "a", "b", "c", "d")
    fill(store, "a", "b", "c", "d")
    store.namespaces.use("a")
    declare(store, "e")
    assert [*store.namespaces.known] == ["a", "c", "d", "e"]
    assert store.memory.num_blocks("b") == 0
    assert store.tier_stats()["memory"].blocks == 3
    assert store.all_counters()["namespaces_evicted_idle"] == 1
    assert store.all_counters()["removed"] == 1


def test_one_without_blocks_leaves_before_one_with_blocks(store: Store):
    declare(store, "a", "b", "c", "d")
    fill(store, "a", "b", "d")
    declare(store, "e")
    assert [*store.namespaces.known] == ["a", "b", "d", "e"]
    assert store.all_counters()["namespaces_evicted_empty"] == 1


def test_a_connection_that_declares_without_end_loses_its_own(store: Store):
    declare(store, "quiet", by=b"engine")
    for number in range(10):
        declare(store, f"n{number}", by=b"greedy")
        fill(store, f"n{number}")
    declare(store, "another", by=b"another engine")
    assert [*store.namespaces.known] == ["quiet", "n8", "n9", "another"]


@pytest.mark.parametrize("use", ["kept", "pinned", "being written"])
def test_what_is_kept_or_in_transfer_leaves_last(store: Store, use: str):
    declare(store, "a", "b", "c", "d")
    fill(store, "a", "b", "c", "d")
    pinned = []
    if use == "kept":
        to_end(store.pin("a", None))
    elif use == "pinned":
        pinned = to_end(store.gets.get("a", [b"key"])).blocks
    else:
        reserved = store.puts.begin(Offered("a", [b"2"], [8], [None]), force=False)
    declare(store, "e")
    assert [*store.namespaces.known] == ["a", "c", "d", "e"]
    store.memory.unpin_all(pinned)
    if use == "being written":
        store.puts.end(reserved, [True])
    assert store.memory.num_blocks("a") > 0


def test_when_all_have_something_kept_the_longest_unused_of_them_leaves(store: Store):
    declare(store, "a", "b", "c", "d")
    fill(store, "a", "b", "c", "d")
    for name in "abcd":
        to_end(store.pin(name, None))
    declare(store, "e")
    assert [*store.namespaces.known] == ["b", "c", "d", "e"]
    assert store.all_counters()["namespaces_evicted_held"] == 1
    assert store.tier_stats()["memory"].kept == 3


def test_a_name_that_nobody_declared_is_not_remembered_as_used(store: Store):
    declare(store, "a")
    for number in range(100):
        store.namespaces.use(f"unknown {number}")
    store.clear("a", forget=True)
    store.namespaces.use("a")
    assert not store.namespaces._used


def test_the_oldest_texts_are_forgotten_and_known_again_with_the_next_hello(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    texts = {"field": "x" * 1_000}
    info = NamespaceInfo(block_bytes=64, client="engine", fingerprint=texts)
    monkeypatch.setattr(namespaces, "MAX_TEXT_BYTES", 2 * info.after(None).text_bytes)
    for name in ("a", "b", "a", "c"):
        store.namespaces.declare(name, info)
    stats = store.namespaces.stats()
    assert {name: (one.client, one.forgotten) for name, one in stats.items()} == {
        "a": ("engine", False), "b": ("", True), "c": ("engine", False),
    }  # fmt: skip
    assert stats["b"].fingerprint == stats["b"].engines == {}
    assert store.all_counters()["fingerprints_forgotten"] == 1
    store.namespaces.declare("b", info)
    stats = store.namespaces.stats()
    assert (stats["b"].fingerprint, stats["b"].forgotten) == (texts, False)
    assert stats["a"].forgotten


def test_the_sum_of_texts_is_that_of_the_namespaces_that_are_known(store: Store):
    for number in range(20):
        texts = {"field": "ä" * number, "other": "x" * 17}
        info = NamespaceInfo(block_bytes=64, client=f"c{number % 3}", fingerprint=texts)
        store.namespaces.declare(f"n{number % 6}", info)
    store.clear("n0", forget=True)
    assert store.namespaces.text_bytes == sum(
        one.text_bytes for one in store.namespaces.known.values()
    )
    for name in [*store.namespaces.known]:
        store.clear(name, forget=True)
    assert store.namespaces.text_bytes == 0


def test_statistics_have_texts_for_those_who_ask_alone(store: Store):
    info = NamespaceInfo(block_bytes=64, client="engine", fingerprint={"a": "b"})
    store.namespaces.declare("a", info)
    assert store.namespaces.stats()["a"].fingerprint == {"a": "b"}
    short = store.namespaces.stats(texts=False)["a"]
    assert (short.client, short.fingerprint, short.engines) == ("engine", {}, {})
    assert not short.forgotten


def test_block_sizes_that_came_and_went_leave_nothing_behind(store: Store):
    for number in range(1, 200):
        declare(store, "a", block_bytes=64 * number)
        fill(store, "a")
        store.tier_stack.check()
        store.clear("a")
    assert not store.memory.slabs.classes  # type: ignore[attr-defined]
    declare(store, "b", block_bytes=64)
    fill(store, "b")
    assert [*store.memory.slabs.classes] == [slot_bytes_for(64)]  # type: ignore[attr-defined]
