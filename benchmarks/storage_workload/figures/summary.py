"""The figures of a report, from the raw samples alone. Names are the source's.

Names of tiers are the source's too: `cpu` is the memory tier and `nvme` the disk. Percentiles are
measured values. Rates are over the elapsed time, not the requested time. As in the source, `…_gb`
are 2³⁰ bytes; `…_gb_per_sec` are 10⁹ bytes a second, as devices are sold.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.figures.samples import RequestSample, Samples, TransferSample
from benchmarks.storage_workload.traffic.personas import COMPLIANCE_TO_MEET, QOS_CLASSES
from remote_server.values import GiB

SOURCE_NAMES = {"gpu": "gpu", "memory": "cpu", "disk": "nvme"}
"""The source's names of tiers; others keep their names."""

PERCENTILES = (50, 95, 99)

MAX_SLICES = 60
"""The number of parts of a run for which the P95 of latencies is known."""

BEFORE_THE_RUN = ("ingest", "precondition")
"""Purposes of writes that precede the measurement."""

REUSE = ("reuse", "chunk")
"""Reads that can save computing; a decode reads blocks that its request has just stored."""


def source_name(tier: str) -> str:
    return SOURCE_NAMES.get(tier, tier)


def summarize(samples: Samples) -> dict[str, Any]:
    """The `summary` of a record. Requests that ended after the run do not count: a rate covers the
    run's time only."""
    elapsed_s = samples.elapsed_s
    requests = [request for request in samples.requests if request.ended_s <= elapsed_s]
    within = [
        t for t in samples.transfers if t.ended_s <= elapsed_s and t.purpose not in BEFORE_THE_RUN
    ]
    tokens = sum(request.generation_tokens for request in requests)
    return {
        "elapsed_s": elapsed_s,
        "total_requests": len(requests),
        "unfinished_requests": samples.num_unfinished + len(samples.requests) - len(requests),
        "total_tokens": tokens,
        "avg_throughput_tokens_per_sec": _rate(tokens, elapsed_s),
        "requests_per_second": _rate(len(requests), elapsed_s),
        "end_to_end_latency_ms": latency(r.total_s for r in requests),
        "storage_io_latency_ms": latency(r.storage_s for r in requests),
        "generation_latency_ms": latency(r.generation_s for r in requests),
        "queue_wait_ms": latency(r.queue_s for r in requests),
        "dominates": dominating(requests),
        "cache_stats": cache_stats(requests, within, elapsed_s),
        "tier_latency_ms": tier_latency(within),
        "phases": phases(requests),
        "qos_metrics": qos_metrics(requests),
        "prefix_cache_stats": prefix_stats(requests),
        "multi_turn_stats": multi_turn_stats(requests),
        "rag_stats": rag_stats(requests),
    }


def throughput_timeline(samples: Samples) -> list[dict[str, Any]]:
    """Throughputs from each moment to the next."""
    timeline = []
    for before, now in zip(samples.moments, samples.moments[1:], strict=False):
        passed = now.time_s - before.time_s
        timeline.append(
            {
                "timestamp": now.time_s,
                "num_users": now.users,
                "in_flight": now.in_flight,
                "throughput_tokens_per_sec": _rate(now.tokens - before.tokens, passed),
                "read_gb_per_sec": _rate(now.read_bytes - before.read_bytes, passed * 1e9),
                "write_gb_per_sec": _rate(now.written_bytes - before.written_bytes, passed * 1e9),
                "used_bytes": now.used_bytes,
            }
        )
    return timeline


def latency(seconds: Iterable[float]) -> dict[str, float] | None:
    """In ms; None when nothing was measured."""
    values = [1000 * each for each in seconds]
    if not values:
        return None
    return {
        "mean": sum(values) / len(values),
        **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
        "max": max(values),
    }


def dominating(requests: Sequence[RequestSample]) -> dict[str, Any]:
    """The components of the time of all requests, as shares of it."""
    total = sum(request.total_s for request in requests)
    if not total:
        return {"component": None, "shares": {}}
    shares = {
        "queue": sum(request.queue_s for request in requests) / total,
        "storage": sum(request.storage_s for request in requests) / total,
        "generation": sum(request.generation_s for request in requests) / total,
    }
    component = max(shares, key=lambda name: shares[name])
    return {"component": component, "shares": {**shares, "driver": 1 - sum(shares.values())}}


def cache_stats(
    requests: Sequence[RequestSample], transfers: Sequence[TransferSample], elapsed_s: float
) -> dict[str, Any]:
    asked = sum(request.asked for request in requests)
    hits = sum(request.hit for request in requests)
    moved = [t for t in transfers if t.purpose != "behind"]
    reads = [t for t in moved if t.direction == "read"]
    writes = [t for t in moved if t.direction == "write"]
    read_bytes, written_bytes = (sum(t.num_bytes for t in each) for each in (reads, writes))
    decoded = sum(t.num_bytes for t in reads if t.purpose == "decode")
    return {
        "cache_hit_rate": hits / asked if asked else None,
        "cache_hits": hits,
        "cache_misses": asked - hits,
        "total_read_gb": read_bytes / GiB,
        "total_write_gb": written_bytes / GiB,
        "decode_read_gb": decoded / GiB,
        "read_write_ratio": read_bytes / written_bytes if written_bytes else None,
        "read_gb_per_sec": _rate(read_bytes, elapsed_s * 1e9),
        "write_gb_per_sec": _rate(written_bytes, elapsed_s * 1e9),
        "read_iops": _rate(sum(t.blocks for t in reads), elapsed_s),
        "write_iops": _rate(sum(t.blocks for t in writes), elapsed_s),
        "read_share_by_tier": {
            source_name(tier): sum(t.num_bytes for t in reads if t.tier == tier) / read_bytes
            for tier in _tiers(reads)
        },
    }


def tier_latency(transfers: Sequence[TransferSample]) -> dict[str, dict[str, Any]]:
    """For each tier and direction: the time of one read or write, in total, on the device, and on
    the host."""
    found: dict[str, dict[str, Any]] = {}
    for tier in _tiers(transfers):
        for direction in ("read", "write"):
            here = [t for t in transfers if t.tier == tier and t.direction == direction]
            if here:
                found[f"{source_name(tier)}_{direction}"] = {
                    "count": len(here),
                    "gb": sum(t.num_bytes for t in here) / GiB,
                    "total": latency(t.total_s for t in here),
                    "device": latency(t.device_s for t in here),
                    "host": latency(t.host_s for t in here),
                }
    return found


def phases(requests: Sequence[RequestSample]) -> dict[str, int]:
    names = [request.phase for request in requests]
    return {name: names.count(name) for name in ("prefill", "prefill_decode")}


def qos_metrics(requests: Sequence[RequestSample]) -> dict[str, Any]:
    """Each class against its target, for the time of queues and storage: generation is not the
    store's time."""
    metrics: dict[str, Any] = {}
    for qos in QOS_CLASSES:
        served = [1000 * r.served_s for r in requests if r.qos == qos.name]
        if not served:
            continue
        compliance = sum(value <= qos.target_p95_ms for value in served) / len(served)
        metrics[qos.name] = {
            "total_requests": len(served),
            "latency_ms": latency(value / 1000 for value in served),
            "end_to_end_latency_ms": latency(r.total_s for r in requests if r.qos == qos.name),
            "sla": {
                "target_p95_ms": qos.target_p95_ms,
                "actual_p95_ms": percentile(served, 95),
                "compliance": compliance,
                "met": compliance >= COMPLIANCE_TO_MEET,
            },
        }
    return metrics


def prefix_stats(requests: Sequence[RequestSample]) -> dict[str, Any]:
    """Statistics of system prompts: complete hits and misses, partial hits, and bytes found."""
    begun = [request for request in requests if request.system_asked]
    whole = sum(request.system_hit == request.system_asked for request in begun)
    return {
        "prefix_hits": whole,
        "prefix_misses": len(begun) - whole,
        "system_prompt_reuse": sum(request.system_hit > 0 for request in begun),
        "bytes_saved": sum(request.system_hit_bytes for request in begun),
        "system_prompt_blocks": sum(request.system_asked for request in begun),
        "system_prompt_block_hits": sum(request.system_hit for request in begun),
    }


def multi_turn_stats(requests: Sequence[RequestSample]) -> dict[str, Any]:
    later = [request for request in requests if request.history_asked]
    whole = sum(request.history_hit == request.history_asked for request in later)
    return {
        "cache_hits": whole,
        "cache_misses": len(later) - whole,
        "hit_rate": whole / len(later) if later else None,
        "history_blocks": sum(request.history_asked for request in later),
        "history_block_hits": sum(request.history_hit for request in later),
        "longest_conversation": max((request.turn for request in requests), default=0),
    }


def rag_stats(requests: Sequence[RequestSample]) -> dict[str, Any]:
    """Statistics of documents that were stored before the run."""
    return {
        "requests": sum(request.document_asked > 0 for request in requests),
        "chunk_blocks": sum(request.document_asked for request in requests),
        "chunk_hits": sum(request.document_hit for request in requests),
    }


def _tiers(transfers: Sequence[TransferSample]) -> list[str]:
    """From the fastest to the slowest."""
    found = {transfer.tier for transfer in transfers}
    return [tier for tier in SOURCE_NAMES if tier in found] + sorted(found - SOURCE_NAMES.keys())


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def latency_timeline(samples: Samples) -> list[dict[str, float | None]]:
    """The P95 of each part of a request's time, in milliseconds, for each part of the run."""
    return [
        {
            "timestamp": middle,
            "queue_p95_ms": _p95([request.queue_s for request in part]),
            "storage_p95_ms": _p95([request.storage_s for request in part]),
            "end_to_end_p95_ms": _p95([request.total_s for request in part]),
        }
        for middle, part in _slices(samples)
    ]


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
