"""The engine's introduction to the server: it collects the workers' facts, then declares them.

The namespace of an engine's blocks is known when each worker has reported its facts. Reports come
with the engine's first steps (`worker_report`). Until then the server is not used.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from vllm.logger import init_logger

from kv_connector.canary import Outcome
from kv_connector.namespace import Facts
from kv_connector.worker_report import Reports, WorkerReport
from remote_server.errors import ConfigError

logger = init_logger("vllm.kvferry.introduction")

MOST_STEPS = 200
"""Steps in which every worker must report. One is enough where the scheduler waits for the output
of a step; with steps in flight it is their number plus one."""


class Tier(Protocol):
    """The part of `RemoteTier` that is used here."""

    def declare(self, label: str, facts: Facts) -> None: ...
    def stay_out(self, why: str) -> None: ...
    def wait_no_longer(self) -> None: ...
    def count_hook_error(self, hook: str) -> None: ...
    def count_canary(self, result: str) -> None: ...


class Introduction:
    """Belongs to the scheduler thread. It ends with one call of `declare` or `stay_out`."""

    def __init__(
        self, tier: Tier, reports: Reports, label: str, facts: Mapping[str, str],
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
            self._tier.wait_no_longer()

    def heard(self, news: Iterable[tuple[WorkerReport | None, WorkerReport]]) -> None:
        """Workers have reported; `news` is the result of `Reports.take`."""
        for before, report in news:
            logger.debug("worker %d: %s", report.rank, report)
            self._count(before, report)
        if not self._ended and not self._reports.missing:
            self._ended = True
            self._introduce()

    def _introduce(self) -> None:
        reasons = list(self._not_known)
        for rank, report in sorted(self._reports.by_rank.items()):
            if report.facts is None:
                reasons.append(f"worker {rank} could not establish its facts")
            if report.canary is not None and report.canary.outcome is Outcome.FAILED:
                reasons.append(
                    f"the start-up canary of worker {rank} failed: {report.canary.detail}"
                )
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
                self._tier.count_hook_error(hook)
        if report.canary is not None and (before is None or before.canary is None):
            self.pool_is_wrong |= report.canary.miscopied
            self._tier.count_canary(report.canary.outcome)
            if report.canary.outcome is Outcome.BROKEN:
                self._tier.count_hook_error("canary")
