"""Resets of the engine's cache, in step with the weights."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.hooks.kept_back import WEIGHTS_UNKNOWN, KeptBack
from kv_connector.identity.weight_epochs import WeightEpochs
from kv_connector.identity.worker_reports import WorkerReport
from kv_connector.tier import metrics
from kv_connector.vllm.features import let_promotions_go_on

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kv_connector.tier.remote_tier import RemoteTier

logger = init_logger("vllm.kvferry.resets")


class ResetFlush:
    """Copies that were under way at a reset: jobs by id, with the workers yet to report each."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether a copy from before a reset may still be under way."""
        return bool(self._waiting)

    def begin(self, scheduler: "OffloadingConnectorScheduler") -> None:
        """The connector is about to be reset, which drops its jobs."""
        for job_id, job in scheduler._jobs.items():
            self._waiting[job_id] = job.pending_count

    def completed(self, jobs: Mapping[int, int]) -> bool:
        """Workers report that jobs have ended; `jobs` has the number of workers by job. Returns
        whether the last copy from before the reset is among them."""
        if not self._waiting:
            return False
        for job_id, workers in jobs.items():
            if job_id in self._waiting:
                self._waiting[job_id] -= workers
                if self._waiting[job_id] <= 0:
                    del self._waiting[job_id]
        return not self._waiting


class Resets:
    """Resets of pool and tier, in step with the weights. Belongs to the scheduler thread. `remote`
    is None without a server."""

    def __init__(
        self, scheduler: "OffloadingConnectorScheduler", remote: "RemoteTier | None"
    ) -> None:
        self._scheduler = scheduler
        self._remote = remote
        self._flush = ResetFlush()
        self.weights = WeightEpochs(scheduler.config.num_workers)
        if remote is not None:
            remote.transfers.weights = self.weights
        self._awake = False
        self.kept_back = KeptBack(scheduler, self._count)
        self.due = False
        """Whether the weights have changed while the pool holds blocks of the old ones. The
        connector must be reset, and the pool must not be used until that has succeeded."""

    def _count(self, reason: str) -> None:
        if self._remote is not None:
            self._remote.counters.count(metrics.KEPT_BACK, label=reason)

    # ── a reset ──────────────────────────────────────────────────────────────────────────

    def begin(self) -> set[int]:
        """The connector is about to be reset. Returns the jobs that an earlier reset flushes and
        no step has delivered yet. vLLM asserts that there are none, but an operator whose reset
        returned `false` resets again at once."""
        self._flush.begin(self._scheduler)
        undelivered = self._scheduler._current_batch_jobs_to_flush
        self._scheduler._current_batch_jobs_to_flush = set()
        return undelivered

    def end(self, undelivered: set[int], pool: "BlockPool | None", *, emptied: bool) -> None:
        """The connector was reset; `emptied` is False if the CPU pool could not be emptied. `pool`
        has the engine's own blocks."""
        self._scheduler._current_batch_jobs_to_flush |= undelivered
        self.due = self.due and not emptied
        if self._flush and self._remote is not None:
            self._remote.lookups.hold_loads()
            let_promotions_go_on(self._scheduler.manager)
        requests, blocks = self.kept_back.begin_epoch(pool)
        if blocks or requests:
            logger.warning(
                "a new weight epoch began while the engine still holds %d blocks of KV: %d "
                "requests that run on it, and those that reuse it, do not use pool and server",
                blocks,
                requests,
            )
        self.weights.reset(self._remote.weight_epoch if self._remote is not None else None)
        self._name()

    # ── what the workers report ──────────────────────────────────────────────────────────

    def completed(self, jobs: Mapping[int, int]) -> None:
        """Workers report that copies have ended; `jobs` has the number of workers by job."""
        if self._flush.completed(jobs) and self._remote is not None:
            self._remote.lookups.release_loads()

    def on_reports(self, reports: Iterable[WorkerReport]) -> None:
        """Take the workers' new reports of their weights."""
        changed = [report.rank for report in reports if self.weights.on_report(report)]
        if changed:
            self.due = True
            logger.warning(
                "the weights of workers %s have changed without a reset: the CPU pool is emptied "
                "and a new weight epoch begins",
                changed,
            )
            if self._remote is not None:
                self._remote.counters.count(metrics.WEIGHT_CHANGES)
        else:
            self._name()

    def _name(self) -> None:
        """Give the epoch to the tier, or let the tier wait for it."""
        if self._remote is None:
            return
        if self.weights.undecided:
            self._remote.await_epoch()
        else:
            self._remote.settle_epoch(self.weights.epoch)

    # ── a request ────────────────────────────────────────────────────────────────────────

    def begin_request(self, request: "Request", engine_tokens: int) -> None:
        """The engine looks this request up, with `engine_tokens` from its own cache."""
        self.kept_back.begin(request, engine_tokens)
        if self.weights.waits_too_long(request.request_id):
            self.kept_back.keep(request.request_id, WEIGHTS_UNKNOWN)

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, and their last stores were submitted or dropped."""
        self.kept_back.finished(request_ids)
        for request_id in request_ids:
            self.weights.finished(request_id)

    # ── when the weights may be touched ──────────────────────────────────────────────────

    def scheduler_runs(self) -> None:
        """vLLM looks a request up, so it is neither paused nor asleep in this step."""
        self._awake = True

    def sample_request(self, num_tokens: int) -> int | None:
        """For the workers of a step that computes `num_tokens`: the number of the newest sample
        of their weights. None where vLLM may be asleep, with unmapped weights."""
        awake, self._awake = self._awake or num_tokens > 0, False
        # Blocks that wait to be stored were computed after the last reset: no sleep came since.
        awake = awake or (self._remote is not None and self._remote.transfers.num_unconfirmed > 0)
        return self.weights.request_of_step() if awake else None
