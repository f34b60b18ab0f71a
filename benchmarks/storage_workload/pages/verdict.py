"""The verdict, PASS or FAIL by criterion, with the source's limits."""

from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_NVME_WRITE_MS = 500.0
MAX_NVME_READ_MS = 200.0
MAX_CPU_MS = 150.0
MIN_HIT_RATE = 0.30


class Criterion(NamedTuple):
    """One line of the verdict. `passed` is None when there was nothing to judge."""

    name: str
    actual: float | None
    limit: float
    unit: str
    passed: bool | None
    note: str = ""

    @property
    def line(self) -> str:
        word = {True: "PASS", False: "FAIL", None: "SKIPPED"}[self.passed]
        shown = self.note if self.actual is None else _show(self.actual, self.unit)
        return f"[{word}] {self.name}: {shown}"


def judge(summary: Mapping[str, Any], profile: str) -> list[Criterion]:
    """`latency`: the device's part of the disk's time, all of memory's time, and the hits.
    `throughput`: any generation at all, as in the source."""
    if profile == "throughput":
        rate = summary["avg_throughput_tokens_per_sec"]
        return [Criterion("Throughput > 0 tok/s", rate, 0.0, " tok/s", rate > 0)]
    tiers = summary["tier_latency_ms"]
    answered = summary["total_requests"]
    hit_rate = summary["cache_stats"]["cache_hit_rate"]
    return [
        _at_most("NVMe Write P95 < 500ms", tiers, ["nvme_write"], "device", MAX_NVME_WRITE_MS),
        _at_most("NVMe Read P95 < 200ms", tiers, ["nvme_read"], "device", MAX_NVME_READ_MS),
        _at_most("CPU RAM P95 < 150ms", tiers, ["cpu_read", "cpu_write"], "total", MAX_CPU_MS),
        Criterion("Cache Hit Rate > 30%", hit_rate, MIN_HIT_RATE, "%", hit_rate > MIN_HIT_RATE)
        if hit_rate is not None
        else Criterion(
            "Cache Hit Rate > 30%", None, MIN_HIT_RATE, "%", None, "nothing could be found again"
        ),
        # A few fast writes do not make a run pass.
        *([] if answered else [Criterion("Requests answered > 0", 0.0, 0.0, "", False)]),
    ]


def passed(criteria: list[Criterion]) -> bool:
    """No criterion failed, and at least one was judged."""
    verdicts = [criterion.passed for criterion in criteria]
    return False not in verdicts and True in verdicts


def _at_most(
    name: str, tiers: Mapping[str, Any], rows: list[str], part: str, limit: float
) -> Criterion:
    """The worst of several rows counts."""
    found = [tiers[row][part]["p95"] for row in rows if row in tiers]
    if not found:
        return Criterion(name, None, limit, "ms", None, "this tier did nothing")
    return Criterion(name, max(found), limit, "ms", max(found) < limit)


def _show(value: float, unit: str) -> str:
    return f"{100 * value:.1f}%" if unit == "%" else f"{value:,.2f}{unit}"
