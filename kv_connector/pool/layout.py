"""Layout of a row: the places of each tensor's pages, and the bytes that a group's blocks own.

Groups of a hybrid model overlap: a row has room for the largest group, and a block of a smaller
group owns a part of it. The rest is cleared whenever a row is stored, because rows are hashed, sent
and stored whole (docs/decisions.md: "A row holds its own block and zeros").
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs, group_kernel_blocks

from remote_server.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches


class Piece(NamedTuple):
    """Bytes `start` to `end` of every page of one tensor of the KV cache."""

    tensor: int
    start: int
    end: int


Pieces = list[list[Piece]]
"""By group, in the order of their position in a row."""

Places = npt.NDArray[np.int8]
"""One tensor's part of the pool: (rows, places, bytes), with one place per engine block."""


def owned_by_groups(kv_caches: "CanonicalKVCaches", *, canonical: bool = False) -> Pieces:
    """The pages that each group's layers fill, without the padding after a small page. With
    `canonical`: vLLM's pages of all ranks together."""
    pieces: Pieces = []
    for refs in kv_caches.group_data_refs:
        ends: dict[int, int] = {}
        for ref in refs:
            ends[ref.tensor_idx] = max(ends.get(ref.tensor_idx, 0), _page_of(ref, canonical))
        pieces.append([Piece(tensor, 0, end) for tensor, end in sorted(ends.items())])
    return pieces


def pages_of(kv_caches: "CanonicalKVCaches", *, canonical: bool = False) -> list[int]:
    """Size of a page of each tensor in a row."""
    if not canonical:
        return [cache.page_size_bytes for cache in kv_caches.tensors]
    pages = [0] * len(kv_caches.tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        pages[ref.tensor_idx] = max(pages[ref.tensor_idx], _page_of(ref, canonical))
    return pages


def _page_of(ref: "CanonicalKVCacheRef", canonical: bool) -> int:
    size = ref.mapping.canonical_page_size_bytes if canonical else ref.page_size_bytes
    return int(size)


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
        self._views = []


class BytesUnknown(Exception):
    """The bytes that a group owns of a block cannot be established. The message is the reason."""


def owned_in_packed_blocks(
    kv_cache_config: "KVCacheConfig", kv_caches: "Mapping[str, torch.Tensor]"
) -> Pieces | None:
    """`owned_by_groups` for packed blocks: vLLM packs the pages of all layers of a group into one
    block, and offloads that block as one tensor. None where blocks are not packed.

    Raises `BytesUnknown` where a group's bytes in such a block cannot be established, and
    `ConfigError` for layers that vLLM would not offload.
    """
    if kv_cache_config.hisparse_host_num_blocks is not None:
        return None
    groups = [
        kv_cache_config.kv_cache_groups[group]
        for group in get_offloading_group_ids(kv_cache_config)
    ]
    spans: list[list[tuple[int, int]]] = []
    packed, unclear, outside, scattered = False, "", "", ""
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
            scattered = layer if _extent(blocks[0]) > stride else scattered
            first = blocks.storage_offset() * blocks.element_size()
            outside = layer if first >= stride else outside
            spans[-1].append((first, first + spec.unpadded_page_size_bytes))
    if scattered:
        raise ConfigError(
            f"KV cache layout {kv_cache_config.kv_cache_layout}: the bytes of a block of "
            f"{scattered} are in several places, of which vLLM would offload the first alone; set "
            "VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    if packed and outside:
        # vLLM 0.32 treats a page that is padded to an alignment as a packed block.
        raise ConfigError(
            f"vLLM would offload the first layer alone, without {outside}: the blocks of this "
            "model's KV cache are padded; set VLLM_KV_CACHE_LAYOUT=BLHNC"
        )
    if not packed or len(groups) < 2:
        return None
    if unclear:
        raise BytesUnknown(f"the bytes of {unclear} in a packed block cannot be established")
    return [[Piece(0, start, end) for start, end in _merged(own)] for own in spans]


def _extent(block: "torch.Tensor") -> int:
    """Bytes from the first byte of a block to its last."""
    steps = zip(block.shape, block.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * block.element_size()


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
