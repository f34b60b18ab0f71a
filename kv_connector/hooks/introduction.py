"""Introduction of an engine to the server: its namespace, from the reports of its workers.

The namespace of an engine's blocks is known when each worker has reported its facts. Until then the
server is not used.
"""

from collections.abc import Iterable, Mapping

from vllm.logger import init_logger

from kv_connector.identity.namespace import Facts
from kv_connector.identity.self_test import Outcome
from kv_connector.identity.worker_reports import Reports, WorkerReport
from kv_connector.tier.metrics import CANARIES
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.errors import ConfigError

logger = init_logger("vllm.kvferry.introduction")

MOST_STEPS = 200
"""Steps in which every worker must report. One is enough where the scheduler waits for the output
of a step; with steps in flight it is their number plus one."""


class Introduction:
    """Belongs to the scheduler thread. It ends with one call of `declare` or `stay_out`."""

    def __init__(
        self, tier: RemoteTier, reports: Reports, label: str, facts: Mapping[str, str],
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
