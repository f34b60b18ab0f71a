"""Charts of a run over time: throughput, contents of the tiers, latency, users."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import plot, titles
from benchmarks.harness.plot import Chart
from remote_server.values import GiB

LATENCIES = ("queue", "storage", "end_to_end")


def charts(document: Mapping[str, Any]) -> dict[str, Chart]:
    """Charts by the name of the file, the most important first. A document that is older than its
    latencies over time has no chart of them."""
    timeline = document["throughput_timeline"]
    seconds = [moment["timestamp"] for moment in timeline]
    tiers = sorted({tier for moment in timeline for tier in moment["used_bytes"]})
    titled = partial(titles.of_document, document)

    def over(title: str, unit: str, **series: str) -> Chart:
        columns = {name: [moment[key] for moment in timeline] for name, key in series.items()}
        return plot.over_time(titled(title), unit, seconds, columns)

    held = {
        tier: [moment["used_bytes"].get(tier, 0) / GiB for moment in timeline] for tier in tiers
    }
    slices = document.get("latency_timeline", [])
    middles = [part["timestamp"] for part in slices]
    latencies = {
        name.replace("_", " "): [part[f"{name}_p95_ms"] for part in slices] for name in LATENCIES
    }
    title = titled("Latency, P95 of what ended then")
    drawn = {"latency": plot.over_time(title, "ms", middles, latencies)} if slices else {}
    return {
        **drawn,
        "throughput": over(
            "Throughput", "GB/s", read="read_gb_per_sec", written="write_gb_per_sec"
        ),
        "tokens": over("Tokens", "tokens per s", generated="throughput_tokens_per_sec"),
        "tiers": plot.over_time(titled("What the tiers hold"), "GiB", seconds, held),
        "users": over("Users", "users", active="num_users", waiting="in_flight"),
    }
