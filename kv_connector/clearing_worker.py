"""vLLM's worker for a GPU, wrapped so that the unowned bytes of stored rows are cleared."""

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kv_connector.group_bytes import RestOfRows
from kv_connector.host_worker import Run, plan_copy


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

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy pool rows in to engine blocks."""
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec))

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
