"""Copies between engine and pool that a reset found under way, until all of them have ended.

vLLM forgets such copies at a reset and gives their rows out again. The workers end them in the
next step that they execute. A copy of their own that comes later is ordered behind them, a block
that the server sends into such a row is not: it must wait.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )


class ResetFlush:
    """Jobs by id, with the number of workers that have yet to report each."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether a copy of before a reset may still be under way."""
        return bool(self._waiting)

    def begin(self, scheduler: "OffloadingConnectorScheduler") -> None:
        """The connector is about to be reset, which forgets its jobs."""
        for job_id, job in scheduler._jobs.items():
            self._waiting[job_id] = job.pending_count

    def completed(self, jobs: Mapping[int, int]) -> bool:
        """So many workers report that these jobs have ended. Gives whether the last copy of
        before the reset is among them."""
        if not self._waiting:
            return False
        for job_id, workers in jobs.items():
            if job_id in self._waiting:
                self._waiting[job_id] -= workers
                if self._waiting[job_id] <= 0:
                    del self._waiting[job_id]
        return not self._waiting
