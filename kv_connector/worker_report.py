"""What each worker reports to the scheduler, and the way it travels.

vLLM has one handshake at start, and under `MultiConnector` it carries the metadata of one connector
only: the first that has any. So a worker's report travels in the metadata of the engine's steps,
which `MultiConnector` keeps apart by connector:

    worker → scheduler   `FerryWorkerMetadata.reports`, in every step until it was heard
    scheduler → worker   `FerryMetadata.heard`, in every step

A worker may have something new to report at any time. Its report then has a higher revision, and is
sent until the scheduler has heard that one. To report one thing more, give `WorkerReport` a field
with a default, and set it by `Reporter.change`.
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

from kv_connector.canary import Report
from kv_connector.namespace import Facts
from kv_connector.pool_file import PoolFile

Revision = int


@dataclass(frozen=True)
class WorkerReport:
    """All that one worker reports. Plain data: it is pickled, on some executors to another host."""

    rank: int
    """Of the worker in its engine, from 0 to the number of workers."""

    revision: Revision = 0
    """Grows with each change of this worker's report."""

    facts: Facts | None = None
    """What the worker runs on; None where it could not be found out."""

    canary: Report | None = None
    """None where there is no server."""

    failed_hooks: tuple[str, ...] = ()
    """Hooks of the worker that failed and were kept from the engine, each named once."""

    pool: PoolFile | None = None
    """The file behind the pool that the worker has mapped."""

    weights_at_start: str = ""
    """A digest of its parameters when it started; empty where they are not watched."""

    weights: str = ""
    """The newest digest."""

    look: int = 0
    """The scheduler's look that `weights` was taken for."""


@dataclass
class FerryWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata of one step, and the reports of the workers in it.

    `aggregate` of vLLM's class returns its own class: the reports would be lost with the second
    worker. A worker of ours never sends vLLM's class, so none is the first.
    """

    reports: dict[int, WorkerReport] = field(default_factory=dict)
    """By rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FerryWorkerMetadata":
        """The completed jobs and the reports of both. Of two reports of one worker the newer."""
        merged = super().aggregate(other)
        reports = dict(self.reports)
        for rank, theirs in reports_in(other).items():
            ours = reports.get(rank)
            if ours is None or ours.revision < theirs.revision:
                reports[rank] = theirs
        return FerryWorkerMetadata(**vars(merged), reports=reports)


@dataclass
class FerryMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata for the workers of one step, and what the scheduler has heard from them."""

    heard: dict[int, Revision] = field(default_factory=dict)
    """The newest revision heard of each rank."""

    look: int | None = None
    """The scheduler's newest look at the weights; None where they must not be touched."""


def reports_in(metadata: KVConnectorWorkerMetadata | None) -> Mapping[int, WorkerReport]:
    """The reports that came with a step, by rank; none in metadata that is not ours."""
    return metadata.reports if isinstance(metadata, FerryWorkerMetadata) else {}


def with_report(
    metadata: OffloadingWorkerMetadata | None, report: WorkerReport | None
) -> FerryWorkerMetadata | None:
    """What vLLM's worker has for the scheduler, and a report. None where there is neither."""
    if metadata is None and report is None:
        return None
    reports = {} if report is None else {report.rank: report}
    return FerryWorkerMetadata(**vars(metadata or OffloadingWorkerMetadata()), reports=reports)


def with_heard(
    metadata: OffloadingConnectorMetadata, heard: Mapping[int, Revision], look: int | None = None
) -> FerryMetadata:
    """What vLLM's scheduler has for the workers, and what was heard from them."""
    return FerryMetadata(**vars(metadata), heard=dict(heard), look=look)


class Reporter:
    """A worker's side: its report, and whether the scheduler has heard it."""

    def __init__(self, rank: int) -> None:
        self.report = WorkerReport(rank)
        self._heard: Revision = -1

    def change(self, **fields: Any) -> None:
        """Report these fields of `WorkerReport` from now on. Nothing happens where all of them
        have these values already."""
        if any(getattr(self.report, name) != value for name, value in fields.items()):
            self.report = replace(self.report, revision=self.report.revision + 1, **fields)

    def bound(self, metadata: KVConnectorMetadata) -> None:
        """The scheduler's metadata of a step has come. Other connectors' metadata is ignored."""
        if isinstance(metadata, FerryMetadata):
            self._heard = metadata.heard.get(self.report.rank, -1)

    @property
    def due(self) -> WorkerReport | None:
        """What to send with this step: the report, while the scheduler has not heard it."""
        return self.report if self._heard != self.report.revision else None


class Reports:
    """The scheduler's side: the newest report of every worker."""

    def __init__(self, num_workers: int) -> None:
        self._ranks = range(num_workers)
        self.by_rank: dict[int, WorkerReport] = {}

    @property
    def heard(self) -> dict[int, Revision]:
        """The newest revision of each rank, for the workers to know."""
        return {rank: report.revision for rank, report in self.by_rank.items()}

    @property
    def missing(self) -> list[int]:
        """Ranks that were never heard."""
        return [rank for rank in self._ranks if rank not in self.by_rank]

    def take(
        self, reports: Iterable[WorkerReport]
    ) -> list[tuple[WorkerReport | None, WorkerReport]]:
        """The reports that are news, each behind the one that it replaces. A worker sends its
        report again until it knows that it was heard, and those are no news."""
        news = []
        for report in reports:
            before = self.by_rank.get(report.rank)
            if before is None or before.revision < report.revision:
                self.by_rank[report.rank] = report
                news.append((before, report))
        return news
