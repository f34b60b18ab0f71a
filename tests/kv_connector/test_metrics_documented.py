"""docs/METRICS.md and the metrics that the engine really has."""

from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from kv_connector.metrics import METRICS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"


def test_every_metric_of_the_engine_is_documented_as_it_is_and_every_documented_one_exists():
    section = DOCUMENT.read_text().split("## The engine\n")[1].split("\n## ")[0]
    documented = {line for line in section.splitlines() if line.startswith("| `")}
    there = set()
    for name, metric in METRICS.items():
        kind = type(metric).__name__.removeprefix("Offloading").removesuffix("Metadata").lower()
        assert kind in {one.__name__.lower() for one in (Counter, Gauge, Histogram)}
        shown = name + ("_total" if kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labelnames)
        there.add(f"| `{shown}` | {kind} | {labels} | {metric.documentation} |")
    assert documented == there
