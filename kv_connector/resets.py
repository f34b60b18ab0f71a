"""Resets of the connector, and weights that change without one: what the scheduler makes of them.

A reset begins a new weight epoch. Three things outlive it in the engine, each with a module of its
own: KV that was computed before (`old_kv`), copies under way (`reset_flush`), and the question
which weights the workers have now (`weight_epochs`). Weights that change without a reset are one
that was not asked for: the connector makes it.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.kept_back import KeptBack, Reason
from kv_connector.reset_flush import ResetFlush
from kv_connector.weight_epochs import WeightEpochs
from kv_connector.worker_report import WorkerReport

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.block_pool import BlockPool

    from kv_connector.remote_tier import RemoteTier

logger = init_logger("vllm.kvferry.resets")


class Resets:
    """Belongs to the scheduler thread. `remote` is None where there is no server."""

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
        """Whether the weights have changed and the pool still holds blocks of the old ones. The
        connector is to be reset, and nothing of the pool to be used until that has succeeded."""

    def _count(self, reason: Reason) -> None:
        if self._remote is not None:
            self._remote.count_kept_back(reason)

    # ── a reset ──────────────────────────────────────────────────────────────────────────

    def begin(self) -> set[int]:
        """The connector is about to be reset. Gives the jobs whose end an earlier reset has
        ordered, in no step yet: vLLM asserts that there are none, and an operator who is answered
        `false` resets again at once."""
        self._flush.begin(self._scheduler)
        undelivered = self._scheduler._current_batch_jobs_to_flush
        self._scheduler._current_batch_jobs_to_flush = set()
        return undelivered

    def end(self, undelivered: set[int], pool: "BlockPool | None", *, emptied: bool) -> None:
        """It was reset, and has `emptied` the CPU pool, or has failed to. `pool` are the engine's
        own blocks."""
        self._scheduler._current_batch_jobs_to_flush |= undelivered
        self.due = self.due and not emptied
        if self._flush and self._remote is not None:
            self._remote.hold_loads()
        requests, blocks = self.kept_back.begin_epoch(pool)
        if blocks or requests:
            logger.warning(
                "a new weight epoch began while the engine still holds %d blocks of KV: %d "
                "requests that run on it, and those that reuse it, keep away from pool and server",
                blocks,
                requests,
            )
        self._weights.reset(self._remote.weight_epoch if self._remote is not None else None)
        self._name()

    # ── what the workers report ──────────────────────────────────────────────────────────

    def completed(self, jobs: Mapping[int, int]) -> None:
        """So many workers report that these copies have ended."""
        if self._flush.completed(jobs) and self._remote is not None:
            self._remote.on_reset_flushed()

    def heard(self, reports: Iterable[WorkerReport]) -> None:
        """Workers report their weights."""
        changed = [report.rank for report in reports if self._weights.heard(report)]
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
        """Keep blocks under the name of the epoch, as far as it is known."""
        if self._remote is None:
            return
        if self._weights.undecided:
            self._remote.await_epoch()
        else:
            self._remote.settle_epoch(self._weights.epoch)

    # ── when the weights may be touched ──────────────────────────────────────────────────

    def scheduler_runs(self) -> None:
        """vLLM looks a request up: it is neither paused nor asleep in this step."""
        self._awake = True

    def look(self, num_tokens: int) -> int | None:
        """For the workers of a step that computes so many tokens: the number of the newest look
        at their weights. None where vLLM may be asleep, and the weights not be mapped."""
        awake, self._awake = self._awake or num_tokens > 0, False
        return self._weights.look if awake else None
