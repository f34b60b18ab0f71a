"""A comparison with a recorded trace: the error of the model of users.

The trace is a list of requests, each an object with some of the fields below; fields that a trace
lacks are not compared. Nothing is scaled: a trace of another machine has other latencies.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.figures.samples import Samples
from remote_server.errors import ConfigError

MAX_OFF_PERCENT = 5.0
"""Limit on the hit rate's error; the other values are shown without a verdict."""

_MEANS = {
    "hit rate": "cache_hit",
    "context tokens, mean": "context_tokens",
    "generated tokens, mean": "generation_tokens",
    "bytes read of a request, mean": "read_bytes",
    "bytes written of a request, mean": "write_bytes",
}
_LATENCIES = {
    "read latency, P95 ms": "read_latency_ms",
    "write latency, P95 ms": "write_latency_ms",
}
_FIELDS = (*_MEANS.values(), *_LATENCIES.values())


def read(path: Path) -> list[dict[str, Any]]:
    """Raises `ConfigError` before any measurement."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"validation_trace: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"validation_trace: {path}: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ConfigError(f"validation_trace: {path} is not a list of requests")
    for number, row in enumerate(rows, 1):
        for name in _FIELDS:
            value = row.get(name)
            if value is not None and not (
                isinstance(value, (int, float)) and 0 <= value < math.inf
            ):
                raise ConfigError(
                    f"validation_trace: {path}, request {number}: {name} is {value!r}, not a number"
                )
    if not any(row.get("cache_hit") is not None for row in rows):
        raise ConfigError(f"validation_trace: {path}: no request has cache_hit")
    return rows


def compare(rows: Sequence[Mapping[str, Any]], samples: Samples) -> dict[str, Any]:
    """Compare the values that both have. A request is a hit when all its blocks were found."""
    here, there = _of_samples(samples), _of_trace(rows)
    common = [name for name in there if name in here]
    off = {name: _off_percent(here[name], there[name]) for name in common}
    passed, says = _judge(here.get("hit rate"), there["hit rate"])
    return {
        "passed": passed,
        "says": says,
        "rows": [
            {"name": name, "here": here[name], "trace": there[name], "off_percent": off[name]}
            for name in common
        ],
    }


def _judge(here: float | None, trace: float) -> tuple[bool, str]:
    if here is None:
        return False, "no request was answered here, so there is no hit rate to compare"
    off = _off_percent(here, trace)
    if off is None:
        return here == 0, f"nothing was found again in the trace, and {here:.1%} here"
    return (
        round(abs(off), 9) <= MAX_OFF_PERCENT,
        f"the hit rate is off by {off:+.1f}%, {MAX_OFF_PERCENT:g}% are allowed",
    )


def _off_percent(here: float, trace: float) -> float | None:
    return 100 * (here - trace) / trace if trace else None


def _of_trace(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = {}
    for name, field in _MEANS.items():
        values = [float(row[field]) for row in rows if row.get(field) is not None]
        if values:
            found[name] = sum(values) / len(values)
    for name, field in _LATENCIES.items():
        values = [float(row[field]) for row in rows if row.get(field)]
        if values:  # 0 stands for a request that moved nothing
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
