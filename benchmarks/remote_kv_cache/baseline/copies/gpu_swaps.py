"""Swaps of blocks between a GPU's KV cache, layer by layer, and page-locked rows.

Imported late: it needs torch. vLLM's own copy moves the blocks where vLLM is installed, else the
same call of CUDA's driver, else a call for each page.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.remote_kv_cache.baseline.copies.device_copies import Copies, CudaCopies, Pieces
from benchmarks.remote_kv_cache.work.blocks import BLOCK_SIZE, Pool, Work

Swap = Callable[[Pieces, bool], None]
"""Begin the copies of these pieces; True loads them to the GPU."""


class GpuSwaps:
    """`swap_in` and `swap_out` move all blocks of the work; `verify` compares them."""

    def __init__(self, rows: Pool, work: Work) -> None:
        """Raises `Skipped` without a GPU, or with too little memory on it."""
        if not torch.cuda.is_available():
            raise Skipped("no GPU")
        free, _ = torch.cuda.mem_get_info()
        if work.num_bytes > free * 0.9:
            raise Skipped(f"the GPU has {free >> 20} MiB free, {work.num_bytes >> 20} needed")
        self.way, self._swap = find_swap()
        self._synchronize: Callable[[], object] = torch.cuda.synchronize
        self._allocate(torch.from_numpy(rows.copy()).pin_memory(), work, "cuda")

    @classmethod
    def on_cpu(cls, rows: Pool, work: Work, copies: Copies) -> "GpuSwaps":
        """The same with the host's memory as the GPU's."""
        made = cls.__new__(cls)
        made.way, made._swap = "on a CPU", by_driver(copies)
        made._synchronize = copies.wait
        made._allocate(torch.from_numpy(rows.copy()), work, "cpu")
        return made

    def _allocate(self, host: torch.Tensor, work: Work, device: str) -> None:
        page, layers = work.model.page_bytes(BLOCK_SIZE), work.model.layers
        self.host = host
        self.cache = torch.zeros((layers, work.num_blocks, page), dtype=torch.uint8, device=device)
        page_of_layer = np.arange(layers, dtype=np.int64) * page
        layer_of_cache = page_of_layer * work.num_blocks
        self._pieces = []
        for batch in work.batches:
            on_gpu = self.cache.data_ptr() + batch.source[:, None] * page + layer_of_cache
            on_host = self.host.data_ptr() + batch.target[:, None] * host.shape[1] + page_of_layer
            sizes = np.full(on_gpu.size, page)
            self._pieces.append(
                Pieces(*(each.ravel().astype(np.uint64) for each in (on_gpu, on_host, sizes)))
            )

    def forget_cache(self) -> None:
        """Overwrite the GPU's blocks. Ends before the copies begin, which are on another stream."""
        self.cache.fill_(0)
        self._synchronize()

    def forget_rows(self) -> None:
        """Overwrite the rows."""
        self.host.fill_(0)

    def swap_in(self) -> None:
        """Rows to the GPU."""
        self._run(load=True)

    def swap_out(self) -> None:
        """The GPU to rows."""
        self._run(load=False)

    def _run(self, *, load: bool) -> None:
        for pieces in self._pieces:
            self._swap(pieces, load)
        self._synchronize()

    def verify(self, work: Work) -> None:
        """Compare every byte, after either direction."""
        cache = self.cache.cpu()
        for batch in work.batches:
            for block, row in zip(batch.source, batch.target, strict=True):
                if not torch.equal(cache[:, block].reshape(-1), self.host[row]):
                    raise WrongBytes(f"GPU block {block} and row {row} differ")


def way() -> str:
    """The name of the way that moves blocks here, or that there is no GPU."""
    return find_swap()[0] if torch.cuda.is_available() else "no GPU"


def find_swap() -> tuple[str, Swap]:
    """The name of the way, and the way. For a GPU of this machine."""
    try:
        from vllm import _custom_ops
    except ImportError:
        copies = CudaCopies.on_gpu(torch)
        name = "cuMemcpyBatchAsync" if copies.has_batched else "a cuMemcpyAsync for each page"
        return f"{name}: vLLM is not installed", by_driver(copies)
    return "vLLM's swap_blocks_batch", _by_vllm(_custom_ops)


def by_driver(copies: Copies) -> Swap:
    """The batched call, or without one a call for each piece."""

    def swap(pieces: Pieces, load: bool) -> None:
        (copies.batched if copies.has_batched else copies.one_by_one)(pieces, load=load)

    return swap


def _by_vllm(operations: Any) -> Swap:
    stream = torch.cuda.Stream()  # as vLLM's worker: the batched call refuses the default stream

    def swap(pieces: Pieces, load: bool) -> None:
        to, of = pieces.ends(load=load)
        with torch.cuda.stream(stream):
            operations.swap_blocks_batch(
                *(torch.from_numpy(each.view(np.int64)) for each in (of, to, pieces.sizes)),
                is_src_access_order_any=load,
            )

    return swap


def index_copies(source: Pool, target: Pool, work: Work) -> dict[str, Callable[[], None]]:
    """Torch's two ways to move many blocks in one call, on the 16-bit numbers of a KV cache."""
    torch.set_num_threads(1)  # as in all other variants here
    from_pool = torch.from_numpy(source.view(np.int16))
    to_pool = torch.from_numpy(target.view(np.int16))
    ids = [(torch.from_numpy(b.source), torch.from_numpy(b.target)) for b in work.batches]

    def fancy_index() -> None:
        for first, second in ids:
            to_pool[second] = from_pool[first]

    def index_copy() -> None:
        for first, second in ids:
            to_pool.index_copy_(0, second, from_pool[first])

    return {"b2b fancy index": fancy_index, "b2b index_copy_": index_copy}
