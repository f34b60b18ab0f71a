"""What every tier must do, whatever it keeps its blocks in."""

from random import Random

import pytest
from bucket_helpers import RealBucket, folder_url
from dict_tier import DictTier
from disk_helpers import RealDisk, Waiting, budget_for
from news_reader import told_by
from one_by_one import OneByOne

from remote_server import protocol
from remote_server.protocol import UNKNOWN, KeyState, Stretch
from remote_server.shm.mapping import Arena
from remote_server.store.eviction.learner import Learner
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.presence import Presence
from remote_server.store.tier import Offered

BLOCK_BYTES = 1024
CAPACITY = 64  # blocks of BLOCK_BYTES that each tier below has room for


def memory_tier(_, learner=None):
    arena = Arena(CAPACITY * BLOCK_BYTES)
    yield OneByOne(MemoryTier(arena, slab_bytes=4096, learner=learner))
    arena.close()


def disk_tier(folder, learner=None):
    budget, segment_bytes = budget_for(CAPACITY // 4, 4, BLOCK_BYTES)
    with RealDisk(folder, budget, segment_bytes, learner=learner) as disk:
        yield Waiting(disk.tier, disk.drain)


def learning(make):
    """Without a lookup the prompts of its blocks are not known: it behaves like LRU."""
    return lambda folder: make(folder, learner=Learner(lambda: 0.0))


def dict_tier(_):
    tier = DictTier(CAPACITY)
    yield Waiting(tier, tier.finish_jobs)


def bucket_tier(folder):
    with RealBucket(folder_url(folder)) as bucket:
        yield Waiting(bucket.tier, bucket.drain)


BOUNDED = {
    "memory": memory_tier, "disk": disk_tier, "dict": dict_tier,
    "memory that learns": learning(memory_tier), "disk that learns": learning(disk_tier),
}  # fmt: skip


TIERS = BOUNDED | {"bucket": bucket_tier}


@pytest.fixture(params=TIERS.values(), ids=[*TIERS])
def tier(request, tmp_path):
    yield from tier_of(request.param, tmp_path)


@pytest.fixture(params=BOUNDED.values(), ids=[*BOUNDED])
def bounded(request, tmp_path):
    """A tier with a hard budget, whose blocks are its own: no other server removes them."""
    yield from tier_of(request.param, tmp_path)


def tier_of(make, folder):
    generator = make(folder)
    tier = next(generator)
    yield tier
    tier.check()
    next(generator, None)


def begin(tier, key: bytes, data: bytes, namespace="ns"):
    checksum = protocol.checksum(namespace, key, data)
    block = tier.begin_put(namespace, key, BLOCK_BYTES, len(data), checksum)
    if block is not None:
        tier.view(block)[:] = data
    return block


def put(tier, key: bytes, data: bytes, namespace="ns"):
    block = begin(tier, key, data, namespace)
    assert block is not None
    assert tier.complete_put(block)
    return block


def read(tier, key: bytes, namespace="ns") -> bytes | None:
    block = tier.pin(namespace, key)
    if block is None:
        return None
    return bytes_of(tier, block)


def bytes_of(tier, block) -> bytes:
    """Of a pinned block. It is not pinned any more."""
    if isinstance(tier, Waiting):
        return tier.bytes_of(block)
    data = bytes(tier.view(block))
    tier.unpin(block)
    return data


def fill(tier, first=0, count=CAPACITY):
    for number in range(first, first + count):
        put(tier, b"filler-%d" % number, b"f" * BLOCK_BYTES)


def test_a_completed_block_reads_back_with_its_own_length(tier):
    put(tier, b"k", b"seven b")
    assert tier.lookup("ns", b"k") is KeyState.READABLE
    assert read(tier, b"k") == b"seven b"


def test_a_block_being_written_is_pending_and_unreadable(tier):
    block = begin(tier, b"k", b"new")
    assert tier.lookup("ns", b"k") is KeyState.PENDING
    assert tier.pin("ns", b"k") is None
    assert not tier.touch("ns", b"k")
    assert tier.stats().pending == 1
    assert tier.stats().blocks == 0
    tier.complete_put(block)
    assert tier.lookup("ns", b"k") is KeyState.READABLE


def test_a_failed_write_leaves_nothing_behind(tier):
    tier.fail_put(begin(tier, b"k", b"new"))
    assert tier.lookup("ns", b"k") is KeyState.ABSENT
    assert tier.stats().used_bytes == 0


def test_while_a_block_is_replaced_the_old_one_is_served(tier):
    put(tier, b"k", b"old")
    tier.fail_put(begin(tier, b"k", b"new"))
    block = begin(tier, b"k", b"new")
    assert tier.lookup("ns", b"k") is KeyState.READABLE
    assert read(tier, b"k") == b"old"
    tier.complete_put(block)
    assert read(tier, b"k") == b"new"
    assert tier.stats().blocks == 1


def test_a_pinned_block_keeps_its_bytes_when_it_is_replaced(bounded):
    put(bounded, b"k", b"old")
    pinned = bounded.pin("ns", b"k")
    put(bounded, b"k", b"new")
    fill(bounded, count=2 * CAPACITY)
    assert bytes_of(bounded, pinned) == b"old"


def test_two_replacements_at_once_end_with_the_last_completed(tier):
    first, second = begin(tier, b"k", b"first"), begin(tier, b"k", b"second")
    tier.complete_put(first)
    assert read(tier, b"k") == b"first"
    tier.complete_put(second)
    assert read(tier, b"k") == b"second"
    assert tier.stats().pending == 0


def test_a_pinned_block_outlives_eviction(bounded):
    put(bounded, b"k", b"kept")
    pinned = bounded.pin("ns", b"k")
    fill(bounded, count=3 * CAPACITY)
    assert read(bounded, b"k") == b"kept"
    bounded.unpin(pinned)
    fill(bounded, first=3 * CAPACITY, count=2 * CAPACITY)
    assert bounded.lookup("ns", b"k") is KeyState.ABSENT


def test_the_budget_is_hard(bounded):
    fill(bounded, count=3 * CAPACITY)
    stats = bounded.stats()
    assert stats.used_bytes <= stats.budget_bytes
    assert stats.blocks == CAPACITY
    assert bounded.counters()["evicted"] == 2 * CAPACITY


def test_there_is_no_room_when_everything_is_pinned_and_room_again_after(bounded):
    fill(bounded)
    pinned = [bounded.pin("ns", b"filler-%d" % number) for number in range(CAPACITY)]
    assert begin(bounded, b"k", b"no room") is None
    assert bounded.lookup("ns", b"k") is KeyState.ABSENT
    bounded.unpin(pinned.pop())
    put(bounded, b"k", b"room")
    assert read(bounded, b"k") == b"room"
    for block in pinned:
        bounded.unpin(block)


def test_there_is_no_room_when_everything_is_being_written(bounded):
    blocks = [begin(bounded, b"%d" % number, b"x") for number in range(CAPACITY)]
    assert begin(bounded, b"k", b"no room") is None
    for block in blocks:
        bounded.complete_put(block)
    assert bounded.stats().blocks == CAPACITY


@pytest.mark.parametrize("use", ["pin", "touch"])
def test_a_used_block_leaves_after_the_unused(bounded, use):
    fill(bounded)
    if use == "pin":
        read(bounded, b"filler-0")
    else:
        assert bounded.touch("ns", b"filler-0")
    fill(bounded, first=CAPACITY, count=1)
    assert bounded.lookup("ns", b"filler-0") is KeyState.READABLE
    assert bounded.lookup("ns", b"filler-1") is KeyState.ABSENT


def test_a_lookup_is_not_a_use(bounded):
    fill(bounded)
    bounded.lookup("ns", b"filler-0")
    fill(bounded, first=CAPACITY, count=1)
    assert bounded.lookup("ns", b"filler-0") is KeyState.ABSENT


def test_namespaces_do_not_see_each_other(tier):
    put(tier, b"k", b"mine", "mine")
    assert tier.lookup("yours", b"k") is KeyState.ABSENT
    assert tier.pin("yours", b"k") is None
    assert not tier.touch("yours", b"k")
    put(tier, b"k", b"yours", "yours")
    assert read(tier, b"k", "mine") == b"mine"


def test_clearing_a_namespace_leaves_the_others(tier):
    put(tier, b"a", b"1", "mine")
    put(tier, b"b", b"2", "mine")
    put(tier, b"a", b"3", "yours")
    assert tier.num_blocks("mine") == 2
    assert tier.stats().used_bytes > tier.used_bytes("mine") >= 2
    assert tier.clear("mine") == 2
    assert (tier.num_blocks("mine"), tier.used_bytes("mine")) == (0, 0)
    assert tier.lookup("mine", b"a") is KeyState.ABSENT
    assert read(tier, b"a", "yours") == b"3"
    assert tier.clear("unknown") == 0
    assert tier.clear(None) == 1
    assert tier.stats().used_bytes == 0


def test_a_failed_write_that_was_cleared_frees_its_place_once(tier):
    block = begin(tier, b"k", b"late")
    tier.clear("ns")
    tier.fail_put(block)
    assert tier.stats().used_bytes == 0


def test_a_pinned_block_keeps_its_bytes_when_it_is_cleared(bounded):
    put(bounded, b"k", b"held")
    pinned = bounded.pin("ns", b"k")
    bounded.clear(None)
    assert bounded.lookup("ns", b"k") is KeyState.ABSENT
    fill(bounded, count=CAPACITY - 1)
    assert bytes_of(bounded, pinned) == b"held"


def test_removing_takes_exactly_the_block_that_was_meant(tier):
    old = put(tier, b"k", b"bad")
    pinned = tier.pin("ns", b"k")
    put(tier, b"k", b"good")
    assert not tier.remove(old)
    assert read(tier, b"k") == b"good"
    tier.unpin(pinned)
    current = tier.pin("ns", b"k")
    assert tier.remove(current)
    assert tier.lookup("ns", b"k") is KeyState.ABSENT
    tier.unpin(current)


# ── many at once ─────────────────────────────────────────────────────────────────────────


def test_many_lookups_are_each_as_one(tier):
    put(tier, b"readable", b"1")
    put(tier, b"replaced", b"1")
    blocks = [begin(tier, key, b"2") for key in (b"pending", b"replaced")]
    keys = [b"absent", b"readable", b"pending", b"replaced", b"readable"]
    assert tier.lookup_all("ns", keys) == bytes(tier.lookup("ns", key) for key in keys)
    assert tier.lookup_all("ns", keys) == bytes([0, 2, 1, 2, 2])
    assert tier.lookup_all("unknown", keys) == bytes(5)
    assert tier.lookup_all("ns", []) == b""
    for block in blocks:
        tier.complete_put(block)


def test_many_puts_find_places_for_the_first_that_fit(bounded):
    keys = [b"%d" % number for number in range(CAPACITY + 3)]
    checksums = [protocol.checksum("ns", key, b"%8d" % place) for place, key in enumerate(keys)]
    blocks = bounded.begin_puts(Offered("ns", keys, [8] * len(keys), checksums), BLOCK_BYTES)
    assert [block.key for block in blocks] == keys[:CAPACITY]
    for number, block in enumerate(blocks):
        bounded.view(block)[:] = b"%8d" % number
    bounded.complete_puts(blocks)
    assert [read(bounded, key) for key in keys[:3]] == [b"%8d" % number for number in range(3)]
    assert bounded.stats().blocks == CAPACITY
    assert bounded.begin_puts(Offered("ns", [], [], []), BLOCK_BYTES) == []
    bounded.complete_puts([])


def test_a_block_has_the_chain_fields_that_it_was_put_with_and_no_other(tier):
    keys = [b"%d" % number for number in range(3)]
    checksums = [protocol.checksum("ns", key, b"1") for key in keys]
    blocks = tier.begin_puts(
        Offered("ns", keys, [1] * 3, checksums, [Stretch(2, 1, 64, 32, 96), UNKNOWN]), BLOCK_BYTES
    )
    for block in blocks:
        tier.view(block)[:] = b"1"
    tier.complete_puts(blocks)
    first = Stretch(1, 1, 64, 32, 96)
    assert [tier.tier.peek("ns", key).chain for key in keys] == [
        first, Stretch(1, 1, 96, 32, 96), UNKNOWN
    ]  # fmt: skip
    put(tier, b"0", b"2")
    assert tier.tier.peek("ns", b"0").chain == UNKNOWN, "its new copy was put without"
    assert tier.tier.peek("ns", b"absent") is None
    assert tier.tier.peek("unknown", b"0") is None


def test_whoever_reads_its_news_knows_what_is_readable(tier):
    presence, known, random = Presence([tier.tier]), set(), Random(2)
    for number in range(400):
        key = b"%d" % random.randrange(CAPACITY)
        match random.randrange(8):
            case 0 if (block := tier.tier.peek("ns", key)) is not None:
                tier.remove(block)
            case 1 if number % 50 == 0:
                tier.clear(random.choice(["ns", None]))
            case 2:
                block = begin(tier, key, b"x")
                if block is not None:
                    tier.fail_put(block)
            case _:
                if random.randrange(3) == 0:
                    key = b"other %d" % number  # so that some are evicted
                put(tier, key, b"%d" % number)
        for place, has_come in told_by(presence):
            assert has_come != (place in known), "it has come, or gone, twice"
            (known.add if has_come else known.discard)(place)
        assert known == {("ns", key) for key in tier.readable_keys("ns")}
    assert known and all(tier.tier.has(*place) for place in known)
    assert not tier.tier.has("ns", b"absent") and not tier.tier.has("unknown", b"1")


def test_of_many_puts_those_that_were_cleared_meanwhile_do_not_come_back(tier):
    keys = [b"a", b"b"]
    blocks = tier.begin_puts(Offered("ns", keys, [1, 1], [0, 0]), BLOCK_BYTES)
    assert tier.clear(None) == 0
    assert tier.lookup_all("ns", keys) == bytes(2)
    tier.check()
    late = begin(tier, b"c", b"3")
    tier.complete_puts([*blocks, late])
    assert tier.lookup_all("ns", [*keys, b"c"]) == bytes([0, 0, 2])
    assert tier.stats().pending == 0


def test_the_last_of_many_published_or_pinned_is_the_most_recently_used(bounded):
    fill(bounded, count=CAPACITY - 4)
    keys = [b"a", b"b", b"c", b"d"]
    blocks = bounded.begin_puts(Offered("ns", keys, [1] * 4, [0] * 4), BLOCK_BYTES)
    bounded.complete_puts(blocks[::-1])
    bounded.unpin_all(bounded.pin_all("ns", [b"filler-%d" % n for n in range(CAPACITY - 4)]))
    fill(bounded, first=CAPACITY, count=2)
    assert [key for key in keys if bounded.lookup("ns", key)] == [b"a", b"b"]


def test_many_are_pinned_and_unpinned_each_on_its_own(bounded):
    for key in (b"a", b"b"):
        put(bounded, key, key)
    pinned = bounded.pin_all("ns", [b"a", b"absent", b"b", b"a"])
    assert [block and block.key for block in pinned] == [b"a", None, b"b", b"a"]
    assert bounded.pin_all("unknown", [b"a"]) == [None]
    assert bounded.stats().pinned == 2
    bounded.unpin_all([pinned[0], pinned[2]])
    assert bounded.stats().pinned == 1
    fill(bounded, count=2 * CAPACITY)
    assert read(bounded, b"a") == b"a"
    assert bounded.lookup("ns", b"b") is KeyState.ABSENT
    bounded.unpin(pinned[3])
