"""On a GPU, too, a row that is reported as stored holds its own block and zeros."""

from collections.abc import Callable

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kv_connector.host_worker import ClearingWorker
from kv_connector.pool import Piece, RestOfRows, places_of_rows

STRANGER, OWN = 0x11, 0x22
ROWS, PAGE = 8, 16


class WholeBlocks(OffloadingWorker):
    """Stands in for vLLM's worker for a GPU: its copies end when the test looks for their ends,
    and it copies a packed block whole, with what other groups left in it."""

    def __init__(self, pool: np.ndarray[tuple[int, int], np.dtype[np.int8]]) -> None:
        self.pool = pool
        self.under_way: list[tuple[int, Callable[[], None]]] = []
        self.ended = False

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        def copy() -> None:
            self.pool[dst_spec.block_ids] = STRANGER
            for start in range(0, self.pool.shape[1], PAGE):
                self.pool[dst_spec.block_ids, start + 4 : start + 8] = OWN

        self.under_way.append((job_id, copy))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self.under_way.append((job_id, lambda: None))
        return True

    def get_finished(self) -> list[TransferResult]:
        self.wait(set())
        ended, self.under_way = self.under_way, []
        return [TransferResult(job_id, True) for job_id, _ in ended]

    def wait(self, job_ids: set[int]) -> None:
        for number, (job_id, copy) in enumerate(self.under_way):
            copy()
            self.under_way[number] = (job_id, lambda: None)

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.parametrize("waited_for", [False, True])
@pytest.mark.parametrize("blocks_per_row", [1, 2])
def test_the_rest_of_a_row_is_cleared_when_its_copy_has_ended(
    blocks_per_row: int, waited_for: bool
):
    pool = np.full((ROWS, PAGE * blocks_per_row), STRANGER, np.int8)
    inner = WholeBlocks(pool)
    places = places_of_rows(pool, [PAGE], blocks_per_row)
    owned = [[Piece(0, 0, PAGE)], [Piece(0, 4, 8)]]
    worker = ClearingWorker(inner, RestOfRows(owned, places), blocks_per_row)
    blocks = list(range(2 * blocks_per_row))
    spec = GPULoadStoreSpec(blocks, [0, len(blocks)], [0, 0])
    assert worker.submit_store(1, spec, CPULoadStoreSpec([2, 5]))
    assert worker.submit_load(2, CPULoadStoreSpec([3, 4]), spec)
    if waited_for:
        worker.wait({1})
        before = pool.copy()
    assert {result.job_id for result in worker.get_finished()} == {1, 2}
    assert not waited_for or (pool == before).all(), "cleared again, under another owner"
    for row in (2, 5):
        for page in pool[row].reshape(-1, PAGE):
            assert (page[4:8] == OWN).all()
            assert not page[:4].any() and not page[8:].any()
    others = [row for row in range(ROWS) if row not in (2, 5)]
    assert (pool[others] == STRANGER).all()
    worker.shutdown()
    assert inner.ended and not worker._storing
