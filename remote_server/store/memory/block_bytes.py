"""The bytes of the blocks in an arena, and where they are."""

from collections.abc import Iterable, Sequence

from remote_server.shm.mapping import WORD_BYTES, Arena
from remote_server.store.memory.slabs import Block


class BlockBytes:
    """Views of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def view(self, block: Block) -> memoryview:
        """The bytes of `block`: valid while it is being written or pinned."""
        return self._arena.view[block.offset : block.offset + block.length]

    def address_of(self, block: Block) -> int:
        """Where the bytes of `block` begin."""
        return self._arena.address + block.offset

    def view_of_run(self, blocks: Sequence[Block]) -> memoryview | None:
        """The bytes of `blocks` as one view, when they are adjacent in this order."""
        end = blocks[0].offset
        for block in blocks:
            if block.offset != end:
                return None
            end += block.length
        return self._arena.view[blocks[0].offset : end]

    def word_offsets(self, blocks: Iterable[Block]) -> list[int]:
        """Where in the arena's file the generation word of each is."""
        start = self._arena.words_offset
        return [start + (b.slab.first_word + b.slot) * WORD_BYTES for b in blocks]
