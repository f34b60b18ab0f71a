"""The host worker moves exactly the bytes of its jobs, in their order."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kv_connector.pool.copies import Run, plan_copy
from kv_connector.pool.worker import ClearingWorker, HostWorker

NUM_BLOCKS = 24
NUM_ROWS = 16
PAGE = 48


class Pool:
    """Stands in for vLLM's shared region: the same row layout, in ordinary memory."""

    def __init__(self, row_bytes: int) -> None:
        self.bytes = torch.zeros(NUM_ROWS, row_bytes, dtype=torch.int8)
        self._used = 0

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        start = self._used
        self._used += tensor_page_size
        return self.bytes[:, start : start + tensor_page_size]

    def cleanup(self) -> None:
        pass


def engine_cache(layers: int, page: int = PAGE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers)
    shape = (layers, NUM_BLOCKS, page)
    return torch.randint(-128, 127, shape, dtype=torch.int8, generator=generator)


def make_worker(
    caches: list[torch.Tensor], groups: list[list[int]], blocks_per_row: int
) -> tuple[HostWorker, Pool]:
    tensors = [CanonicalKVCacheTensor(t, t.shape[1]) for cache in caches for t in cache]
    refs = [[CanonicalKVCacheRef(i, tensors[i].page_size_bytes) for i in ids] for ids in groups]
    pool = Pool(sum(t.page_size_bytes for t in tensors) * blocks_per_row + 64)
    return HostWorker(CanonicalKVCaches(tensors, refs), pool, blocks_per_row), pool


def finish(worker: HostWorker, job: int) -> None:
    worker.wait({job})
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(job, True)]


@pytest.mark.parametrize("blocks_per_row", [1, 3])
@pytest.mark.parametrize("blocks", [[4, 5, 6, 7, 8, 9], [9, 2, 17, 3, 4, 20]], ids=str)
def test_what_was_stored_comes_back_in_other_blocks(blocks: list[int], blocks_per_row: int):
    cache = engine_cache(layers=4)
    worker, pool = make_worker([cache], [[0, 1, 2, 3]], blocks_per_row)
    rows = [7, 2, 3, 11, 12, 0][: len(blocks) // blocks_per_row]
    before = cache.clone()
    worker.submit_store(1, GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows))
    finish(worker, 1)
    target = [b + 1 if b < 23 else 0 for b in [10, 11, 12, 13, 21, 22]]
    worker.submit_load(2, CPULoadStoreSpec(rows), GPULoadStoreSpec(target, [len(target)], [0]))
    finish(worker, 2)
    assert torch.equal(cache[:, target], before[:, blocks])
    untouched = [b for b in range(NUM_BLOCKS) if b not in target]
    assert torch.equal(cache[:, untouched], before[:, untouched])
    other_rows = [r for r in range(NUM_ROWS) if r not in rows]
    assert not pool.bytes[other_rows].any()
    worker.shutdown()


def test_a_load_may_begin_inside_a_row():
    cache = engine_cache(layers=2)
    worker, _ = make_worker([cache], [[0, 1]], blocks_per_row=4)
    before = cache.clone()
    worker.submit_store(1, GPULoadStoreSpec(list(range(8)), [8], [0]), CPULoadStoreSpec([5, 3]))
    worker.submit_load(2, CPULoadStoreSpec([5, 3]), GPULoadStoreSpec([16, 17, 18, 19], [4], [2]))
    worker.wait({1, 2})
    assert torch.equal(cache[:, 16:20], before[:, 2:6])
    worker.shutdown()


def test_blocks_that_follow_each_other_make_one_run():
    spec = GPULoadStoreSpec([4, 5, 6, 9], [4], [0])
    assert plan_copy(spec, np.array([1, 2, 3, 4], np.int32), 1) == [
        [Run(4, 1, 0, 3), Run(9, 4, 0, 1)]
    ]
    assert plan_copy(spec, np.array([1, 7], np.int32), 2) == [
        [Run(4, 1, 0, 2), Run(6, 7, 0, 1), Run(9, 7, 1, 1)]
    ]


@pytest.mark.parametrize("rows", [[1], [1, 2, 3]])
def test_a_plan_whose_rows_do_not_fit_its_blocks_is_refused(rows: list[int]):
    with pytest.raises(ValueError, match="rows"):
        plan_copy(GPULoadStoreSpec([1, 2], [2], [0]), np.array(rows, np.int32), 1)


def test_each_job_is_reported_once_with_its_size():
    worker, _ = make_worker([engine_cache(layers=4)], [[0, 1, 2, 3]], blocks_per_row=1)
    for job in range(50):
        worker.submit_store(job, GPULoadStoreSpec([job % 20], [1], [0]), CPULoadStoreSpec([3]))
    worker.wait(set(range(50)))
    finished = worker.get_finished()
    assert [r.job_id for r in finished] == list(range(50))
    assert {r.transfer_size for r in finished} == {4 * PAGE}
    assert worker.get_finished() == []
    worker.shutdown()
    worker.shutdown()


class Held:
    """A region whose copies wait for the test, one after the other."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def copy(self, _run: Run, *, store: bool) -> int:
        self.began.release()
        assert self.go_on.acquire(timeout=60)
        return 1


def test_an_expedited_load_is_copied_before_jobs_that_have_not_begun():
    worker, _ = make_worker([engine_cache(layers=1)], [[0]], blocks_per_row=1)
    held: Any = Held()
    worker._regions_by_group = [[held]]
    engine, rows = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([1])
    worker.submit_load(1, rows, engine)
    assert held.began.acquire(timeout=60)  # its copy is under way, and goes on
    worker.submit_store(2, engine, rows)
    worker.submit_load(3, rows, engine)
    worker.submit_load(4, rows, engine, expedited=True)
    held.go_on.release(4)
    worker.wait({1, 2, 3, 4})
    assert [result.job_id for result in worker.get_finished()] == [1, 4, 2, 3]
    worker.shutdown()


@pytest.mark.parametrize("expedites", [True, False])
def test_a_worker_that_expedites_nothing_is_never_asked_to(expedites: bool):
    """vLLM 0.32's takes three arguments."""
    calls: list[dict[str, Any]] = []

    def submit_load(*_: Any, **how: Any) -> bool:
        calls.append(how)
        return True

    inner: Any = SimpleNamespace(submit_load=submit_load)
    worker = ClearingWorker(inner, rest=inner, blocks_per_row=1)
    engine, rows = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([1])
    assert worker.submit_load(1, rows, engine, expedites)
    assert calls == [{"expedited": True} if expedites else {}]


def test_a_worker_asks_for_the_use_of_tiles(monkeypatch: pytest.MonkeyPatch):
    """An engine whose first prompt was loaded died in vLLM's attention: illegal instruction."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1))
    make_worker([engine_cache(layers=1)], [[0]], 1)[0].shutdown()
    assert asked
