"""Rows of the pool as the tier sees them: their bytes, and the places of their keys in prompts."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from remote_server.protocol import MAX_STRETCHES, MAX_TOKENS, MAX_WINDOW, Stretch

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
    from vllm.v1.kv_offload.base import OffloadingSpec


Place = tuple[int | None, int, bytes | None]
"""Where the tokens of a key end in its prompt, the class of the request that put it (see
`protocol.Stretch`), and the anchor of its run. None, -1 and None when they are not known."""

NOWHERE: Place = (None, -1, None)

Places = Mapping[OffloadKey, Place]

NO_PLACES: Places = MappingProxyType({})


def anchors_at(keys: Iterable[OffloadKey], places: Places) -> list[bytes | None]:
    """The anchors of `keys`, as far as their `places` are known."""
    return [places.get(key, NOWHERE)[2] for key in keys]


def windows_of(groups: Iterable["GroupOffloadConfig"]) -> dict[int, int]:
    """`Stretch.window` of the rows of each group that has a window, by the group's number."""
    groups = [*groups]
    # A hit ends a row earlier where a draft model gives up its last one. A single state is at one
    # end or the other, and no second one helps.
    spare = any(group.is_eagle_group for group in groups)
    windows = {group.group_idx: group.sliding_window_size_in_chunks for group in groups}
    return {
        number: min(window + (spare and window > 1), MAX_WINDOW)
        for number, window in windows.items()
        if window is not None
    }


# The part of the pool that loads may fill; the rest is for computed blocks and puts. A key at a
# later position is a miss: the loads of a prompt longer than the pool evict the prompt's own
# earlier rows, and vLLM would never admit it.
POOL_SHARE_FOR_LOADS = 0.75

# Rows pinned by puts cannot hold new blocks; the engine uses the rest of the pool.
POOL_SHARE_FOR_PUTS = 0.25


class PoolRows:
    """Views of the pool's rows, cut to the bytes that a block owns.

    A row may end in padding to a page. `block_bytes` excludes it, so it is neither hashed nor sent.
    """

    def __init__(self, pool: memoryview, spec: "OffloadingSpec") -> None:
        assert pool.shape is not None and pool.strides is not None
        self.count, self._stride = pool.shape[0], pool.strides[0]
        self.block_bytes = owned_bytes(spec, self._stride)
        self.memory = pool.cast("B")
        """All of the pool, for a transport that maps it as a whole."""
        sizes = set(spec.tokens_per_block)
        self._tokens_per_row = max(sizes) * spec.blocks_per_chunk
        self._rows_per_stretch = len(spec.tokens_per_block)
        """Rows that hold the same tokens: one for each KV cache group."""
        # vLLM stores the partial block at the end of a prompt only for models with several groups,
        # all of one block size.
        self._tokens_of_a_whole_row = (
            self._tokens_per_row if len(sizes) == 1 < self._rows_per_stretch else 1
        )
        self.tokens_of_group = {
            group.group_id: group.tokens_per_block * spec.blocks_per_chunk
            for group in spec.config.groups
        }
        """Tokens of a row of each group, by its number."""
        self.windows: Mapping[int, int] = {}
        """By the number of each group with a window: `Stretch.window` of its rows."""
        self.rows_for_loads = int(self.count * POOL_SHARE_FOR_LOADS)
        """Rows that waiting prompts may fill with blocks of the server."""
        self.rows_for_puts = max(1, int(self.count * POOL_SHARE_FOR_PUTS))
        """Most rows that all puts together may pin."""
        tokens = self.rows_for_loads // self._rows_per_stretch * self._tokens_per_row
        self.last_token_of_a_prompt = tokens
        """The last token of a prompt whose block fits in the pool together with all blocks before
        it."""

    def at(self, rows: Iterable[int]) -> list[memoryview]:
        """The bytes of these rows, in place. They stay valid until `release`."""
        return [
            self.memory[row * self._stride : row * self._stride + self.block_bytes]
            for row in map(int, rows)
        ]

    @property
    def is_one_chain(self) -> bool:
        """Whether the rows of a prompt are one chain, of which the engine uses a beginning."""
        return len(self.tokens_of_group) == 1 and not self.windows

    @property
    def can_be_partial(self) -> bool:
        """Whether `is_partial` can be True for any key of this model."""
        return self._tokens_of_a_whole_row > 1

    def is_partial(self, end_token: int | None) -> bool:
        """Whether a key whose tokens end there identifies only the first part of a block. The rest
        of its row is not its own: later tokens, or older content of the engine's block."""
        return bool(end_token and end_token % self._tokens_of_a_whole_row)

    def chain(
        self, keys: Sequence[bytes], ends: Sequence[int | None], known: Sequence[int]
    ) -> list[Stretch]:
        """The chain fields of blocks whose tokens end at `ends`, put by requests of the classes
        `known`; empty when a position is not known, or there are too many stretches."""
        if not ends or (first := ends[0]) is None or None in ends:
            return []
        if len(self.tokens_of_group) == 1 and known.count(known[0]) == len(known):
            ((group, step),) = self.tokens_of_group.items()
            stop = first + len(ends) * step
            if first >= step and stop <= MAX_TOKENS and ends == [*range(first, stop, step)]:
                window = self.windows.get(group, 0)
                return [Stretch(len(ends), group, first - step, step, known[0], False, window)]
        return self._stretches(keys, ends, known)  # type: ignore[arg-type]  # no None in it

    def chain_at(self, keys: Sequence[OffloadKey], places: Places) -> list[Stretch]:
        """The same for keys whose `places` are known, as far as they are."""
        of_keys = [places.get(key, NOWHERE) for key in keys]
        return self.chain(keys, [place[0] for place in of_keys], [place[1] for place in of_keys])

    def _stretches(
        self, keys: Sequence[bytes], ends: Iterable[int], known: Iterable[int]
    ) -> list[Stretch]:
        stretches: list[Stretch] = []
        before: tuple[int, int, int] | None = None
        rows = first = last = step = 0

        def end_stretch() -> None:
            if before is not None:
                group, size, request = before
                window = self.windows.get(group, 0)
                stretches.append(Stretch(rows, group, first, size, request, step < 0, window))

        for key, end, request in zip(keys, ends, known, strict=True):
            group = get_offload_group_idx(OffloadKey(key))
            tokens = self.tokens_of_group.get(group)
            if tokens is None or not 0 < end <= MAX_TOKENS:
                return []
            start = (end - 1) // tokens * tokens
            size = end - start  # less than `tokens` for the first part of a block
            this = (group, size, request)
            if this == before and (start - last == step or (rows == 1 and last - start == size)):
                step = start - last
                rows += 1
            else:
                end_stretch()
                before, rows, first, step = this, 1, start, size
            last = start
        end_stretch()
        return stretches if len(stretches) <= MAX_STRETCHES else []

    def tokens_of(self, num_rows: int) -> int:
        """Prompt tokens whose blocks these rows hold."""
        return num_rows * self._tokens_per_row // self._rows_per_stretch

    def rows_of(self, num_tokens: int) -> int:
        """Rows that hold so many tokens of a prompt, at least one."""
        return max(1, num_tokens * self._rows_per_stretch // self._tokens_per_row)

    def start_of(self, ends: Sequence[int | None]) -> int:
        """The token of a prompt at which rows begin whose tokens end at `ends`; 0 if not known."""
        first = min((end for end in ends if end is not None), default=0)
        return max(0, first - self._tokens_per_row)

    def release(self) -> None:
        """Release the pool's memory; views from `at` must not be used afterwards."""
        self.memory.release()


def owned_bytes(spec: "OffloadingSpec", row_bytes: int) -> int:
    """The bytes of a row that belong to its block, without the padding at its end."""
    per_worker: int = getattr(spec, "cpu_page_size_per_worker", 0)
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    owned = per_worker * copies
    return owned if 0 < owned <= row_bytes else row_bytes
