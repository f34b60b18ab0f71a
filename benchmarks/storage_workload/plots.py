"""Charts of a run over time: throughput, contents of the tiers, latency, users."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import plot
from benchmarks.harness.plot import Chart
from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.report import label_of
from benchmarks.storage_workload.samples import RequestSample, Samples
from remote_server.values import GiB

MAX_SLICES = 60
"""The number of parts of a run for which the P95 of latencies is shown."""


def charts(document: Mapping[str, Any], samples: Samples) -> dict[str, Chart]:
    """Charts by the name of the file, the most important first."""
    timeline = document["throughput_timeline"]
    seconds = [moment["timestamp"] for moment in timeline]
    tiers = sorted({tier for moment in timeline for tier in moment["used_bytes"]})
    slices = _slices(samples)
    middles = [middle for middle, _ in slices]
    parts = [part for _, part in slices]

    label = label_of(document)

    def titled(what: str) -> str:
        """With the label of a run that has one: a picture may stand alone."""
        return f"{what} ({label})" if label else what

    def over(title: str, unit: str, **series: str) -> Chart:
        columns = {name: [moment[key] for moment in timeline] for name, key in series.items()}
        return plot.over_time(titled(title), unit, seconds, columns)

    held = {
        tier: [moment["used_bytes"].get(tier, 0) / GiB for moment in timeline] for tier in tiers
    }
    latencies = {
        "queue": [_p95([r.queue_s for r in part]) for part in parts],
        "storage": [_p95([r.storage_s for r in part]) for part in parts],
        "end to end": [_p95([r.total_s for r in part]) for part in parts],
    }
    title = titled("Latency, P95 of what ended then")
    return {
        "latency": plot.over_time(title, "ms", middles, latencies),
        "throughput": over(
            "Throughput", "GB/s", read="read_gb_per_sec", written="write_gb_per_sec"
        ),
        "tokens": over("Tokens", "tokens per s", generated="throughput_tokens_per_sec"),
        "tiers": plot.over_time(titled("What the tiers hold"), "GiB", seconds, held),
        "users": over("Users", "users", active="num_users", waiting="in_flight"),
    }


def _slices(samples: Samples) -> list[tuple[float, list[RequestSample]]]:
    """The middle of each part of the run, and the requests that ended in it."""
    count = max(1, min(MAX_SLICES, len(samples.requests) // 5))
    width = max(samples.elapsed_s, 1e-9) / count
    parts: list[list[RequestSample]] = [[] for _ in range(count)]
    for request in samples.requests:
        parts[min(count - 1, int(request.ended_s / width))].append(request)
    return [((place + 0.5) * width, part) for place, part in enumerate(parts)]


def _p95(seconds: Sequence[float]) -> float | None:
    return 1000 * percentile(seconds, 95) if seconds else None
