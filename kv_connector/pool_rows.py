"""The CPU pool as the remote tier sees it: rows of bytes, and how many of them there are."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

# Loads may fill this part of the pool; the rest is for what is computed and for puts. A key whose
# position lies beyond it is a miss: the loads of a prompt longer than the pool evict its own
# earlier rows, and vLLM would never admit it.
POOL_SHARE_FOR_LOADS = 0.75


class PoolRows:
    """Views of the pool's rows, cut to the bytes that a block owns.

    A row may end in padding to a page; `block_bytes` leaves it out, so that it is neither
    hashed nor sent.
    """

    def __init__(self, pool: memoryview, spec: "OffloadingSpec") -> None:
        assert pool.shape is not None and pool.strides is not None
        self.count: int = pool.shape[0]
        self.block_bytes = owned_bytes(spec, pool.strides[0])
        self._stride: int = pool.strides[0]
        self.memory = pool.cast("B")
        """All of the pool, for a transport that reaches it as a whole."""
        self._tokens_per_row = max(spec.tokens_per_block) * spec.blocks_per_chunk
        self._rows_per_stretch = len(spec.tokens_per_block)
        """Rows that hold the same tokens: one for each KV cache group."""
        sizes = set(spec.tokens_per_block)
        # vLLM stores the part of a block at the end of a prompt only for models with several
        # groups, all of one block size.
        self._tokens_of_a_whole_row = (
            self._tokens_per_row if len(sizes) == 1 < self._rows_per_stretch else 1
        )
        self.rows_for_loads = int(self.count * POOL_SHARE_FOR_LOADS)
        """Rows that prompts which wait for the engine may fill with blocks of the server."""
        tokens = self.rows_for_loads // self._rows_per_stretch * self._tokens_per_row
        self.last_token_of_a_prompt = tokens
        """Position beyond which the pool could not hold a key's block together with all blocks
        before it."""

    def at(self, rows: Iterable[int]) -> list[memoryview]:
        """The bytes of these rows, in place. They stay valid until `release`."""
        return [
            self.memory[row * self._stride : row * self._stride + self.block_bytes]
            for row in map(int, rows)
        ]

    def is_partial(self, end_token: int | None) -> bool:
        """Whether a key whose tokens end there stands for the first part of a block. The rest of
        its row is not its own: later tokens, or what the engine's block held before."""
        return bool(end_token and end_token % self._tokens_of_a_whole_row)

    def tokens_of(self, num_rows: int) -> int:
        """Prompt tokens whose blocks these rows hold."""
        return num_rows * self._tokens_per_row // self._rows_per_stretch

    def release(self) -> None:
        """Let go of the pool's memory; views handed out before must not be used again."""
        self.memory.release()


def owned_bytes(spec: "OffloadingSpec", row_bytes: int) -> int:
    """The bytes of a row that belong to its block, without the padding at its end."""
    per_worker: int = getattr(spec, "cpu_page_size_per_worker", 0)
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    owned = per_worker * copies
    return owned if 0 < owned <= row_bytes else row_bytes
