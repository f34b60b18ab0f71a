"""A worker whose KV cache vLLM has allocated, in a layout and with groups of a test's choice."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_connector import FULL, RECURRENT, Layers, configs_of, group_of
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import SlidingWindowSpec, group_kernel_blocks
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.worker.utils import allocate_kv_cache

from kv_connector.connector import KVFerryConnector

WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
)
# A quarter of the page: vLLM packs groups of different page sizes into one block.
NARROW = replace(WINDOW, head_size=16)

HYBRIDS: dict[str, tuple[str, list[Layers]]] = {
    "a group with fewer layers": ("LBHNC", [group_of(0, FULL, 3), group_of(1, WINDOW, 2)]),
    "a state smaller than its page": ("LBHNC", [group_of(0, FULL, 2), group_of(1, RECURRENT, 2)]),
    "packed blocks of two sizes": ("BLHNC", [group_of(0, FULL, 2), group_of(1, NARROW, 3)]),
    "packed blocks of one page size": ("BLHNC", [group_of(0, FULL, 3), group_of(1, WINDOW, 1)]),
}
"""Layouts and groups of hybrid models."""


class Worker:
    """A worker of a real connector, and the KV cache that vLLM allocates for it."""

    def __init__(self, config: Any, cache: Any, layout: str) -> None:
        self.cache = cache
        self.kv_caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
        self.connector = KVFerryConnector(config, KVConnectorRole.WORKER, cache)
        self.connector.register_kv_caches(self.kv_caches)
        self.spec: Any = self.connector.connector_worker.spec
        self.copies: Any = self.connector.connector_worker.worker
        base = self.spec._region.base_tensor.numpy()
        rows = base.reshape(self.spec.num_chunks, self.spec.kv_bytes_per_chunk)
        self.rows = rows[:, : self.spec.cpu_page_size_per_worker]

    def backing(self) -> np.ndarray[Any, np.dtype[np.int8]]:
        """All of the engine's cache, flat."""
        storage = next(iter(self.kv_caches.values())).untyped_storage()
        return torch.tensor([], dtype=torch.int8).set_(storage).numpy()

    def own(self, group: int, block: int) -> list[torch.Tensor]:
        """What the layers of a group see of a block."""
        return [
            group_kernel_blocks(self.kv_caches[layer], self.cache.num_blocks)[block]
            for layer in self.cache.kv_cache_groups[group].layer_names
        ]

    def submit_store(self, group: int, block: int, row: int) -> None:
        assert self.copies.submit_store(1, self._blocks(group, block), CPULoadStoreSpec([row]))

    def _blocks(self, group: int, block: int) -> GPULoadStoreSpec:
        sizes = [int(number == group) for number in range(len(self.cache.kv_cache_groups))]
        return GPULoadStoreSpec([block], sizes, [0] * len(sizes))

    def copy(self, group: int, block: int, row: int, *, store: bool) -> None:
        engine = self._blocks(group, block)
        if store:
            assert self.copies.submit_store(1, engine, CPULoadStoreSpec([row]))
        else:
            assert self.copies.submit_load(1, CPULoadStoreSpec([row]), engine)
        self.copies.wait({1})
        assert [result.job_id for result in self.copies.get_finished()] == [1]

    def shutdown(self) -> None:
        del self.rows
        self.connector.shutdown()


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeWorker]:
    """A maker of workers in a layout and with groups of the caller's choice, which end with the
    test."""
    monkeypatch.setattr("kv_connector.connector.namespace.worker_facts", lambda *_: {})
    made: list[Worker] = []
    folders = (tmp_path / f"engine {number}" for number in itertools.count())

    def make(layout: str, groups: Sequence[Layers], *, rank: int = 0, ranks: int = 1) -> Worker:
        config, cache = configs_of(
            model, next(folders), monkeypatch, groups, layout=layout, server=None
        )
        parallel = config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = ranks
        parallel.rank = rank
        made.append(Worker(config, cache, layout))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()
