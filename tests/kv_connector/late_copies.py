"""A stand-in for the streams of a GPU: copies that run some time after they were submitted.

vLLM's worker on a GPU has a stream for each direction. A copy reads and writes at any time between
its submission and its end; copies of one direction run in order. `wait` blocks until they have run.
"""

from collections import deque
from typing import Any

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)


class LateCopies(OffloadingWorker):
    """Runs each copy by `worker` after `steps` more calls of `get_finished`, or when it is waited
    for."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self.steps = 0
        self._now = 0
        self._stores: deque[tuple[int, int, Any]] = deque()
        self._loads: deque[tuple[int, int, Any]] = deque()
        self._ended: list[TransferResult] = []

    @property
    def under_way(self) -> int:
        """Copies that were submitted and have not run."""
        return len(self._stores) + len(self._loads)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._stores.append((job_id, self._now + self.steps, (src_spec, dst_spec)))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._loads.append((job_id, self._now + self.steps, (src_spec, dst_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        for queue in (self._stores, self._loads):
            while queue and queue[0][1] <= self._now:
                self._run_first(queue)
        self._now += 1
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for queue in (self._stores, self._loads):
            while not job_ids.isdisjoint([job_id for job_id, *_ in queue]):
                self._run_first(queue)

    def _run_first(self, queue: deque[tuple[int, int, Any]]) -> None:
        job_id, _, specs = queue.popleft()
        submit = self._worker.submit_store if queue is self._stores else self._worker.submit_load
        submit(job_id, *specs)
        self._worker.wait({job_id})
        self._ended += self._worker.get_finished()

    def shutdown(self) -> None:
        self._worker.shutdown()
