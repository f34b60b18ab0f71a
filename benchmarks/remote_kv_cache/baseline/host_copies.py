"""The copies that need torch or vLLM: index operations, the host worker, and a GPU's swaps.

Imported late, so that the other copies can be measured without torch and vLLM.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.remote_kv_cache.baseline.blocks import BLOCK_SIZE, Pool, Work
from kv_connector.host_worker import HostWorker


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


class HostWorkerCopies:
    """The connector's own worker between engine blocks (layer by layer) and pool rows.

    `engine` and `rows` are equal amounts of memory in the two layouts. The worker copies on its
    own thread; a trial lasts until all its jobs are finished.
    """

    def __init__(self, engine: Pool, rows: Pool, work: Work) -> None:
        self._layers, page = work.model.layers, work.model.page_bytes(BLOCK_SIZE)
        self.engine = engine.reshape(self._layers, work.num_blocks, page)
        self.rows = rows
        self._work = work
        tensors = [CanonicalKVCacheTensor(torch.from_numpy(layer.view(np.int8)), page)
                   for layer in self.engine]  # fmt: skip
        refs = [CanonicalKVCacheRef(number, page) for number in range(self._layers)]
        self._worker = HostWorker(CanonicalKVCaches(tensors, [refs]), _Region(rows), 1)
        self._last_job = 0

    def store(self) -> None:
        """Engine blocks to rows."""
        self._run(store=True)

    def load(self) -> None:
        """Rows to engine blocks."""
        self._run(store=False)

    def verify(self) -> None:
        """Compare every byte of both layouts."""
        page = self.engine.shape[2]
        for batch in self._work.batches:
            for block, row in zip(batch.source, batch.target, strict=True):
                if not np.array_equal(
                    self.engine[:, block], self.rows[row].reshape(self._layers, page)
                ):
                    raise WrongBytes(f"engine block {block} and row {row} differ")

    def close(self) -> None:
        self._worker.shutdown()

    def _run(self, *, store: bool) -> None:
        jobs = set()
        for batch in self._work.batches:
            self._last_job += 1
            engine = GPULoadStoreSpec(batch.source.tolist(), [len(batch.source)], [0])
            pool = CPULoadStoreSpec(batch.target.tolist())
            if store:
                self._worker.submit_store(self._last_job, engine, pool)
            else:
                self._worker.submit_load(self._last_job, pool, engine)
            jobs.add(self._last_job)
        self._worker.wait(jobs)
        self._worker.get_finished()


class _Region:
    """A stand-in for vLLM's shared region: the same row layout, in this benchmark's memory."""

    def __init__(self, rows: Pool) -> None:
        self._rows = torch.from_numpy(rows.view(np.int8))
        self._used = 0

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        start = self._used
        self._used += tensor_page_size
        return self._rows[:, start : start + tensor_page_size]

    def cleanup(self) -> None:
        pass


class GpuSwaps:
    """Blocks between a GPU's cache, layer by layer, and page-locked rows, with vLLM's own copy.

    Raises `Skipped` without a GPU, or with too little memory on it.
    """

    def __init__(self, rows: Pool, work: Work) -> None:
        if not torch.cuda.is_available():
            raise Skipped("no GPU")
        free, _ = torch.cuda.mem_get_info()
        if work.num_bytes > free * 0.9:
            raise Skipped(f"the GPU has {free >> 20} MiB free, {work.num_bytes >> 20} needed")
        from vllm import _custom_ops

        self._swap_blocks = _custom_ops.swap_blocks_batch
        self._page, layers = work.model.page_bytes(BLOCK_SIZE), work.model.layers
        self.host = torch.from_numpy(rows.copy()).pin_memory()
        self.cache = torch.zeros(
            (layers, work.num_blocks, self._page), dtype=torch.uint8, device="cuda"
        )
        self._on_gpu, self._on_host = [], []
        page_of_layer = np.arange(layers, dtype=np.int64) * self._page
        layer_of_cache = page_of_layer * work.num_blocks
        for batch in work.batches:
            on_gpu = self.cache.data_ptr() + batch.source[:, None] * self._page + layer_of_cache
            on_host = self.host.data_ptr() + batch.target[:, None] * rows.shape[1] + page_of_layer
            self._on_gpu.append(torch.from_numpy(on_gpu.ravel()))
            self._on_host.append(torch.from_numpy(on_host.ravel()))
        self._sizes = torch.full_like(self._on_gpu[0], self._page)

    def swap_in(self) -> None:
        """Rows to the GPU."""
        for gpu, host in zip(self._on_gpu, self._on_host, strict=True):
            self._swap_blocks(host, gpu, self._sizes)
        torch.cuda.synchronize()

    def swap_out(self) -> None:
        """The GPU to rows."""
        for gpu, host in zip(self._on_gpu, self._on_host, strict=True):
            self._swap_blocks(gpu, host, self._sizes)
        torch.cuda.synchronize()

    def verify(self, work: Work) -> None:
        """Compare every byte, after either direction."""
        cache = self.cache.cpu()
        for batch in work.batches:
            for block, row in zip(batch.source, batch.target, strict=True):
                if not torch.equal(cache[:, block].reshape(-1), self.host[row]):
                    raise WrongBytes(f"GPU block {block} and row {row} differ")
