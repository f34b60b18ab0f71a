"""How the memory tier shares one arena between namespaces of different block sizes."""

import pytest
from one_by_one import OneByOne

from remote_server.protocol import KeyState
from remote_server.shm.mapping import BYTES_PER_WORD, Arena
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Slabs, memory_for_block, slab_bytes_for, slot_bytes_for
from remote_server.values import GiB, MiB

SLAB_BYTES = 4096
SMALL, LARGE = 512, 2048  # 8 and 2 to a slab


@pytest.fixture
def tier():
    arena = Arena(16 * SLAB_BYTES)
    tier = OneByOne(MemoryTier(arena, SLAB_BYTES))
    yield tier
    tier.check()
    arena.close()


def put(tier, namespace, number, block_bytes):
    block = tier.begin_put(namespace, b"%d" % number, block_bytes, block_bytes, 0)
    if block is not None:
        tier.complete_put(block)
    return block


def readable(tier, namespace, numbers):
    return [n for n in numbers if tier.lookup(namespace, b"%d" % n) is KeyState.READABLE]


@pytest.mark.parametrize("memory", [1 * MiB, 16 * MiB, 100 * MiB, 1 * GiB, 10 * GiB, 300 * GiB])
def test_there_are_at_least_sixteen_slabs_and_little_waste(memory):
    slab_bytes = slab_bytes_for(memory)
    assert slab_bytes % 4096 == 0
    assert 16 <= memory // slab_bytes <= 80
    assert memory % slab_bytes < memory // 16


@pytest.mark.parametrize("memory", [1 * MiB, 100 * MiB, 300 * GiB])
@pytest.mark.parametrize("block_bytes", [1, 512, 4096, 1 * MiB])
def test_every_slot_has_a_word_of_its_own(memory, block_bytes):
    slabs = Slabs(memory)
    num_slots = slabs.slab_bytes // slot_bytes_for(block_bytes)
    first, second, last = slabs.slabs[0], slabs.slabs[1], slabs.slabs[-1]
    assert first.first_word == 0
    assert num_slots <= second.first_word
    assert last.first_word + num_slots <= memory // BYTES_PER_WORD


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 1 * MiB, 3 * MiB + 1, 64 * MiB])
def test_the_budget_suggested_for_a_block_is_enough(block_bytes):
    assert slab_bytes_for(memory_for_block(block_bytes)) >= block_bytes


def test_the_second_namespace_gets_memory_that_the_first_has_filled(tier):
    for number in range(200):
        put(tier, "first", number, SMALL)
    for number in range(8):
        assert put(tier, "second", number, LARGE) is not None
    assert readable(tier, "second", range(8)) == list(range(8))
    assert tier.num_blocks("first") > 0


def test_a_slab_is_taken_where_memory_was_idle_for_longest(tier):
    for number in range(128):
        put(tier, "first", number, SMALL)
    for number in range(8):  # the first slab's blocks are in use again
        tier.touch("first", b"%d" % number)
    put(tier, "second", 0, LARGE)
    assert readable(tier, "first", range(16)) == list(range(8))
    assert tier.counters() == {"evicted": 8, "slabs_recut": 1, "keep_declined": 0}


def test_memory_follows_use_and_comes_back(tier):
    def live(namespace, block_bytes, rounds):
        """A working set of 40 KiB, read again and again."""
        for _ in range(rounds):
            for number in range(40 * 1024 // block_bytes):
                if not tier.touch(namespace, b"%d" % number):
                    put(tier, namespace, number, block_bytes)

    live("first", SMALL, rounds=20)
    assert tier.used_bytes("first") == 40 * 1024
    live("second", LARGE, rounds=20)
    assert tier.used_bytes("second") == 40 * 1024
    live("first", SMALL, rounds=20)
    assert tier.used_bytes("first") == 40 * 1024


def test_two_busy_namespaces_both_keep_a_fair_part(tier):
    for number in range(2000):
        put(tier, "first", number, SMALL)
        if number % 4 == 0:  # as many bytes a second as the first
            put(tier, "second", number, LARGE)
    for namespace in ("first", "second"):
        assert tier.used_bytes(namespace) >= 16 * SLAB_BYTES // 4


def test_a_namespace_that_only_scans_cannot_take_what_another_keeps_using(tier):
    for number in range(64):  # half the memory
        put(tier, "kept", number, SMALL)
    for number in range(1000):
        put(tier, "scan", number, LARGE)
        for kept in range(64):
            tier.touch("kept", b"%d" % kept)
    assert readable(tier, "kept", range(64)) == list(range(64))


def test_a_slab_with_a_pinned_block_is_never_taken(tier):
    for number in range(128):
        put(tier, "first", number, SMALL)
    pinned = [tier.pin("first", b"%d" % number) for number in range(0, 128, 8)]
    assert put(tier, "second", 0, LARGE) is None
    tier.unpin(pinned.pop())
    assert put(tier, "second", 0, LARGE) is not None
    for block in pinned:
        tier.unpin(block)


def test_a_namespace_whose_blocks_are_all_pinned_takes_an_idle_slab_of_another(tier):
    put(tier, "second", 0, LARGE)
    put(tier, "second", 1, LARGE)
    for number in range(120):
        put(tier, "first", number, SMALL)
    pinned = [tier.pin("second", b"%d" % number) for number in (0, 1)]
    assert put(tier, "second", 2, LARGE) is not None
    for block in pinned:
        tier.unpin(block)


def test_a_slab_emptied_by_clear_serves_another_size_without_eviction(tier):
    for number in range(128):
        put(tier, "first", number, SMALL)
    tier.clear("first")
    assert tier.stats().free_slabs == 16
    for number in range(32):
        put(tier, "second", number, LARGE)
    assert tier.num_blocks("second") == 32
    assert tier.counters()["evicted"] == 0


def test_namespaces_of_one_size_share_slabs(tier):
    put(tier, "first", 0, SMALL)
    put(tier, "second", 0, SMALL - 1)
    assert tier.stats().free_slabs == 15


def test_one_block_as_large_as_a_slab_fits(tier):
    for number in range(40):
        assert put(tier, "ns", number, SLAB_BYTES) is not None
    assert readable(tier, "ns", range(40)) == list(range(24, 40))


def test_a_generation_word_is_right_while_its_block_is_readable_and_never_again(tier):
    seen = set()

    def word(block):
        return tier._arena.words[block.word]

    for number in range(300):  # more than twice what there is room for
        block = tier.begin_put("ns", b"%d" % number, SMALL, SMALL, 0)
        assert word(block) == 0
        tier.complete_put(block)
        assert word(block) == block.generation
        assert block.generation not in seen
        seen.add(block.generation)
    blocks = [tier.pin("ns", b"%d" % number) for number in range(296, 300)]
    removed, pinned, replaced, cleared = blocks
    for block in (removed, replaced, cleared):
        tier.unpin(block)
    tier.remove(removed)
    assert word(removed) == 0
    tier.remove(pinned)
    assert word(pinned) == pinned.generation, "its reader is not done"
    tier.unpin(pinned)
    assert word(pinned) == 0
    new = put(tier, "ns", 298, SMALL)
    assert word(replaced) == 0 or new.word == replaced.word
    assert word(replaced) != replaced.generation
    tier.clear(None)
    assert word(cleared) == 0
    assert not any(tier._arena.words)


def test_a_slab_that_is_cut_anew_leaves_no_word_behind(tier):
    for number in range(128):
        put(tier, "first", number, SMALL)
    old = [tier.pin("first", b"%d" % number) for number in range(128)]
    tier.unpin_all(old)
    for number in range(32):
        put(tier, "second", number, LARGE)
    assert tier.counters()["slabs_recut"] > 0
    gone = [block for block in old if tier.lookup("first", block.key) is KeyState.ABSENT]
    assert gone
    assert all(tier._arena.words[block.word] != block.generation for block in gone)


def test_blocks_that_come_together_after_an_eviction_are_neighbours(tier):
    for number in range(0, 256, 16):
        keys = [b"%d" % each for each in range(number, number + 16)]
        blocks = tier.begin_puts("ns", keys, SMALL, [SMALL] * 16, [0] * 16)
        for first in (0, 8):  # a slab each
            assert tier.view_of_run(blocks[first : first + 8]) is not None
        tier.complete_puts(blocks[::-1])
    assert tier.counters()["evicted"] == 128


def test_the_accounting_identity_sees_a_wrong_word(tier):
    block = put(tier, "ns", 0, SMALL)
    for wrong, place in ((0, block.word), (block.generation + 1, block.word), (7, block.word + 1)):
        was = tier._arena.words[place]
        tier._arena.words[place] = wrong
        with pytest.raises(AssertionError):
            tier.check()
        tier._arena.words[place] = was


def test_the_accounting_identity_sees_two_blocks_in_one_slot(tier):
    first, second = put(tier, "ns", 0, SMALL), put(tier, "ns", 1, SMALL)
    slot = second.slot
    second.slot = first.slot
    with pytest.raises(AssertionError):
        tier.check()
    second.slot = slot


def test_the_accounting_identity_sees_a_lost_slot(tier):
    block = put(tier, "ns", 0, SMALL)
    slot = block.slab.free.pop()
    with pytest.raises(AssertionError):
        tier.check()
    block.slab.free.append(slot)


def test_neighbours_are_one_view_and_others_are_not(tier):
    blocks = [put(tier, "ns", number, SMALL) for number in range(4)]
    run = tier.view_of_run(blocks)
    assert bytes(run) == b"".join(bytes(tier.view(block)) for block in blocks)
    assert tier.view_of_run(blocks[::-1]) is None
    assert tier.view_of_run([blocks[0], blocks[2]]) is None
    short = tier.begin_put("ns", b"short", SMALL, 1, 0)
    tier.complete_put(short)
    assert tier.view_of_run([short, put(tier, "ns", 5, SMALL)]) is None
