"""The report of a run in text, in the source's sections. Its only input is the document."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.storage_workload.pages import conditions
from benchmarks.storage_workload.pages.document import criteria_of, why_not_judged, word_of
from remote_server.values import GiB

_ADVICE = {
    "queue": "requests exceed the concurrency: use fewer users, or more hardware",
    "storage": "the store and its devices are the bottleneck",
    "generation": "as intended: users wait for the GPU",
}


def label_of(document: Mapping[str, Any]) -> str:
    """Why its figures are not those of the model or of a submission. An older document has only
    the scale of its blocks."""
    if "label" not in document and document["options"]["bytes_scale"] != 1:
        return f"SCALED: blocks of {document['options']['bytes_scale']:g} times their size"
    return str(document.get("label") or "")


class Section(NamedTuple):
    """A heading and the lines below it."""

    title: str
    lines: tuple[str, ...]


def render(document: Mapping[str, Any]) -> str:
    """All sections as text, below the label of a run that has one."""
    parts = ["\n  ".join((f"### {title} ###", *lines)) for title, lines in sections(document)]
    label = label_of(document)
    return "\n\n".join([*([label] if label else []), *parts])


def sections(document: Mapping[str, Any]) -> Iterator[Section]:
    """The verdict first. Functions not used by the run, such as autoscaling, have no section."""
    word = word_of(document)
    for title, lines in (
        (f"STORAGE PERFORMANCE ASSESSMENT: {word}", _assessment(document)),
        ("TEST CONDITIONS", conditions.lines(document)),
        ("OVERALL PERFORMANCE", _overall(document)),
        ("LATENCY BREAKDOWN", _latencies(document["summary"])),
        ("STORAGE I/O", _storage(document)),
        ("CACHE TIER DISTRIBUTION", _tiers(document)),
        ("TIER LATENCY (P50 / P95 / P99)", _tier_latency(document)),
        ("CACHE TYPES", _types(document["summary"])),
        ("INFERENCE PHASES", _phases(document["summary"])),
        ("PREFIX CACHE (system prompts)", _prefix(document["summary"]["prefix_cache_stats"])),
        ("MULTI-TURN", _turns(document["summary"]["multi_turn_stats"])),
        ("RAG", _rag(document["summary"]["rag_stats"])),
        ("QOS (queue + storage, without generation)", _qos(document["summary"])),
        ("AUTOSCALING", _scaling(document["summary"])),
        ("VALIDATION AGAINST A TRACE", _validation(document["validation"])),
        ("ACCOUNTING", _accounting(document)),
    ):
        section = Section(title, tuple(lines))
        if section.lines:
            yield section


def _assessment(document: Mapping[str, Any]) -> Iterator[str]:
    why_not = why_not_judged(document["options"], interrupted=document["interrupted"])
    if why_not and word_of(document) != "FAIL":
        yield f"No verdict: {why_not}"
    criteria = criteria_of(document)
    judged = [criterion for criterion in criteria if criterion.passed is not None]
    skipped = len(criteria) - len(judged)
    yield (
        f"Criteria Passed: {sum(c.passed is True for c in judged)}/{len(judged)}"
        + (f", {skipped} SKIPPED" if skipped else "")
    )
    for criterion in criteria:
        yield criterion.line
    if scaling := document["summary"]["autoscaling_summary"]:
        yield f"Answer: {scaling['says']}"
    for line in document["accounting"]:
        if not line["agrees"]:
            yield (
                f"[FAIL] accounting of {line['tier']}, {line['what']}: {line['counted']:,} and "
                f"{line['arithmetic']:,}"
            )
    for note in document["notes"]:
        yield f"Note: {note}"


def _overall(document: Mapping[str, Any]) -> Iterator[str]:
    summary = document["summary"]
    if document["interrupted"]:
        yield "Interrupted: only the results until then"
    yield f"Total Requests: {summary['total_requests']:,} in {summary['elapsed_s']:.1f} s"
    if summary["unfinished_requests"]:
        yield f"Cut off by the end of the run: {summary['unfinished_requests']:,}"
    yield f"Total Tokens Generated: {summary['total_tokens']:,}"
    yield f"Throughput: {summary['avg_throughput_tokens_per_sec']:,.2f} tok/s"
    yield f"Requests/s: {summary['requests_per_second']:.2f}"
    alone = document["driver_alone_requests_per_second"]
    if alone is not None and summary["requests_per_second"]:
        times = alone / summary["requests_per_second"]
        yield f"The driver alone: {alone:,.0f} requests/s, {times:,.0f} times as many"


def _latencies(summary: Mapping[str, Any]) -> Iterator[str]:
    for title, name in (
        ("End-to-End", "end_to_end_latency_ms"), ("Queue wait", "queue_wait_ms"),
        ("Storage I/O", "storage_io_latency_ms"), ("Generation", "generation_latency_ms"),
    ):  # fmt: skip
        yield f"{title}: {_latency(summary[name])}"
    component = summary["dominates"]["component"]
    if component is not None:
        shares = summary["dominates"]["shares"].items()
        parts = ", ".join(f"{name} {_percent(share)}" for name, share in shares)
        yield f"Dominates: {component} ({parts}): {_ADVICE[component]}"


def _storage(document: Mapping[str, Any]) -> Iterator[str]:
    stats = document["summary"]["cache_stats"]
    hits, asked = stats["cache_hits"], stats["cache_hits"] + stats["cache_misses"]
    ratio = stats["read_write_ratio"]
    yield (
        f"Cache Hit Rate: {_percent(stats['cache_hit_rate'])} ({hits:,} of {asked:,} blocks that "
        "might be there)"
    )
    if trace := document["trace"]:
        yield (
            f"Counted over the same {trace['requests']:,} requests, without a store and a limit: "
            f"{100 * trace['findable']:.2f}%, here {100 * trace['hit_rate']:.2f}%"
        )
    yield (
        f"Read: {stats['total_read_gb']:.2f} GiB, of it by decoding "
        f"{stats['decode_read_gb']:.2f}, Write: {stats['total_write_gb']:.2f} GiB"
        + (f", Ratio: {ratio:.2f}" if ratio is not None else "")
    )
    yield (
        f"Bandwidth: read {stats['read_gb_per_sec']:.2f} GB/s, write "
        f"{stats['write_gb_per_sec']:.2f} GB/s"
    )
    yield f"IOPS, blocks/s: read {stats['read_iops']:,.0f}, write {stats['write_iops']:,.0f}"
    device = document["device"]
    if "kernel_read_bytes" in device:
        yield (
            f"Device: the disk tier read {device['tier_read_bytes'] / 1e9:.2f} GB and wrote "
            f"{device['tier_written_bytes'] / 1e9:.2f} GB; the kernel counted "
            f"{device['kernel_read_bytes'] / 1e9:.2f} and "
            f"{device['kernel_written_bytes'] / 1e9:.2f} GB for this process, "
            + ("past the page cache" if device["direct"] else "through the page cache")
        )


def _tiers(document: Mapping[str, Any]) -> Iterator[str]:
    stats = document["summary"]["cache_stats"]
    others = [
        (tier, tier) for tier in document["tiers"] if tier != "gpu" and f"{tier}_entries" in stats
    ]
    for title, tier in [("GPU", "gpu"), ("CPU", "cpu"), ("NVMe", "nvme"), *others]:
        blocks, used = stats.get(f"{tier}_entries", 0), stats.get(f"{tier}_used_gb", 0.0)
        yield f"{title} Entries: {blocks:,} ({used:.2f} GiB)"
    for tier, share in stats["read_share_by_tier"].items():
        yield f"Read from {tier}: {_percent(share)} of all bytes"


def _tier_latency(document: Mapping[str, Any]) -> Iterator[str]:
    """Of each read or write of a tier: all of its time, the device's part, and the store's; and
    each call of the device by itself."""
    for name, row in document["summary"]["tier_latency_ms"].items():
        total, device, host = (_percentiles(row[part]) for part in ("total", "device", "host"))
        yield (
            f"{name.replace('_', ' ')}: {total} ms in all, device {device}, host {host} "
            f"({row['count']:,} of them, {row['gb']:.2f} GiB)"
        )
    for kind, calls in document["device"].get("calls", {}).items():
        if calls["latency_ms"] is not None:
            found = _percentiles(calls["latency_ms"], 2)
            yield f"one {kind} call of the device: {found} ms ({calls['count']:,} of them)"


def _types(summary: Mapping[str, Any]) -> Iterator[str]:
    prefix, turns, rag = (
        summary[name] for name in ("prefix_cache_stats", "multi_turn_stats", "rag_stats")
    )
    for title, asked, hits in (
        ("System prompts", prefix["system_prompt_blocks"], prefix["system_prompt_block_hits"]),
        ("Conversations", turns["history_blocks"], turns["history_block_hits"]),
        ("Documents", rag["chunk_blocks"], rag["chunk_hits"]),
    ):
        share = _percent(hits / asked if asked else None)
        yield f"{title}: {hits:,} of {asked:,} blocks found ({share})"


def _phases(summary: Mapping[str, Any]) -> Iterator[str]:
    for phase, count in summary["phases"].items():
        yield f"{phase}: {count:,} requests"


def _prefix(stats: Mapping[str, Any]) -> Iterator[str]:
    yield f"Hits: {stats['prefix_hits']:,}, Misses: {stats['prefix_misses']:,}"
    yield (
        f"Reused, if only in part: {stats['system_prompt_reuse']:,}; not computed again: "
        f"{stats['bytes_saved'] / GiB:.2f} GiB"
    )


def _turns(stats: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Hits: {stats['cache_hits']:,}, Misses: {stats['cache_misses']:,}, longest conversation "
        f"{stats['longest_conversation']} turns"
    )


def _rag(stats: Mapping[str, Any]) -> Iterator[str]:
    if stats["requests"]:
        yield (
            f"Requests with documents: {stats['requests']:,}; "
            f"{stats['chunk_hits']:,} of {stats['chunk_blocks']:,} blocks found"
        )


def _qos(summary: Mapping[str, Any]) -> Iterator[str]:
    for name, qos in summary["qos_metrics"].items():
        sla = qos["sla"]
        yield (
            f"{name}: {qos['total_requests']:,} requests, P95 {sla['actual_p95_ms']:.1f}ms of "
            f"{sla['target_p95_ms']:g}ms, compliance {_percent(sla['compliance'])}: "
            f"{'met' if sla['met'] else 'NOT met'}"
        )


def _scaling(summary: Mapping[str, Any]) -> Iterator[str]:
    found = summary["autoscaling_summary"]
    if found is None:
        return
    yield f"Mode: {found['mode']}"
    for step in summary["autoscaling_stats"]:
        # Below 0 where there were too few answers.
        known = step["saturation"] >= 0
        saturation = f"{step['saturation']:.2f}" if known else "-"
        yield (
            f"{step['timestamp']:.0f} s: {step['users']} users, saturation "
            f"{saturation}, {step['throughput_gb_per_sec']:.3f} GB/s: {step['reason']}"
        )
    yield str(found["says"])


def _validation(validation: Mapping[str, Any] | None) -> Iterator[str]:
    if validation is None:
        return
    for row in validation["rows"]:
        off = row["off_percent"]
        yield (
            f"{row['name']}: here {row['here']:.4g}, trace {row['trace']:.4g}"
            + (f", off by {off:+.1f}%" if off is not None else "")
        )
    yield f"{'PASS' if validation['passed'] else 'FAIL'}: {validation['says']}"


def _accounting(document: Mapping[str, Any]) -> Iterator[str]:
    if not document["accounting"]:
        yield "not kept: " + (document["failure"] or "the store is not in this process")
    for line in document["accounting"]:
        word = "agrees" if line["agrees"] else f"DISAGREES with {line['arithmetic']:,}"
        yield f"{line['tier']}, {line['what']}: {line['counted']:,} {word}"
    yield f"Requests: seed {document['seed']}, digest {document['request_digest']}"


def _latency(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "nothing"
    return (
        f"mean {found['mean']:.1f}ms, P50 {found['p50']:.1f}ms, P95 {found['p95']:.1f}ms, "
        f"P99 {found['p99']:.1f}ms"
    )


def _percentiles(latency: Mapping[str, float], digits: int = 1) -> str:
    return " / ".join(f"{latency[name]:,.{digits}f}" for name in ("p50", "p95", "p99"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
