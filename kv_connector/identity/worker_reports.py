"""Reports of the workers: what each found of itself, and how reports reach the scheduler.

Reports travel in the metadata of the engine's steps and not in vLLM's handshake (docs/decisions.md:
"The namespace is decided late"):

    worker → scheduler   `FerryWorkerMetadata.reports`, in every step until it is acknowledged
    scheduler → worker   `FerryMetadata.received`, in every step: the acknowledgements

A report that changes gets a higher revision, and is sent until that revision is acknowledged. To
report something new, give `WorkerReport` a field with a default, and set it by `Reporter.change`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kv_connector.identity.namespace import Facts
from kv_connector.identity.self_test import Report
from kv_connector.pool.sharing import PoolFile

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
