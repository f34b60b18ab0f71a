"""Introduction of an engine to the server: reports of its workers, its namespace, weight epochs.

The namespace of an engine's blocks is known when each worker has reported its facts. Until then the
server is not used. Reports travel in the metadata of the engine's steps and not in vLLM's handshake
(docs/decisions.md: "The namespace is decided late"):

    worker → scheduler   `FerryWorkerMetadata.reports`, in every step until it is acknowledged
    scheduler → worker   `FerryMetadata.received`, in every step: the acknowledgements

A report that changes gets a higher revision, and is sent until that revision is acknowledged. To
report something new, give `WorkerReport` a field with a default, and set it by `Reporter.change`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.logger import init_logger

from kv_connector.identity.namespace import Facts
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.pool.pool_file import PoolFile
from kv_connector.tier.metrics import CANARIES
from remote_server.errors import ConfigError

if TYPE_CHECKING:
    from kv_connector.tier.remote_tier import RemoteTier

logger = init_logger("vllm.kvferry.introduction")

Revision = int


@dataclass(frozen=True)
class WorkerReport:
    """The report of one worker. Plain data: it is pickled, on some executors to another host."""

    rank: int
    """The worker's rank in its engine, from 0."""

    revision: Revision = 0
    """Grows with each change of this worker's report."""

    facts: Facts | None = None
    """The worker's facts; None if they could not be established."""

    self_test: Report | None = None
    """None without a server."""

    failed_hooks: tuple[str, ...] = ()
    """Hooks of the worker whose exceptions were kept from the engine, each once."""

    pool: PoolFile | None = None
    """The file behind the pool that the worker has mapped."""

    is_page_locked: bool | None = None
    """Whether CUDA has page-locked that pool; None on the CPU platform."""

    weights_at_start: str = ""
    """A digest of its parameters at start; empty if they are not watched."""

    weights: str = ""
    """The newest digest."""

    sample_request: int = 0
    """The number of the scheduler's request for which `weights` was taken."""


@dataclass
class FerryWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata of one step, with the workers' reports.

    vLLM's `aggregate` returns vLLM's class and would lose the reports. It is never called on that
    class, because our workers always send this one.
    """

    reports: dict[int, WorkerReport] = field(default_factory=dict)
    """By rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FerryWorkerMetadata":
        """The completed jobs and reports of both; of two reports of one worker the newer."""
        merged = super().aggregate(other)
        reports = dict(self.reports)
        for rank, theirs in reports_in(other).items():
            ours = reports.get(rank)
            if ours is None or ours.revision < theirs.revision:
                reports[rank] = theirs
        return FerryWorkerMetadata(**vars(merged), reports=reports)


@dataclass
class FerryMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata for the workers of one step, with acknowledgements of their reports."""

    received: dict[int, Revision] = field(default_factory=dict)
    """The newest revision received from each rank."""

    sample_request: int | None = None
    """The number of the scheduler's newest request for a sample of the weights; None where they
    must not be read."""


def reports_in(metadata: KVConnectorWorkerMetadata | None) -> Mapping[int, WorkerReport]:
    """The reports of a step, by rank; empty for metadata that is not ours."""
    return metadata.reports if isinstance(metadata, FerryWorkerMetadata) else {}


def with_report(
    metadata: OffloadingWorkerMetadata | None, report: WorkerReport | None
) -> FerryWorkerMetadata | None:
    """The metadata of vLLM's worker with a report added. None if there is neither."""
    if metadata is None and report is None:
        return None
    reports = {} if report is None else {report.rank: report}
    return FerryWorkerMetadata(**vars(metadata or OffloadingWorkerMetadata()), reports=reports)


def with_received(
    metadata: OffloadingConnectorMetadata,
    received: Mapping[int, Revision],
    sample_request: int | None = None,
) -> FerryMetadata:
    """The metadata of vLLM's scheduler with acknowledgements added."""
    return FerryMetadata(**vars(metadata), received=dict(received), sample_request=sample_request)


class Reporter:
    """A worker's side: its report, and the revision that the scheduler acknowledged."""

    def __init__(self, rank: int) -> None:
        self.report = WorkerReport(rank)
        self._received: Revision = -1

    def change(self, **fields: Any) -> None:
        """Report these fields of `WorkerReport` from now on. No effect if they have these values
        already."""
        if any(getattr(self.report, name) != value for name, value in fields.items()):
            self.report = replace(self.report, revision=self.report.revision + 1, **fields)

    def bound(self, metadata: KVConnectorMetadata) -> None:
        """Take the scheduler's metadata of a step. Other connectors' metadata is ignored."""
        if isinstance(metadata, FerryMetadata):
            self._received = metadata.received.get(self.report.rank, -1)

    @property
    def due(self) -> WorkerReport | None:
        """The report to send with this step; None once the scheduler has acknowledged it."""
        return self.report if self._received != self.report.revision else None


class Reports:
    """The scheduler's side: the newest report of every worker."""

    def __init__(self, num_workers: int) -> None:
        self._ranks = range(num_workers)
        self.by_rank: dict[int, WorkerReport] = {}

    @property
    def received(self) -> dict[int, Revision]:
        """The newest revision of each rank: the acknowledgements for the workers."""
        return {rank: report.revision for rank, report in self.by_rank.items()}

    @property
    def page_locked(self) -> bool | None:
        """Whether the pool is page-locked in every worker that knows; None if none knows."""
        known = [report.is_page_locked for report in self.by_rank.values()]
        return None if set(known) <= {None} else False not in known

    @property
    def missing(self) -> list[int]:
        """Ranks that have not reported."""
        return [rank for rank in self._ranks if rank not in self.by_rank]

    def take(
        self, reports: Iterable[WorkerReport]
    ) -> list[tuple[WorkerReport | None, WorkerReport]]:
        """The new reports, each after the one that it replaces. Repeated reports, which a worker
        sends until it is acknowledged, are left out."""
        news = []
        for report in reports:
            before = self.by_rank.get(report.rank)
            if before is None or before.revision < report.revision:
                self.by_rank[report.rank] = report
                news.append((before, report))
        return news


MOST_STEPS = 200
"""Steps in which every worker must report. One is enough where the scheduler waits for the output
of a step; with steps in flight it is their number plus one."""


class Introduction:
    """Belongs to the scheduler thread. It ends with one call of `declare` or `stay_out`."""

    def __init__(
        self, tier: "RemoteTier", reports: Reports, label: str, facts: Mapping[str, str],
        not_known: Iterable[str],
    ) -> None:  # fmt: skip
        """`facts` are the scheduler's own; `not_known` are reasons why facts could not be
        established."""
        self._tier = tier
        self._reports = reports
        self._label = label
        self._facts = dict(facts)
        self._not_known = list(not_known)
        self._steps = 0
        self._ended = False
        self.pool_is_wrong = False
        """Whether a canary found that copies between engine and pool change bytes. No request may
        use the pool then."""

    def step_begins(self) -> None:
        """The engine begins a step. Requests and an idle engine wait at most `MOST_STEPS` for
        reports; a later report still counts."""
        self._steps += 1
        if self._steps == MOST_STEPS and not self._ended:
            logger.error(
                "workers %s have not reported in %d steps; the server is not used until they do",
                self._reports.missing, MOST_STEPS,
            )  # fmt: skip
            self._tier.lookups.hold_nothing()

    def on_reports(self, news: Iterable[tuple[WorkerReport | None, WorkerReport]]) -> None:
        """Workers have reported; `news` is the result of `Reports.take`."""
        for before, report in news:
            logger.debug("worker %d: %s", report.rank, report)
            self._count(before, report)
        self._tier.counters.page_locked = self._reports.page_locked
        if not self._ended and not self._reports.missing:
            self._ended = True
            self._introduce()

    def _introduce(self) -> None:
        reasons = list(self._not_known)
        for rank, report in sorted(self._reports.by_rank.items()):
            if report.facts is None:
                reasons.append(f"worker {rank} could not establish its facts")
            if report.self_test is not None and report.self_test.outcome is Outcome.FAILED:
                reasons.append(
                    f"the start-up canary of worker {rank} failed: {report.self_test.detail}"
                )
        wrong = {
            name: f"the start-up canary of worker {rank} failed: {why}"
            for rank, report in sorted(self._reports.by_rank.items())
            for name, why in (report.self_test.failed if report.self_test is not None else ())
        }
        if not reasons and not self._tier.watch.exclude(wrong):
            reasons += wrong.values()
        if self.pool_is_wrong:
            reasons.append("the CPU pool is not used either")
        if reasons:
            self._tier.stay_out("; ".join(reasons))
            return
        try:
            self._tier.declare(self._label, self._all_facts())
        except ConfigError as error:
            self._tier.stay_out(str(error))

    def _all_facts(self) -> Facts:
        """The facts of scheduler and workers; where two differ, the fact is both values."""
        facts = dict(self._facts)
        for _, report in sorted(self._reports.by_rank.items()):
            for name, value in (report.facts or {}).items():
                known = facts.setdefault(name, value)
                if value not in known.split(" + "):
                    facts[name] = f"{known} + {value}"
        return facts

    def _count(self, before: WorkerReport | None, report: WorkerReport) -> None:
        """Count a worker's report once, here: workers have no metrics of their own."""
        counted = before.failed_hooks if before is not None else ()
        for hook in report.failed_hooks:
            if hook not in counted:
                self._tier.counters.count_hook_error(hook)
        if report.self_test is not None and (before is None or before.self_test is None):
            self.pool_is_wrong |= report.self_test.miscopied
            self._tier.counters.count(CANARIES, label=report.self_test.outcome)
            if report.self_test.outcome is not Outcome.FAILED:  # some of several servers
                self._tier.counters.count(CANARIES, len(report.self_test.failed), Outcome.FAILED)
            if report.self_test.outcome is Outcome.BROKEN:
                self._tier.counters.count_hook_error("canary")
