"""The copies of the connector's host worker.

Imported late: it needs torch and vLLM, and the other copies do not.
"""

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.work.blocks import BLOCK_SIZE, Pool, Work
from kv_connector.pool.worker import HostWorker


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
