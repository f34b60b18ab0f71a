"""Writes to a lower tier that end after memory has let their block go."""

from dict_tier import DictTier
from disk_helpers import stack_of

from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.shm.mapping import Arena
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.tier_stack import TierStack

BLOCK = 4096


def put(stack: TierStack, data: bytes) -> None:
    checksum = protocol.checksum("ns", b"key", data)
    blocks = stack.memory.begin_puts("ns", [b"key"], BLOCK, [BLOCK], [checksum])
    stack.memory.view(blocks[0])[:] = data
    stack.memory.complete_puts(blocks)
    stack.published(blocks)


def test_a_block_that_left_memory_while_it_was_written_below_is_removed_there():
    arena = Arena(16 * BLOCK)
    below = DictTier(8)
    stack = stack_of(MemoryTier(arena, slab_bytes=4 * BLOCK), below, lambda namespace: BLOCK)
    put(stack, b"1" * BLOCK)
    assert stack.memory.clear("ns") == 1
    stack.finish_jobs()
    assert [*stack.lookup_all("ns", [b"key"])] == [KeyState.ABSENT]
    put(stack, b"2" * BLOCK)
    stack.finish_jobs()
    stack.memory.clear("ns")
    assert [*stack.lookup_all("ns", [b"key"])] == [KeyState.READABLE], "written before it left"
    stack.check()
    arena.close()
