"""Layouts of an engine's KV cache, and the pieces that make up each row of the pool.

A row holds a block of all layers, one layer after another. In the engine a layer is a tensor of
pages, one for each block (vLLM 0.32's layouts: keys and values share a page); older layouts have a
tensor for the keys and one for the values. With the cross-layer layout, and for packed blocks, one
page has all layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_check.device import Device
from benchmarks.remote_kv_cache.baseline.copies.device_copies import Pieces

Rows = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

CROSS_LAYER = "one page of all layers"
TOGETHER = "a page a layer"
APART = "K and V apart"
LAYOUTS = (CROSS_LAYER, TOGETHER, APART)

_KIB, _MIB = 1 << 10, 1 << 20


class Shape(NamedTuple):
    """A row, and the layers whose pages it holds."""

    row_bytes: int
    layers: int

    def __str__(self) -> str:
        size = f"{self.row_bytes / _MIB:.3g} MiB"
        if self.row_bytes < _MIB // 2:
            size = f"{self.row_bytes // _KIB} KiB"
        return f"rows of {size}, {self.layers} layers"

    def num_pieces(self, layout: str) -> int:
        """Copies that move one row."""
        return {CROSS_LAYER: 1, TOGETHER: self.layers, APART: 2 * self.layers}[layout]


SHAPES = (
    Shape(64 * _KIB, 32),
    Shape(576 * _KIB, 36),  # Qwen2.5-3B
    Shape(_MIB, 32),
    Shape(2 * _MIB, 32),  # Llama-3.1-8B
    Shape(4 * _MIB, 64),
)
"""With blocks of 16 tokens, but for the first: a small model, or one of many ranks."""


class Cache:
    """One layout of an engine's blocks on the device, and the rows that they belong to."""

    def __init__(self, device: Device, layout: str, shape: Shape, blocks: Ids, rows: Ids) -> None:
        """`blocks[i]` belongs to `rows[i]`. Both number all of them, from 0."""
        self._device = device
        self._blocks, self._rows = blocks, rows
        self._stride = shape.row_bytes
        number = shape.num_pieces(layout)
        self._page = shape.row_bytes // number
        if self._page * number != shape.row_bytes:
            raise ValueError(f"{shape} have no whole pages in the layout {layout!r}")
        torch = device.torch
        self.tensors: Sequence[Any] = [
            torch.zeros((len(blocks), self._page), dtype=torch.uint8, device=device.name)
            for _ in range(number)
        ]

    def pieces(self, pool_address: int) -> Pieces:
        """All copies between the cache and a pool of rows, in vLLM's order: tensor after tensor."""
        on_device, on_host = [], []
        for place, tensor in enumerate(self.tensors):
            on_device.append(tensor.data_ptr() + self._blocks * self._page)
            on_host.append(pool_address + self._rows * self._stride + place * self._page)
        device, host = (np.concatenate(each).astype(np.uint64) for each in (on_device, on_host))
        return Pieces(device, host, np.full(len(device), self._page, np.uint64))

    def expected(self, pool: Rows) -> list[Any]:
        """The tensors as they are after a load of `pool`, made by torch's own indexing."""
        torch = self._device.torch
        row_of_block = np.empty_like(self._rows)
        row_of_block[self._blocks] = self._rows
        in_order = torch.from_numpy(pool)[torch.from_numpy(row_of_block)]
        pages = in_order.view(len(row_of_block), len(self.tensors), self._page)
        return [pages[:, place].contiguous().to(self._device.name)
                for place in range(len(self.tensors))]  # fmt: skip

    def fill(self, tensors: Sequence[Any]) -> None:
        """Take these contents, before a store."""
        for own, given in zip(self.tensors, tensors, strict=True):
            own.copy_(given)
        self._device.synchronize()

    def poison(self, value: int) -> None:
        """Overwrite the result of an earlier load."""
        for tensor in self.tensors:
            tensor.fill_(value)
        self._device.synchronize()

    def equals(self, tensors: Sequence[Any]) -> bool:
        """Whether every byte is as given."""
        pairs = zip(self.tensors, tensors, strict=True)
        return all(self._device.torch.equal(own, given) for own, given in pairs)
