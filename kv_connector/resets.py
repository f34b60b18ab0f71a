"""Resets of the engine's cache, and epochs of its weights."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.introduction import WorkerReport
from kv_connector.kept_back import KeptBack, Reason

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.block_pool import BlockPool

    from kv_connector.remote_tier import RemoteTier


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


# Besides the weights at start.
MOST_REMEMBERED = 64

Weights = tuple[str, ...]


class WeightEpochs:
    """Digests by rank, epochs by digests. Only the scheduler thread uses it.

    An epoch is the value of the fact `weight_epoch`: None for the weights at start, else random.
    """

    def __init__(self, num_workers: int) -> None:
        self._ranks = range(num_workers)
        self._at_start: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._epochs: dict[Weights, str | None] = {}
        self._not_watched = False
        self.sample_request = 0
        self.epoch: str | None = None

    def reset(self, epoch: str | None) -> None:
        """The pool was emptied, and `epoch` begins, with unknown weights."""
        self.epoch = epoch
        self.sample_request += 1
        self._answers = {}

    @property
    def undecided(self) -> bool:
        """Whether the epoch may still change, because workers have yet to report a sample."""
        return bool(self.sample_request) and not self._not_watched and not self._is_answered

    @property
    def _is_answered(self) -> bool:
        return len(self._answers) == len(self._ranks)

    def on_report(self, report: WorkerReport) -> bool:
        """Take a worker's new report. Returns whether its weights have changed without a reset."""
        if not report.weights_at_start:
            self._not_watched = self._not_watched or report.facts is not None
            return False
        self._at_start.setdefault(report.rank, report.weights_at_start)
        if report.sample_request != self.sample_request:
            return False  # a sample from before the reset
        expected = self._at_start[report.rank] if not self.sample_request else None
        before = self._answers.get(report.rank, expected)
        self._answers[report.rank] = report.weights
        changed = before is not None and before != report.weights
        if self._is_answered and not changed:
            self._decide()
        return changed

    def _decide(self) -> None:
        if len(self._at_start) == len(self._ranks):
            self._epochs.setdefault(tuple(self._at_start[rank] for rank in self._ranks), None)
        weights = tuple(self._answers[rank] for rank in self._ranks)
        if weights not in self._epochs and len(self._epochs) > MOST_REMEMBERED:
            del self._epochs[list(self._epochs)[1]]
        self.epoch = self._epochs.setdefault(weights, self.epoch)


logger = init_logger("vllm.kvferry.resets")


class Resets:
    """Resets of pool and tier, in step with the weights. Belongs to the scheduler thread. `remote`
    is None without a server."""

    def __init__(
        self, scheduler: "OffloadingConnectorScheduler", remote: "RemoteTier | None"
    ) -> None:
        self._scheduler = scheduler
        self._remote = remote
        self._flush = ResetFlush()
        self._weights = WeightEpochs(scheduler.config.num_workers)
        self._awake = False
        self.kept_back = KeptBack(scheduler, self._count)
        self.due = False
        """Whether the weights have changed while the pool holds blocks of the old ones. The
        connector must be reset, and the pool must not be used until that has succeeded."""

    def _count(self, reason: Reason) -> None:
        if self._remote is not None:
            self._remote.count_kept_back(reason)

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
            self._remote.hold_loads()
        requests, blocks = self.kept_back.begin_epoch(pool)
        if blocks or requests:
            logger.warning(
                "a new weight epoch began while the engine still holds %d blocks of KV: %d "
                "requests that run on it, and those that reuse it, do not use pool and server",
                blocks,
                requests,
            )
        self._weights.reset(self._remote.weight_epoch if self._remote is not None else None)
        self._name()

    # ── what the workers report ──────────────────────────────────────────────────────────

    def completed(self, jobs: Mapping[int, int]) -> None:
        """Workers report that copies have ended; `jobs` has the number of workers by job."""
        if self._flush.completed(jobs) and self._remote is not None:
            self._remote.on_reset_flushed()

    def on_reports(self, reports: Iterable[WorkerReport]) -> None:
        """Take the workers' new reports of their weights."""
        changed = [report.rank for report in reports if self._weights.on_report(report)]
        if changed:
            self.due = True
            logger.warning(
                "the weights of workers %s have changed without a reset: the CPU pool is emptied "
                "and a new weight epoch begins",
                changed,
            )
            if self._remote is not None:
                self._remote.count_weight_change()
        else:
            self._name()

    def _name(self) -> None:
        """Give the epoch to the tier, or let the tier wait for it."""
        if self._remote is None:
            return
        if self._weights.undecided:
            self._remote.await_epoch()
        else:
            self._remote.settle_epoch(self._weights.epoch)

    # ── when the weights may be touched ──────────────────────────────────────────────────

    def scheduler_runs(self) -> None:
        """vLLM looks a request up, so it is neither paused nor asleep in this step."""
        self._awake = True

    def sample_request(self, num_tokens: int) -> int | None:
        """For the workers of a step that computes `num_tokens`: the number of the newest sample
        of their weights. None where vLLM may be asleep, with unmapped weights."""
        awake, self._awake = self._awake or num_tokens > 0, False
        return self._weights.sample_request if awake else None
