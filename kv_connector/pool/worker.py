"""Workers, which vLLM gives copies between the engine's KV blocks and rows of the CPU pool.

`HostWorker` copies on vLLM's CPU platform. `ClearingWorker` wraps vLLM's own worker on a GPU, which
needs CUDA streams and events.
"""

import itertools
import queue
import threading
import time
from typing import NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kv_connector.pool.copies import Run, in_places, plan_copy, regions_by_group
from kv_connector.pool.layout import Pieces, RestOfRows, owned_by_groups, pages_of

logger = init_logger("vllm.kvferry.host_worker")


_EXPEDITED, _IN_TURN, _LAST = range(3)
"""When a job is copied."""


class _Job(NamedTuple):
    """A copy to be made. Jobs are made in the order of their first two fields."""

    turn: int
    number: int
    """In the order submitted."""

    job_id: int
    store: bool
    parts: list[list[Run]]
    """By group."""


_END = -1
"""The id of the job that ends the thread."""


class HostWorker(OffloadingWorker):
    """Stores and loads asynchronously, on one thread of its own.

    Jobs are copied in the order submitted, expedited loads before all others. That is safe: vLLM
    loads a row only once its store was reported, and waits for the stores of an engine block before
    it gives the block to another request. One thread uses one core. Rows and blocks of a job belong
    to this worker from `submit_*` until `get_finished` returns the job or `wait` returns; the
    engine fences them until then.

    An accepted job never reports failure: vLLM's connector asserts success. Arguments are checked
    on submission; copying checked memory does not fail.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        blocks_per_row: int,
        owned: Pieces | None = None,
    ) -> None:
        """`owned` is what each group owns of a block, if `kv_caches` does not show it."""
        _permit_tiles()
        self._blocks_per_row = blocks_per_row
        self._region = region
        owned = owned_by_groups(kv_caches) if owned is None else owned
        places = [
            in_places(region.create_next_worker_view(page * blocks_per_row), blocks_per_row)
            for page in pages_of(kv_caches)
        ]
        self._regions_by_group = regions_by_group(kv_caches, places, owned)
        self._rest = RestOfRows(owned, places)
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._running: dict[int, threading.Event] = {}
        self._finished: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy_jobs, name="kvferry-copy", daemon=True)
        self._thread.start()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy engine blocks out to pool rows."""
        return self._submit(_IN_TURN, job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy pool rows in to engine blocks. An engine step waits for an `expedited` load."""
        turn = _EXPEDITED if expedited else _IN_TURN
        return self._submit(turn, job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, each exactly once."""
        self._raise_if_failed()
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have released their blocks. `get_finished` still reports them."""
        for job_id in job_ids:
            done = self._running.get(job_id)
            if done is not None:
                done.wait()

    def shutdown(self) -> None:
        """Finish submitted jobs, then release the pool. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(_Job(_LAST, next(self._numbers), _END, False, []))
            self._thread.join()
            self._regions_by_group = []
            self._rest.release()
            try:
                self._region.cleanup()
            except Exception:  # the process ends soon, and its mapping with it
                logger.exception("releasing the pool failed")

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between engine and pool failed") from self._error

    def _submit(
        self, turn: int, job_id: int, engine: GPULoadStoreSpec, pool: LoadStoreSpec, *, store: bool
    ) -> bool:
        assert isinstance(pool, BlockIDsLoadStoreSpec)
        parts = plan_copy(engine, pool.block_ids, self._blocks_per_row)
        self._running[job_id] = threading.Event()
        self._raise_if_failed()  # after that line: the failed thread wakes only jobs in `_running`
        self._jobs.put(_Job(turn, next(self._numbers), job_id, store, parts))
        return True

    def _copy_jobs(self) -> None:
        while (job := self._jobs.get()).job_id != _END:
            started = time.perf_counter()
            try:
                moved = self._copy(job)
            except BaseException as error:
                # The connector accepts no failure, and a reported success would announce missing
                # bytes. Stop the engine: wrong output is worse.
                logger.exception("copying between engine and pool failed")
                self._error = error
                for done in list(self._running.values()):
                    done.set()
                return
            seconds = time.perf_counter() - started
            self._finished.put(
                TransferResult(job.job_id, True, transfer_size=moved, transfer_time=seconds)
            )
            self._running.pop(job.job_id).set()

    def _copy(self, job: _Job) -> int:
        """Make all copies of a job; returns the bytes moved."""
        moved = 0
        for group, runs in enumerate(job.parts):
            for region in self._regions_by_group[group]:
                for run in runs:
                    moved += region.copy(run, store=job.store)
            if job.store and self._rest:
                for run in runs:
                    self._rest.clear(group, run.row, run.num_rows(self._blocks_per_row))
        return moved


def _permit_tiles() -> None:
    """Ask the kernel for this process's permission to use AMX tiles; no effect without AMX.

    vLLM's attention uses them and relies on an earlier matrix product, which asks. An engine that
    starts without a warm-up (eager, with a given KV cache size) has none before a first prompt
    whose blocks are all loaded: the worker died of an illegal instruction there.
    """
    torch.cpu._init_amx()


class ClearingWorker(OffloadingWorker):
    """Clears the bytes of a row that its block does not own, before the store is reported."""

    def __init__(self, worker: OffloadingWorker, rest: RestOfRows, blocks_per_row: int) -> None:
        self._worker = worker
        self._rest = rest
        self._blocks_per_row = blocks_per_row
        self._storing: dict[int, list[list[Run]]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy engine blocks out to pool rows."""
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._storing[job_id] = plan_copy(src_spec, dst_spec.block_ids, self._blocks_per_row)
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec))

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy pool rows in to engine blocks. A vLLM whose workers expedite nothing never asks."""
        how = {"expedited": True} if expedited else {}
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec, **how))

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call. The rows of a store belong to it until this call,
        which clears them: vLLM copies packed blocks whole."""
        finished: list[TransferResult] = self._worker.get_finished()
        for result in finished:
            self._clear(result.job_id)
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have released their engine blocks, and clear their rows. After a
        reset of the pool the rows may get another owner at once."""
        self._worker.wait(job_ids)
        for job_id in job_ids:
            self._clear(job_id)

    def _clear(self, job_id: int) -> None:
        for group, runs in enumerate(self._storing.pop(job_id, ())):
            for run in runs:
                self._rest.clear(group, run.row, run.num_rows(self._blocks_per_row))

    def shutdown(self) -> None:
        """End all copies and release the pool."""
        self._rest.release()
        self._worker.shutdown()
