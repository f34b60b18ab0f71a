"""How the memory tier shares one arena between namespaces of different block sizes."""

import pytest
from one_by_one import OneByOne

from remote_server.protocol import KeyState
from remote_server.shm.mapping import BYTES_PER_WORD, Arena
from remote_server.store.memory.slabs import Slabs, memory_for_block, slab_bytes_for, slot_bytes_for
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.tier import Offered
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


def test_a_busy_namespace_takes_the_slabs_of_one_that_is_idle(tier):
    put(tier, "busy", 0, LARGE)
    for number in range(15 * 8):
        put(tier, "idle", number, SMALL)
    for number in range(100):
        put(tier, "busy", number, LARGE)
    assert tier.used_bytes("busy") == 16 * SLAB_BYTES


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


def test_blocks_that_come_together_after_an_eviction_are_neighbours(tier):
    for number in range(0, 256, 16):
        keys = [b"%d" % each for each in range(number, number + 16)]
        blocks = tier.begin_puts(Offered("ns", keys, [SMALL] * 16, [0] * 16), SMALL)
        for first in (0, 8):  # a slab each
            assert tier.view_of_run(blocks[first : first + 8]) is not None
        tier.complete_puts(blocks[::-1])
    assert tier.counters()["evicted"] == 128


def test_the_accounting_identity_sees_a_wrong_word_a_slot_of_two_blocks_and_a_lost_slot(tier):
    first, block = put(tier, "ns", 0, SMALL), put(tier, "ns", 1, SMALL)
    words, slot = tier._arena.words, block.slot

    def is_seen() -> bool:
        try:
            tier.check()
        except AssertionError:
            return True
        return False

    for wrong, place in ((0, block.word), (block.generation + 1, block.word), (7, block.word + 1)):
        was, words[place] = words[place], wrong
        assert is_seen()
        words[place] = was
    block.slot = first.slot
    assert is_seen()
    block.slot = slot
    lost = block.slab.free.pop()
    assert is_seen()
    block.slab.free.append(lost)


def test_neighbours_are_one_view_and_others_are_not(tier):
    blocks = [put(tier, "ns", number, SMALL) for number in range(4)]
    run = tier.view_of_run(blocks)
    assert bytes(run) == b"".join(bytes(tier.view(block)) for block in blocks)
    assert tier.view_of_run(blocks[::-1]) is None
    assert tier.view_of_run([blocks[0], blocks[2]]) is None
    short = tier.begin_put("ns", b"short", SMALL, 1, 0)
    tier.complete_put(short)
    assert tier.view_of_run([short, put(tier, "ns", 5, SMALL)]) is None
