"""The place of a block: its chain fields, and each copy with its age, for people."""

from collections.abc import Sequence
from typing import Any

from remote_server.protocol import UNKNOWN, BlockCopy, Stretch
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.tier import Tier


def explain(
    memory: MemoryTier, tiers: Sequence[Tier[Any]], namespace: str, key: bytes
) -> tuple[Stretch, list[BlockCopy]]:
    """The chain fields of the block of `key`, from the first tier that has it, and its copies."""
    above, fields, copies = memory.peek(namespace, key), UNKNOWN, []
    if above is not None:
        fields, copies = above.chain, [BlockCopy(tier=memory.name)]
    for tier in tiers:
        if (block := tier.peek(namespace, key)) is not None:
            fields = fields if copies else block.chain
            where, age_s = tier.where(block), tier.age_s(block)
            copies.append(BlockCopy(tier=tier.name, where=where, age_s=age_s))
    return fields, copies
