"""Rows of the pool: the bytes that each KV cache group owns, and the rest, which is kept zero.

Groups of a hybrid model overlap: a row has room for the largest group, and a block of a smaller
group owns a part of it. The rest of the row, and of the engine's block, holds bytes of a previous
owner, which may be the prompt of another request. Rows are hashed, sent and stored whole, so the
rest is cleared whenever a row is stored. A model with one group owns all of its rows, and nothing
is cleared.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs, group_kernel_blocks
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    OffloadKey,
    get_offload_group_idx,
)

from kv_connector.fact_text import NotKnown
from remote_server.errors import ConfigError
from remote_server.protocol import MAX_STRETCHES, MAX_TOKENS, Stretch

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec


class Piece(NamedTuple):
    """Bytes `start` to `end` of every page of one tensor of the KV cache."""

    tensor: int
    start: int
    end: int


Pieces = list[list[Piece]]
"""By group, in the order of their position in a row."""

Places = npt.NDArray[np.int8]
"""One tensor's part of the pool: (rows, places, bytes), with one place per engine block."""


def owned_by_groups(kv_caches: CanonicalKVCaches, *, canonical: bool = False) -> Pieces:
    """The pages that each group's layers fill, without the padding after a small page. With
    `canonical`: vLLM's pages of all ranks together."""
    pieces: Pieces = []
    for refs in kv_caches.group_data_refs:
        ends: dict[int, int] = {}
        for ref in refs:
            ends[ref.tensor_idx] = max(ends.get(ref.tensor_idx, 0), _page_of(ref, canonical))
        pieces.append([Piece(tensor, 0, end) for tensor, end in sorted(ends.items())])
    return pieces


def pages_of(kv_caches: CanonicalKVCaches, *, canonical: bool = False) -> list[int]:
    """Size of a page of each tensor in a row."""
    pages = [cache.page_size_bytes for cache in kv_caches.tensors]
    if canonical:
        pages = [0] * len(pages)
        for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
            pages[ref.tensor_idx] = max(pages[ref.tensor_idx], _page_of(ref, canonical))
    return pages


def _page_of(ref: CanonicalKVCacheRef, canonical: bool) -> int:
    size = ref.mapping.canonical_page_size_bytes if canonical else ref.page_size_bytes
    return int(size)


def owned_in_packed_blocks(
    kv_cache_config: "KVCacheConfig", kv_caches: "Mapping[str, torch.Tensor]"
) -> Pieces | None:
    """`owned_by_groups` for packed blocks: vLLM packs the pages of all layers of a group into one
    block, and offloads that block as one tensor. None where blocks are not packed.

    Raises `NotKnown` where a group's bytes in such a block cannot be established, and
    `ConfigError` for layers that vLLM would not offload.
    """
    if kv_cache_config.hisparse_host_num_blocks is not None:
        return None
    groups = [
        kv_cache_config.kv_cache_groups[group]
        for group in get_offloading_group_ids(kv_cache_config)
    ]
    spans: list[list[tuple[int, int]]] = []
    packed, unclear, outside = False, "", ""
    for group in groups:
        spans.append([])
        for layer in group.layer_names:
            spec: Any = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer]
            if not isinstance(spec, AttentionSpec):
                unclear = layer
                continue
            blocks = group_kernel_blocks(kv_caches[layer], kv_cache_config.num_blocks)
            stride = blocks.stride(0) * blocks.element_size()
            packed |= stride != spec.page_size_bytes
            first = blocks.storage_offset() * blocks.element_size()
            outside = layer if first >= stride else outside
            spans[-1].append((first, first + spec.unpadded_page_size_bytes))
    if packed and outside:
        # vLLM 0.32 treats a page that is padded to an alignment as a packed block.
        raise ConfigError(
            f"vLLM would offload the first layer alone, without {outside}: the blocks of this "
            "model's KV cache are padded; set VLLM_KV_CACHE_LAYOUT=BLHNC"
        )
    if not packed or len(groups) < 2:
        return None
    if unclear:
        raise NotKnown(f"the bytes of {unclear} in a packed block cannot be established")
    return [[Piece(0, start, end) for start, end in _merged(own)] for own in spans]


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def places_of_rows(
    pool: npt.NDArray[np.int8], pages: Sequence[int], blocks_per_row: int
) -> list[Places]:
    """Each tensor's view of `pool`, a worker's part of all rows, in the layout of vLLM's workers:
    tensor after tensor, and in each one place per engine block."""
    places, start = [], 0
    for page in pages:
        view = pool[:, start : start + page * blocks_per_row]
        shape = (pool.shape[0], blocks_per_row, page)
        places.append(np.lib.stride_tricks.as_strided(view, shape, (pool.strides[0], page, 1)))
        start += page * blocks_per_row
    return places


def rest_of_rows(owned: Pieces, pages: Sequence[int]) -> Pieces:
    """The bytes that no layer of a group fills. `pages` are the page sizes of the tensors."""
    rest: Pieces = []
    for pieces in owned:
        rest.append([])
        for tensor, page in enumerate(pages):
            own = [(piece.start, piece.end) for piece in pieces if piece.tensor == tensor]
            edges = [(0, 0), *own, (page, page)]
            gaps = [(end, start) for (_, end), (start, _) in pairwise(edges)]
            rest[-1] += [Piece(tensor, start, end) for start, end in gaps if start < end]
    return rest


class RestOfRows:
    """Clears the bytes of rows that a group's blocks do not own. False if there are none."""

    def __init__(self, owned: Pieces, places: Sequence[Places]) -> None:
        pages = [view.shape[2] for view in places]
        self._views = [
            [places[piece.tensor][:, :, piece.start : piece.end] for piece in pieces]
            for pieces in rest_of_rows(owned, pages)
        ]

    def __bool__(self) -> bool:
        return any(self._views)

    def clear(self, group: int, first_row: int, num_rows: int) -> None:
        """Zero those bytes in these rows. No other copy may use the rows meanwhile."""
        for view in self._views[group]:
            view[first_row : first_row + num_rows] = 0

    def release(self) -> None:
        """Release the views of the pool."""
        self._views = []


# The part of the pool that loads may fill; the rest is for computed blocks and puts. A key at a
# later position is a miss: the loads of a prompt longer than the pool evict the prompt's own
# earlier rows, and vLLM would never admit it.
POOL_SHARE_FOR_LOADS = 0.75


class PoolRows:
    """Views of the pool's rows, cut to the bytes that a block owns.

    A row may end in padding to a page. `block_bytes` excludes it, so it is neither hashed nor sent.
    """

    def __init__(self, pool: memoryview, spec: "OffloadingSpec") -> None:
        assert pool.shape is not None and pool.strides is not None
        self.count: int = pool.shape[0]
        self.block_bytes = owned_bytes(spec, pool.strides[0])
        self._stride: int = pool.strides[0]
        self.memory = pool.cast("B")
        """All of the pool, for a transport that maps it as a whole."""
        self._tokens_per_row = max(spec.tokens_per_block) * spec.blocks_per_chunk
        self._rows_per_stretch = len(spec.tokens_per_block)
        """Rows that hold the same tokens: one for each KV cache group."""
        sizes = set(spec.tokens_per_block)
        # vLLM stores the partial block at the end of a prompt only for models with several groups,
        # all of one block size.
        self._tokens_of_a_whole_row = (
            self._tokens_per_row if len(sizes) == 1 < self._rows_per_stretch else 1
        )
        self._tokens_of_group = {
            group.group_id: group.tokens_per_block * spec.blocks_per_chunk
            for group in spec.config.groups
        }
        self.rows_for_loads = int(self.count * POOL_SHARE_FOR_LOADS)
        """Rows that waiting prompts may fill with blocks of the server."""
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
        if len(self._tokens_of_group) == 1 and known.count(known[0]) == len(known):
            ((group, step),) = self._tokens_of_group.items()
            stop = first + len(ends) * step
            if first >= step and stop <= MAX_TOKENS and ends == [*range(first, stop, step)]:
                return [Stretch(len(ends), group, first - step, step, known[0])]
        return self._stretches(keys, ends, known)  # type: ignore[arg-type]  # no None in it

    def _stretches(
        self, keys: Sequence[bytes], ends: Iterable[int], known: Iterable[int]
    ) -> list[Stretch]:
        stretches: list[Stretch] = []
        before: tuple[int, int, int] | None = None
        rows = first = last = step = 0

        def end_stretch() -> None:
            if before is not None:
                stretches.append(Stretch(rows, before[0], first, *before[1:], step < 0))

        for key, end, request in zip(keys, ends, known, strict=True):
            group = get_offload_group_idx(OffloadKey(key))
            tokens = self._tokens_of_group.get(group)
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

    def release(self) -> None:
        """Release the pool's memory; views from `at` must not be used afterwards."""
        self.memory.release()


def owned_bytes(spec: "OffloadingSpec", row_bytes: int) -> int:
    """The bytes of a row that belong to its block, without the padding at its end."""
    per_worker: int = getattr(spec, "cpu_page_size_per_worker", 0)
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    owned = per_worker * copies
    return owned if 0 < owned <= row_bytes else row_bytes
