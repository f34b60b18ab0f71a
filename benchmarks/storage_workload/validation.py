"""This run beside a recorded one: by how much is the model of users off?

The trace is a list of requests, each an object with some of the fields below; what a trace does not
have is not compared. Nothing is scaled: a trace of another machine has other latencies.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.samples import Samples
from remote_server.errors import ConfigError

MAX_OFF_PERCENT = 5.0
"""Of the hit rate; the rest is for people to judge."""


def read(path: Path) -> list[dict[str, Any]]:
    """Raises `ConfigError`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"validation_trace: {path}: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ConfigError(f"validation_trace: {path} is not a list of requests")
    if not any("cache_hit" in row for row in rows):
        raise ConfigError(f"validation_trace: {path}: no request says cache_hit")
    return rows


def compare(rows: Sequence[Mapping[str, Any]], samples: Samples) -> dict[str, Any]:
    """Row by row what both have. A request here is a hit when all it looked for was there."""
    here, there = _of_samples(samples), _of_trace(rows)
    off = {
        name: 100 * (here[name] - trace) / trace if trace else None
        for name, trace in there.items()
        if name in here
    }
    wrong = off.get("hit rate")
    return {
        "passed": wrong is not None and abs(wrong) <= MAX_OFF_PERCENT,
        "says": f"the hit rate is off by {wrong:+.1f}%, {MAX_OFF_PERCENT:g}% are allowed"
        if wrong is not None
        else "there is no hit rate to compare",
        "rows": [
            {"name": name, "here": here[name], "trace": there[name], "off_percent": percent}
            for name, percent in off.items()
        ],
    }


def _of_trace(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = {}
    for name, field in (
        ("hit rate", "cache_hit"), ("context tokens, mean", "context_tokens"),
        ("generated tokens, mean", "generation_tokens"),
        ("bytes read of a request, mean", "read_bytes"),
        ("bytes written of a request, mean", "write_bytes"),
    ):  # fmt: skip
        values = [float(row[field]) for row in rows if row.get(field) is not None]
        if values:
            found[name] = sum(values) / len(values)
    for name, field in (
        ("read latency, P95 ms", "read_latency_ms"), ("write latency, P95 ms", "write_latency_ms"),
    ):  # fmt: skip
        values = [float(row[field]) for row in rows if row.get(field)]
        if values:
            found[name] = percentile(values, 95)
    return found


def _of_samples(samples: Samples) -> dict[str, float]:
    requests = samples.requests
    if not requests:
        return {}
    count = len(requests)
    found = {
        "hit rate": sum(0 < r.asked == r.hit for r in requests) / count,
        "context tokens, mean": sum(r.context_tokens for r in requests) / count,
        "generated tokens, mean": sum(r.generation_tokens for r in requests) / count,
    }
    for direction, word in (("read", "read"), ("write", "written")):
        moved = [t for t in samples.transfers if t.direction == direction and t.user >= 0]
        found[f"bytes {word} of a request, mean"] = sum(t.num_bytes for t in moved) / count
        if moved:
            took = [1000 * t.total_s for t in moved]
            found[f"{direction} latency, P95 ms"] = percentile(took, 95)
    return found
