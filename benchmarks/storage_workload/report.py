"""A run in words and numbers, in the source's sections. Everything comes from the document."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.storage_workload.document import criteria_of

_ADVICE = {
    "queue": "more was asked than is served at a time: fewer users, or more hardware",
    "storage": "the store and what is below it are the bottleneck",
    "generation": "as it should be: the GPU is what users wait for",
}


def render(document: Mapping[str, Any]) -> str:
    """All sections."""
    return "\n".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    summary = document["summary"]
    stats = summary["cache_stats"]
    yield from _assessment(document)
    yield from _section("OVERALL PERFORMANCE")
    if document["interrupted"]:
        yield "  Interrupted: only what was measured until then"
    yield f"  Total Requests: {summary['total_requests']:,} in {summary['elapsed_s']:.1f} s"
    if summary["unfinished_requests"]:
        yield f"  Cut off by the end of the run: {summary['unfinished_requests']}"
    yield f"  Total Tokens Generated: {summary['total_tokens']:,}"
    yield f"  Throughput: {summary['avg_throughput_tokens_per_sec']:,.2f} tok/s"
    yield f"  Requests/s: {summary['requests_per_second']:.2f}"
    alone = document["driver_alone_requests_per_second"]
    if alone is not None and summary["requests_per_second"]:
        times = alone / summary["requests_per_second"]
        yield f"  The driver alone: {alone:,.0f} requests/s, {times:,.0f} times as many"
    yield from _section("LATENCY BREAKDOWN")
    for title, name in (
        ("End-to-End", "end_to_end_latency_ms"), ("Queue wait", "queue_wait_ms"),
        ("Storage I/O", "storage_io_latency_ms"), ("Generation", "generation_latency_ms"),
    ):  # fmt: skip
        yield f"  {title}: {_latency(summary[name])}"
    yield from _dominates(summary["dominates"])
    yield from _section("STORAGE I/O")
    hit_rate = stats["cache_hit_rate"]
    found = f"{stats['cache_hits']:,} of {stats['cache_hits'] + stats['cache_misses']:,} blocks"
    yield f"  Cache Hit Rate: {_percent(hit_rate)} ({found} that might be there)"
    yield from _trace(document["trace"])
    ratio = stats["read_write_ratio"]
    yield (
        f"  Read: {stats['total_read_gb']:.2f} GiB, of it by decoding "
        f"{stats['decode_read_gb']:.2f}, Write: {stats['total_write_gb']:.2f} GiB"
        + (f", Ratio: {ratio:.2f}" if ratio is not None else "")
    )
    yield (
        f"  Bandwidth: read {stats['read_gb_per_sec']:.2f} GB/s, write "
        f"{stats['write_gb_per_sec']:.2f} GB/s; blocks/s: read {stats['read_iops']:,.0f}, write "
        f"{stats['write_iops']:,.0f}"
    )
    yield from _device(document["device"])
    yield from _tiers(document)
    yield from _section("INFERENCE PHASES")
    for phase, count in summary["phases"].items():
        yield f"  {phase}: {count:,} requests"
    yield from _reuse(summary)
    yield from _section("QOS (queue + storage, without generation)")
    for name, qos in summary["qos_metrics"].items():
        sla = qos["sla"]
        yield (
            f"  {name}: {qos['total_requests']:,} requests, P95 {sla['actual_p95_ms']:.1f}ms of "
            f"{sla['target_p95_ms']:g}ms, compliance {_percent(sla['compliance'])}: "
            f"{'met' if sla['met'] else 'NOT met'}"
        )
    yield from _scaling(summary)
    yield from _validation(document["validation"])
    yield from _accounting(document)


def _section(title: str) -> Iterator[str]:
    yield ""
    yield f"### {title} ###"


def _assessment(document: Mapping[str, Any]) -> Iterator[str]:
    criteria = criteria_of(document)
    judged = [criterion for criterion in criteria if criterion.passed is not None]
    word = "PASS" if document["verdict"]["passed"] else "FAIL"
    yield f"### STORAGE PERFORMANCE ASSESSMENT: {word} ###"
    yield f"  Criteria Passed: {sum(c.passed is True for c in judged)}/{len(judged)}"
    for criterion in criteria:
        yield f"  {criterion.line}"
    for line in document["accounting"]:
        if not line["agrees"]:
            yield (
                f"  [FAIL] accounting of {line['tier']}, {line['what']}: {line['counted']} and "
                f"{line['arithmetic']}"
            )
    for note in document["notes"]:
        yield f"  Note: {note}"


def _latency(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "nothing"
    return (
        f"mean {found['mean']:.1f}ms, P50 {found['p50']:.1f}ms, P95 {found['p95']:.1f}ms, "
        f"P99 {found['p99']:.1f}ms"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _dominates(dominates: Mapping[str, Any]) -> Iterator[str]:
    component = dominates["component"]
    if component is not None:
        shares = ", ".join(f"{name} {_percent(s)}" for name, s in dominates["shares"].items())
        yield f"  Dominates: {component} ({shares}): {_ADVICE[component]}"


def _device(device: Mapping[str, Any]) -> Iterator[str]:
    if device:
        yield (
            f"  Device: the disk tier read {device['tier_read_bytes'] / 1e9:.2f} GB and wrote "
            f"{device['tier_written_bytes'] / 1e9:.2f} GB; the kernel counted "
            f"{device['kernel_read_bytes'] / 1e9:.2f} and "
            f"{device['kernel_written_bytes'] / 1e9:.2f} GB for this process, "
            + ("past the page cache" if device["direct"] else "through the page cache")
        )


def _tiers(document: Mapping[str, Any]) -> Iterator[str]:
    summary = document["summary"]
    stats = summary["cache_stats"]
    yield from _section("CACHE TIER DISTRIBUTION")
    for title, tier in (("GPU", "gpu"), ("CPU", "cpu"), ("NVMe", "nvme")):
        blocks, used = stats.get(f"{tier}_entries", 0), stats.get(f"{tier}_used_gb", 0.0)
        yield f"  {title} Entries: {blocks:,} ({used:.2f} GB)"
    for tier in document["tiers"]:
        if f"{tier}_entries" in stats:
            entries, used = stats[f"{tier}_entries"], stats[f"{tier}_used_gb"]
            yield f"  {tier} Entries: {entries:,} ({used:.2f} GB)"
    for tier, share in stats["read_share_by_tier"].items():
        yield f"  Read from {tier}: {_percent(share)} of all bytes"
    yield from _section("TIER LATENCY (P95)")
    for name, row in summary["tier_latency_ms"].items():
        total, device, host = (row[part]["p95"] for part in ("total", "device", "host"))
        yield (
            f"  {name.replace('_', ' ')}: {total:.1f}ms in all, device {device:.1f}ms, "
            f"host {host:.1f}ms ({row['count']:,} of them, {row['gb']:.2f} GiB)"
        )


def _reuse(summary: Mapping[str, Any]) -> Iterator[str]:
    prefix, turns, rag = (
        summary[name] for name in ("prefix_cache_stats", "multi_turn_stats", "rag_stats")
    )
    yield from _section("PREFIX CACHE (system prompts)")
    yield f"  Hits: {prefix['prefix_hits']:,}, Misses: {prefix['prefix_misses']:,}"
    yield from _section("MULTI-TURN")
    yield (
        f"  Hits: {turns['cache_hits']:,}, Misses: {turns['cache_misses']:,}, longest conversation "
        f"{turns['longest_conversation']} turns"
    )
    if rag["chunk_blocks"]:
        yield from _section("RAG")
        yield f"  Blocks of documents: {rag['chunk_hits']:,} of {rag['chunk_blocks']:,} found"


def _scaling(summary: Mapping[str, Any]) -> Iterator[str]:
    found = summary["autoscaling_summary"]
    if found is None:
        return
    yield from _section(f"AUTOSCALING ({found['mode']})")
    for step in summary["autoscaling_stats"]:
        yield (
            f"  {step['timestamp']:.0f} s: {step['users']} users, saturation "
            f"{step['saturation']:.2f}, {step['throughput_gb_per_sec']:.3f} GB/s: {step['reason']}"
        )
    yield f"  {found['says']}"


def _trace(trace: Mapping[str, Any] | None) -> Iterator[str]:
    if trace is not None:
        yield (
            f"  Counted over the same {trace['requests']:,} requests, without a store and a limit: "
            f"{100 * trace['findable']:.2f}%, here {100 * trace['hit_rate']:.2f}%"
        )


def _validation(validation: Mapping[str, Any] | None) -> Iterator[str]:
    if validation is None:
        return
    yield from _section("VALIDATION AGAINST A TRACE")
    for row in validation["rows"]:
        off = row["off_percent"]
        yield (
            f"  {row['name']}: here {row['here']:.4g}, trace {row['trace']:.4g}"
            + (f", off by {off:+.1f}%" if off is not None else "")
        )
    yield f"  {'PASS' if validation['passed'] else 'FAIL'}: {validation['says']}"


def _accounting(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _section("ACCOUNTING")
    if not document["accounting"]:
        yield "  not kept: the store is not in this process"
    for line in document["accounting"]:
        word = "agrees" if line["agrees"] else f"DISAGREES with {line['arithmetic']:,}"
        yield f"  {line['tier']}, {line['what']}: {line['counted']:,} {word}"
    yield f"  Requests: seed {document['seed']}, digest {document['request_digest']}"
