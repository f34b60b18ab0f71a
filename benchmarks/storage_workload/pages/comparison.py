"""A comparison of the workloads of a suite: speed, placement of blocks, health."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import table
from benchmarks.storage_workload.pages.document import word_of

_TIERS = ("gpu", "cpu", "nvme")

MIN_HEADROOM = 5
"""The least headroom of the driver over a run; below it the driver may limit the figures."""


class Outcome(NamedTuple):
    """The result of one workload: its document, or the reason for none."""

    name: str
    document: Mapping[str, Any] | None
    reason: str = ""


def render(outcomes: Sequence[Outcome]) -> str:
    """The comparison: speeds, placement of blocks, and bottlenecks with health."""
    ran = [(name, found) for name, found, _ in outcomes if found is not None]
    labels = sorted({found["label"] for _, found in ran if found.get("label")})
    parts = ["### COMPARISON ###", _speeds(outcomes), *(f"* {label}" for label in labels)]
    if ran:
        parts += ["", "### WHERE THE BLOCKS ARE ###", _residency(ran)]
        parts += ["", "### BOTTLENECKS AND HEALTH ###", *(_health(*each) for each in ran)]
    return "\n".join(parts)


def _speeds(outcomes: Sequence[Outcome]) -> str:
    heads = ["workload", "verdict", "users", "tok/s", "req/s", "read GB/s", "write GB/s",
             "e2e P95 ms", "storage P95 ms", "hits %"]  # fmt: skip
    rows: list[list[table.Cell]] = []
    for name, found, reason in outcomes:
        if found is None:
            rows.append([name, f"SKIPPED ({reason})", *[None] * (len(heads) - 2)])
            continue
        mark = " *" if found.get("label") else ""
        summary = found["summary"]
        stats = summary["cache_stats"]
        hits = stats["cache_hit_rate"]
        rows.append(
            [name, word_of(found) + mark, _users(found),
             summary["avg_throughput_tokens_per_sec"], summary["requests_per_second"],
             stats["read_gb_per_sec"], stats["write_gb_per_sec"],
             _p95(summary["end_to_end_latency_ms"]), _p95(summary["storage_io_latency_ms"]),
             None if hits is None else 100 * hits]
        )  # fmt: skip
    return table.render(heads, rows)


def _residency(ran: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """For each tier: GiB at the end, their share of the bytes of all tiers, and the share of reads
    from there. A block on two tiers counts in both."""
    heads = ["workload"]
    for tier in _TIERS:
        heads += [f"{tier} GiB", "held %", "read %"]
    rows: list[list[table.Cell]] = []
    for name, found in ran:
        stats = found["summary"]["cache_stats"]
        held = {tier: stats.get(f"{tier}_used_gb") for tier in _TIERS}
        total = sum(each or 0.0 for each in held.values())
        row: list[table.Cell] = [name]
        for tier, used in held.items():
            read = stats["read_share_by_tier"].get(tier, 0.0)
            row += [used, 100 * used / total, 100 * read] if used and total else [used, None, None]
        rows.append(row)
    return table.render(heads, rows)


def _health(name: str, found: Mapping[str, Any]) -> str:
    """The component that dominates the time, and checks of the figures' validity."""
    summary = found["summary"]
    component = summary["dominates"]["component"]
    waits = "nothing was answered"
    if component is not None:
        share = summary["dominates"]["shares"][component]
        waits = f"{component} is {share:.0%} of the time"
    wrong = [line["what"] for line in found["accounting"] if not line["agrees"]]
    health = [f"the books disagree: {', '.join(wrong)}" if wrong else "the books agree"]
    failed = [criterion["name"] for criterion in found["verdict"]["criteria"]
              if criterion["passed"] is False]  # fmt: skip
    health += [f"not met: {each}" for each in failed]
    if summary["unfinished_requests"]:
        health.append(f"{summary['unfinished_requests']:,} requests were cut off by the end")
    alone, rate = found["driver_alone_requests_per_second"], summary["requests_per_second"]
    if alone is not None and alone < MIN_HEADROOM * rate:
        health.append(f"the driver alone is only {alone / rate:.1f} times as fast")
    if found["interrupted"]:
        health.append("interrupted")
    return f"  {name}: {waits}; {'; '.join(health)}"


def _users(found: Mapping[str, Any]) -> int:
    """The number of users; for a search, the number found."""
    scaling = found["summary"]["autoscaling_summary"] or {}
    known = scaling.get("final_user_count", scaling.get("peak_user_count"))  # None: found nothing
    return int(found["options"]["num_users"] if known is None else known)


def _p95(latency: Mapping[str, float] | None) -> float | None:
    return None if latency is None else latency["p95"]
