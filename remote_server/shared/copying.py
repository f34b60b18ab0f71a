"""From a client's memory into the arena, and whether it landed well. Runs on the copy thread."""

import ctypes
from collections.abc import Sequence

import xxhash

from remote_server import protocol
from remote_server.store.arena import Arena
from remote_server.store.slabs import Block

# What is copied before it is hashed: small enough to be still in the core's own cache. Hashing
# a message after copying all of it costs 1.6 times a plain copy, hashing piece by piece 1.1. It
# is also the fastest size to copy in, and worth the fixed cost of a call.
PIECE_BYTES = 256 << 10


def copy_shared(
    namespace: str, blocks: Sequence[Block], sources: Sequence[int], arena: Arena
) -> list[bool]:
    """Fill each of `blocks` from the address in `sources`, and say of each whether what landed
    is what was announced. A block without a checksum is taken as it comes.

    Small blocks that are neighbours on both sides are copied together.
    """
    seeds = protocol.identities(namespace, [block.key for block in blocks])
    verdicts: list[bool] = []
    first, end = 0, len(blocks)
    while first < end:
        source, target = sources[first], blocks[first].offset
        num_bytes = blocks[first].length
        last = first + 1
        while last < end and sources[last] == source + num_bytes:
            block = blocks[last]
            together = num_bytes + block.length
            if together > PIECE_BYTES or block.offset != target + num_bytes:
                break
            num_bytes = together
            last += 1
        if num_bytes > PIECE_BYTES:
            verdicts.append(_copy_large(blocks[first], source, seeds[first], arena))
        else:
            ctypes.memmove(arena.address + target, source, num_bytes)
            for block, seed in zip(blocks[first:last], seeds[first:last], strict=True):
                verdicts.append(
                    block.checksum is None
                    or block.checksum
                    == xxhash.xxh3_64_intdigest(
                        arena.view[block.offset : block.offset + block.length], seed=seed
                    )
                )
        first = last
    return verdicts


def _copy_large(block: Block, source: int, seed: int, arena: Arena) -> bool:
    """One block in pieces, each hashed as soon as it is there."""
    hasher = xxhash.xxh3_64(seed=seed)
    start, end = block.offset, block.offset + block.length
    for at in range(start, end, PIECE_BYTES):
        stop = min(at + PIECE_BYTES, end)
        ctypes.memmove(arena.address + at, source + at - start, stop - at)
        if block.checksum is not None:
            hasher.update(arena.view[at:stop])
    return block.checksum is None or hasher.intdigest() == block.checksum
