"""Why two engines share no block: the fields that differ are named, and no others."""

import pytest

from remote_server.protocol import NamespaceStats, TierShare
from remote_server.protocol.namespace_diff import all_gaps, compare, gaps_of
from remote_server.shm.mapping import Arena
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import MAX_ENGINES_REMEMBERED, NamespaceInfo
from remote_server.store.store import Store
from remote_server.values import MiB

FACTS = {"model": "m", "dtype": "bfloat16", "layout": "x", "hash_algo": "sha256", "hash_seed": "0"}


def stats(fingerprint, blocks=10, client="e1", engines=None, disk_blocks=0):
    return NamespaceStats(
        block_bytes=1,
        tiers={"memory": TierShare(blocks=blocks), "disk": TierShare(blocks=disk_blocks)},
        client=client, fingerprint=fingerprint, engines=engines or {client: {}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ({"dtype": "half"}, {}, "dtype is half here and bfloat16 there"),
        ({"speculative": "eagle"}, {}, "speculative is eagle here and not set there"),
        ({"dtype": "half", "a": "0" * 16}, {"a": "1" * 16},
         "dtype is half here and bfloat16 there, the digest of a differs"),
    ],
)  # fmt: skip
def test_each_field_that_differs_is_told_with_both_values_and_how_much_is_missed(here, there, told):
    """Of two digests only that they differ, and last."""
    known = {"a": stats(FACTS | there, 10, disk_blocks=5), "b": stats(FACTS | here, 0, "e2")}
    (gap,) = gaps_of("b", "e2", FACTS | here, known)
    assert gap.line() == f"e2 cannot use the blocks of a (10 blocks): {told}"


def test_another_hash_seed_in_one_namespace_is_named():
    known = {"a": stats(FACTS, client="e2", engines={"e1": {"hash_seed": "42"}, "e2": {}})}
    (gap,) = gaps_of("a", "e2", FACTS, known)
    assert gap.fields == {"hash_seed": ("0", "42")}
    assert gap.line() == (
        "e2 cannot use the blocks of e1 in the same namespace: hash_seed is 0 here and 42 there"
    )
    assert gaps_of("a", "e1", FACTS | {"hash_seed": "42"}, known)[0].fields == {
        "hash_seed": ("42", "0")
    }


def test_equal_engines_have_no_gap():
    assert gaps_of("a", "e1", FACTS, {"a": stats(FACTS, engines={"e0": {}, "e1": {}})}) == []


def test_a_field_for_people_keeps_no_engines_apart():
    here, there = FACTS | {"model_name": "/a"}, FACTS | {"model_name": "/b"}
    assert compare(here, there) == {}


def test_a_field_that_is_empty_is_one_that_is_not_set():
    """So the server remembers an engine that lacks a field of the one that came after it."""
    assert compare(FACTS, FACTS | {"speculative": ""}) == {}


@pytest.mark.parametrize(
    "other",
    [stats(dict.fromkeys((*FACTS, "x", "y"), "else")), stats(FACTS | {"dtype": "half"}, 0),
     stats({}, 10)],
    ids=["another model altogether", "one that holds nothing", "one found on disk"],
)  # fmt: skip
def test_what_cannot_be_missed_is_no_gap(other):
    assert gaps_of("a", "e1", FACTS, {"a": stats(FACTS, 0), "b": other}) == []


def test_only_the_nearest_of_the_others_is_named():
    known = {
        "mine": stats(FACTS, 0),
        "two": stats(FACTS | {"dtype": "half", "layout": "y"}, 500),
        "one": stats(FACTS | {"layout": "y"}, 1),
        "one, more": stats(FACTS | {"dtype": "half"}, 2),
    }
    assert [gap.other for gap in gaps_of("mine", "e1", FACTS, known)] == ["one, more"]


def test_every_namespace_is_judged():
    known = {"a": stats(FACTS), "b": stats(FACTS | {"dtype": "half"}, client="e2")}
    assert {(gap.namespace, gap.other) for gap in all_gaps(known)} == {("a", "b"), ("b", "a")}


def test_the_store_remembers_the_last_engines_of_a_namespace_and_where_they_differ():
    store = Store(MemoryTier(Arena(MiB)))
    for number in range(MAX_ENGINES_REMEMBERED + 3):
        facts = FACTS | {"hash_seed": str(number)}
        store.namespaces.declare(
            "a", NamespaceInfo(block_bytes=64, client=f"e{number}", fingerprint=facts)
        )
    store.namespaces.declare("a", NamespaceInfo(block_bytes=64, client="e5", fingerprint=FACTS))
    engines = store.namespaces.stats()["a"].engines
    assert len(engines) == MAX_ENGINES_REMEMBERED
    assert list(engines)[-1] == "e5" and engines["e5"] == {}
    assert engines["e7"] == {"hash_seed": "7"}
    assert "e2" not in engines
