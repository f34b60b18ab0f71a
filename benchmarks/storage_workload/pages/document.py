"""The JSON document of a run: the source's keys, and the facts needed to judge it later."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.files import replace_text
from benchmarks.harness.record import Figure, Record
from benchmarks.storage_workload.figures import steady
from benchmarks.storage_workload.figures.accounting import Line
from benchmarks.storage_workload.figures.samples import Samples
from benchmarks.storage_workload.figures.summary import (
    latency_timeline,
    summarize,
    throughput_timeline,
)
from benchmarks.storage_workload.pages.verdict import Criterion, judge, passed
from benchmarks.storage_workload.plan.options import Options

SCHEMA = 1
BENCHMARK = "benchmarks.storage_workload"


@dataclass
class Run:
    """The results of one run."""

    options: Options
    record: Record
    request_digest: str
    samples: Samples = field(default_factory=Samples)
    tiers: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    """Facts the reader must know: a missing tier, reads that were not cold."""

    occupancy: dict[str, dict[str, int]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    accounting: list[Line] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    preconditioning: dict[str, Any] | None = None
    """None where the disk tier was not filled before the run, or there is none."""

    autoscaling: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    """The possible hits, from a count over the trace."""

    interrupted: bool = False
    failure: str | None = None
    """Why the store failed before the end. Earlier measurements are kept."""

    headroom: float | None = None
    """Requests per second of the driver alone, on a store without delays."""

    @property
    def agrees(self) -> bool:
        return all(line.agrees for line in self.accounting)

    def document(self) -> dict[str, Any]:
        """All figures are computed here, from the samples."""
        summary = summarize(self.samples)
        for tier, state in self.occupancy.items():
            summary["cache_stats"][f"{tier}_entries"] = state["blocks"]
            summary["cache_stats"][f"{tier}_used_gb"] = state["used_bytes"] / (1 << 30)
        scaling = self.autoscaling or {}
        summary["autoscaling_stats"] = scaling.get("steps", [])
        summary["autoscaling_summary"] = scaling.get("summary")
        options = _plain(asdict(self.options))
        settled = steady.judge(
            self.samples,
            steady.why_not_judged(
                options, interrupted=self.interrupted, failed=self.failure is not None
            ),
        )
        nothing_yet = self.interrupted and not summary["total_requests"]
        criteria = [] if nothing_yet else judge(summary, self.options.performance_profile)
        why_not = why_not_judged(options, interrupted=self.interrupted)
        is_right = (nothing_yet or passed(criteria)) and self.agrees and self.failure is None
        record = self.record
        return {
            "schema": SCHEMA,
            "benchmark": BENCHMARK,
            "command": record.command,
            "label": self.options.label,
            "started": record.started,
            "interrupted": self.interrupted,
            "failure": self.failure,
            "machine": dict(record.machine),
            "stolen_percent": record.stolen_percent,
            "source": record.source,
            "host": record.host,
            "storage": record.storage,
            "versions": record.versions,
            "parameters": {
                "request digest": self.request_digest,
                **({"label": self.options.label} if self.options.label else {}),
            },
            "options": options,
            "seed": self.options.seed,
            "request_digest": self.request_digest,
            "tiers": list(self.tiers),
            "notes": self.notes,
            "summary": summary,
            "verdict": {
                "passed": None if is_right and why_not else is_right,
                "not_judged": why_not,
                "profile": self.options.performance_profile,
                "criteria": [criterion._asdict() for criterion in criteria],
            },
            "accounting": [{**line._asdict(), "agrees": line.agrees} for line in self.accounting],
            "device": self.device,
            "preconditioning": self.preconditioning,
            "steady_state": settled,
            "driver_alone_requests_per_second": self.headroom,
            "counters": self.counters,
            "validation": self.validation,
            "trace": self.trace,
            "rows": [],
            "figures": [
                figure.to_json()
                for figure in (
                    *_figures(summary, criteria),
                    *_call_figures(self.device),
                    *_condition_figures(self.preconditioning, settled),
                )
            ],
            "throughput_timeline": throughput_timeline(self.samples),
            "latency_timeline": latency_timeline(self.samples),
            "samples": self.samples.to_json() if self.options.samples else None,
        }


def why_not_judged(options: Mapping[str, Any], *, interrupted: bool) -> str:
    """Why a run with these options and this end can fail and not pass; empty where it can do
    both."""
    if interrupted:
        return "it was interrupted"
    if options.get("emulated_device"):
        return "no storage was measured"
    if options.get("bytes_scale", 1) != 1:
        return "its blocks have not the model's size"
    return ""


def word_of(document: Mapping[str, Any]) -> str:
    """The verdict on a run: `PASS`, `FAIL` or `NOT JUDGED`."""
    if document["verdict"]["passed"] is False:
        return "FAIL"
    why_not = why_not_judged(document["options"], interrupted=document["interrupted"])
    return "NOT JUDGED" if why_not else "PASS"


def criteria_of(document: Mapping[str, Any]) -> list[Criterion]:
    """The criteria of the document."""
    return [Criterion(**criterion) for criterion in document["verdict"]["criteria"]]


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write raw samples with one line a list, the rest indented."""
    text = json.dumps({**document, "samples": None}, indent=1, allow_nan=False)
    samples = json.dumps(document["samples"], separators=(",", ":"), allow_nan=False)
    head, _, tail = text.rpartition('"samples": null')
    replace_text(path, f'{head}"samples": {samples}{tail}\n')


def _figures(summary: Mapping[str, Any], criteria: Sequence[Criterion]) -> Iterator[Figure]:
    """The main figures, in the form of a benchmark's record."""
    judged = [criterion.passed for criterion in criteria if criterion.passed is not None]
    yield Figure("verdict", "criteria", {"passed": sum(judged), "judged": len(judged)})
    scaling = summary["autoscaling_summary"] or {}
    if scaling.get("final_user_count") is not None:
        yield Figure("within their targets", "users", {"": scaling["final_user_count"]})
    if scaling.get("peak_throughput") is not None:
        peak = {"": scaling["peak_throughput"], "users": scaling["peak_user_count"]}
        yield Figure("peak", "GB/s", peak)
    yield Figure("throughput", "tokens/s", {"": summary["avg_throughput_tokens_per_sec"]})
    stats = summary["cache_stats"]
    moved = {name: stats[f"{name}_gb_per_sec"] for name in ("read", "write")}
    yield Figure("storage throughput", "GB/s", moved)
    if stats["cache_hit_rate"] is not None:
        yield Figure("cache hit rate", "%", {"": 100 * stats["cache_hit_rate"]})
    for name in ("end_to_end_latency_ms", "storage_io_latency_ms", "queue_wait_ms"):
        if summary[name] is not None:
            yield Figure(name.removesuffix("_ms").replace("_", " "), "ms", summary[name])
    for name, row in summary["tier_latency_ms"].items():
        values = {part: row[part]["p95"] for part in ("total", "device", "host")}
        yield Figure(f"{name.replace('_', ' ')}, P95", "ms", values)


def _call_figures(device: Mapping[str, Any]) -> Iterator[Figure]:
    """The time of one call of the device, which may move several blocks."""
    for kind, calls in device.get("calls", {}).items():
        if calls["latency_ms"] is not None:
            yield Figure(f"device {kind} call", "ms", calls["latency_ms"])


def _condition_figures(
    preconditioning: Mapping[str, Any] | None, settled: Mapping[str, Any]
) -> Iterator[Figure]:
    if preconditioning is not None:
        yield Figure("preconditioned", "GB", {"": preconditioning["written_bytes"] / 1e9})
    for figure in settled["figures"]:
        found = {"range": figure["range_percent"], "fit": figure["slope_percent"]}
        yield Figure(f"steady state, {figure['name']}", "%", found)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
