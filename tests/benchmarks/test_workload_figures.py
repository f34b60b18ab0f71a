"""Figures of a run: each follows from its raw samples."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import fake_time
import pytest
from workload_files import WorkloadRun

from benchmarks.harness.record import Record
from benchmarks.storage_workload import document as documents
from benchmarks.storage_workload.accounting import Line
from benchmarks.storage_workload.driver import Driver, Pace
from benchmarks.storage_workload.emulated import EmulatedBackend
from benchmarks.storage_workload.models import MODELS, BlockShape
from benchmarks.storage_workload.options import Options
from benchmarks.storage_workload.requests import Workload
from benchmarks.storage_workload.samples import Moment, RequestSample, Samples, TransferSample
from benchmarks.storage_workload.summary import summarize
from benchmarks.storage_workload.verdict import judge, passed

GIB = 2**30
Row = Mapping[str, Any]


@pytest.fixture(scope="module")
def written(workload_run: WorkloadRun) -> dict[str, Any]:
    return dict(json.loads(workload_run.json.read_text()))


def rows_of(table: Row) -> list[Row]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def total(rows: Sequence[Row], column: str) -> float:
    return math.fsum(row[column] for row in rows)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    ranked = sorted(1000 * each for each in seconds)
    if not ranked:
        return None
    found = {f"p{p}": ranked[math.ceil(p * len(ranked) / 100) - 1] for p in (50, 95, 99)}
    return {"mean": math.fsum(ranked) / len(ranked), **found, "max": ranked[-1]}


def recomputed(samples: Row, accounting: Sequence[Row]) -> dict[str, Any]:
    """The summary, from the columns of the samples alone."""
    end = samples["elapsed_s"]
    requests = [row for row in rows_of(samples["requests"]) if row["ended_s"] <= end]
    moved = [row for row in rows_of(samples["transfers"])
             if row["ended_s"] <= end and row["purpose"] != "ingest"]  # fmt: skip
    reads = [row for row in moved if row["direction"] == "read"]
    writes = [row for row in moved if row["direction"] == "write" and row["purpose"] != "behind"]
    kinds = ("system", "history", "document")
    asked = {kind: total(requests, f"{kind}_asked") for kind in kinds}
    hit = {kind: total(requests, f"{kind}_hit") for kind in kinds}
    passed_s = math.fsum(row["ended_s"] - row["arrived_s"] for row in requests)
    shares = {name: total(requests, f"{name}_s") / passed_s
              for name in ("queue", "storage", "generation")}  # fmt: skip
    begun, later = ([row for row in requests if row[f"{kind}_asked"]]
                    for kind in ("system", "history"))  # fmt: skip
    whole = [row for row in later if row["history_hit"] == row["history_asked"]]
    held = {(row["tier"], row["what"].split(":")[0]): row["counted"] for row in accounting}
    stats = {
        "cache_hit_rate": sum(hit.values()) / sum(asked.values()),
        "cache_hits": sum(hit.values()),
        "cache_misses": sum(asked.values()) - sum(hit.values()),
        "total_read_gb": total(reads, "num_bytes") / GIB,
        "total_write_gb": total(writes, "num_bytes") / GIB,
        "decode_read_gb": total([r for r in reads if r["purpose"] == "decode"], "num_bytes") / GIB,
        "read_write_ratio": total(reads, "num_bytes") / total(writes, "num_bytes"),
        "read_gb_per_sec": total(reads, "num_bytes") / 1e9 / end,
        "write_gb_per_sec": total(writes, "num_bytes") / 1e9 / end,
        "read_iops": total(reads, "blocks") / end,
        "write_iops": total(writes, "blocks") / end,
        "read_share_by_tier": {},
    }
    tiers: dict[str, Any] = {}
    for tier, name in (("memory", "cpu"), ("disk", "nvme")):
        stats[f"{name}_entries"] = held[tier, "blocks"]
        stats[f"{name}_used_gb"] = held[tier, "bytes"] / GIB
        read = [row for row in reads if row["tier"] == tier]
        if read:
            share = total(read, "num_bytes") / total(reads, "num_bytes")
            stats["read_share_by_tier"][name] = share
        for direction in ("read", "write"):
            here = [r for r in moved if (r["tier"], r["direction"]) == (tier, direction)]
            if here:
                tiers[f"{name}_{direction}"] = {
                    "count": len(here),
                    "gb": total(here, "num_bytes") / GIB,
                    "total": spread([r["total_s"] for r in here]),
                    "device": spread([r["device_s"] for r in here]),
                    "host": spread([max(0.0, r["total_s"] - r["device_s"]) for r in here]),
                }
    qos: dict[str, Any] = {}
    for name, target in (("interactive", 50), ("responsive", 100), ("batch", 1000)):
        mine = [row for row in requests if row["qos"] == name]
        if mine:
            served = spread([row["queue_s"] + row["storage_s"] for row in mine])
            within = sum(1000 * (r["queue_s"] + r["storage_s"]) <= target for r in mine)
            assert served is not None
            qos[name] = {
                "total_requests": len(mine),
                "latency_ms": served,
                "end_to_end_latency_ms": spread([r["ended_s"] - r["arrived_s"] for r in mine]),
                "sla": {"target_p95_ms": target, "actual_p95_ms": served["p95"],
                        "compliance": within / len(mine), "met": within >= 0.95 * len(mine)},
            }  # fmt: skip
    cut_off = samples["num_unfinished"] + len(samples["requests"]["rows"]) - len(requests)
    return {
        "elapsed_s": end,
        "total_requests": len(requests),
        "unfinished_requests": cut_off,
        "total_tokens": total(requests, "generation_tokens"),
        "avg_throughput_tokens_per_sec": total(requests, "generation_tokens") / end,
        "requests_per_second": len(requests) / end,
        "end_to_end_latency_ms": spread([r["ended_s"] - r["arrived_s"] for r in requests]),
        "storage_io_latency_ms": spread([r["storage_s"] for r in requests]),
        "generation_latency_ms": spread([r["generation_s"] for r in requests]),
        "queue_wait_ms": spread([r["queue_s"] for r in requests]),
        "dominates": {"component": max(shares, key=lambda name: shares[name]),
                      "shares": {**shares, "driver": 1 - sum(shares.values())}},
        "cache_stats": stats,
        "tier_latency_ms": tiers,
        "phases": {name: sum(row["phase"] == name for row in requests)
                   for name in ("prefill", "prefill_decode")},
        "qos_metrics": qos,
        "prefix_cache_stats": {
            "prefix_hits": sum(row["system_hit"] == row["system_asked"] for row in begun),
            "prefix_misses": sum(row["system_hit"] < row["system_asked"] for row in begun),
            "system_prompt_reuse": sum(row["system_hit"] > 0 for row in begun),
            "bytes_saved": total(begun, "system_hit_bytes"),
            "system_prompt_blocks": asked["system"],
            "system_prompt_block_hits": hit["system"],
        },
        "multi_turn_stats": {
            "cache_hits": len(whole),
            "cache_misses": len(later) - len(whole),
            "hit_rate": len(whole) / len(later),
            "history_blocks": asked["history"],
            "history_block_hits": hit["history"],
            "longest_conversation": max(row["turn"] for row in requests),
        },
        "rag_stats": {
            "requests": sum(row["document_asked"] > 0 for row in requests),
            "chunk_blocks": asked["document"],
            "chunk_hits": hit["document"],
        },
        "autoscaling_stats": [],
        "autoscaling_summary": None,
    }  # fmt: skip


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, float) and not isinstance(found, bool):
        # Samples are written to a tenth of a microsecond.
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-3), where
    else:
        assert found == expected, where


def test_every_figure_of_the_summary_can_be_recomputed_from_the_samples_of_the_json(written):
    expected = recomputed(written["samples"], written["accounting"])
    assert_same(written["summary"], expected, "summary")
    stats = written["summary"]["cache_stats"]
    assert stats["read_share_by_tier"].keys() == {"cpu", "nvme"}, "the run was to reach the disk"
    assert 0 < stats["cache_hit_rate"] <= 1 and written["summary"]["total_requests"] == 6 * 8
    assert written["summary"]["rag_stats"]["requests"] > 0
    assert written["summary"]["prefix_cache_stats"]["bytes_saved"] > 0


def test_the_printed_verdict_can_be_recomputed_from_the_samples_of_the_json(written, workload_run):
    expected = recomputed(written["samples"], written["accounting"])
    tiers, hit_rate = expected["tier_latency_ms"], expected["cache_stats"]["cache_hit_rate"]
    cpu = max(tiers["cpu_read"]["total"]["p95"], tiers["cpu_write"]["total"]["p95"])
    lines = []
    for name, actual, limit in (
        ("NVMe Write P95 < 500ms", tiers["nvme_write"]["device"]["p95"], 500),
        ("NVMe Read P95 < 200ms", tiers["nvme_read"]["device"]["p95"], 200),
        ("CPU RAM P95 < 150ms", cpu, 150),
    ):
        lines.append(f"  [{'PASS' if actual < limit else 'FAIL'}] {name}: {actual:,.2f}ms")
    word = "PASS" if hit_rate > 0.30 else "FAIL"
    lines.append(f"  [{word}] Cache Hit Rate > 30%: {100 * hit_rate:.1f}%")
    num_passed = sum("[PASS]" in line for line in lines)
    wrong = [row for row in written["accounting"] if row["counted"] != row["arithmetic"]]
    whole = "PASS" if num_passed == 4 and not wrong else "FAIL"
    head = [f"### STORAGE PERFORMANCE ASSESSMENT: {whole} ###",
            f"  Criteria Passed: {num_passed}/4"]  # fmt: skip
    assert "\n".join([*head, *lines]) in workload_run.printed
    assert workload_run.status == (0 if whole == "PASS" else 1)


def test_the_timeline_can_be_recomputed_from_the_moments_and_they_add_up_to_the_totals(written):
    moments = rows_of(written["samples"]["moments"])
    timeline = written["throughput_timeline"]
    assert len(timeline) == len(moments) - 1 >= 1
    for before, now, found in zip(moments, moments[1:], timeline, strict=False):
        passed_s = now["time_s"] - before["time_s"]
        assert_same(
            found,
            {
                "timestamp": now["time_s"],
                "num_users": now["users"],
                "in_flight": now["in_flight"],
                "throughput_tokens_per_sec": (now["tokens"] - before["tokens"]) / passed_s,
                "read_gb_per_sec": (now["read_bytes"] - before["read_bytes"]) / passed_s / 1e9,
                "write_gb_per_sec": (now["written_bytes"] - before["written_bytes"])
                / passed_s / 1e9,
                "used_bytes": now["used_bytes"],
            },
            "timeline",
        )  # fmt: skip
    assert moments[-1]["tokens"] >= written["summary"]["total_tokens"]


def test_the_json_has_the_keys_of_the_source_and_is_a_record_like_any_other(written, workload_run):
    assert written.keys() >= {"summary", "throughput_timeline", "seed", "options", "samples"}
    assert written["seed"] == 42 and len(written["request_digest"]) == 64
    assert written["options"]["cpu_mem_gb"] == 0.01
    record = Record.read(workload_run.json)
    assert record.benchmark == "benchmarks.storage_workload"
    verdict = next(figure.values for figure in record.figures if figure.name == "verdict")
    criteria = [each["passed"] for each in written["verdict"]["criteria"]]
    assert verdict == {"passed": criteria.count(True), "judged": 4 - criteria.count(None)}
    assert str(workload_run.folder) not in record.command.replace(
        f"--cache-dir {workload_run.folder}", ""
    ), "where a run's files go is no part of it"


def test_samples_come_back_from_the_json_as_they_were_written(written):
    samples = Samples.from_json(written["samples"])
    assert samples.requests[0].served_s > 0
    assert json.loads(json.dumps(samples.to_json())) == written["samples"]
    broken = {**written["samples"], "requests": {"columns": ["user"], "rows": []}}
    with pytest.raises(ValueError, match="columns"):
        Samples.from_json(broken)


def test_nothing_but_what_was_asked_for_is_left_behind(workload_run):
    names = {path.name for path in workload_run.folder.iterdir()}
    assert names == {"run.json", "run.html"}


# ── verdicts, from invented latencies ────────────────────────────────────────────────────────


def request(**more: Any) -> RequestSample:
    plain: dict[str, Any] = {
        "arrived_s": 0.0, "ended_s": 1.0, "user": 0, "number": 0, "qos": "batch",
        "persona": "coding", "phase": "prefill_decode", "turn": 1, "context_tokens": 100,
        "generation_tokens": 50, "queue_s": 0.0, "storage_s": 0.1, "generation_s": 0.9,
        "system_asked": 0, "system_hit": 0, "history_asked": 10, "history_hit": 10,
        "document_asked": 0, "document_hit": 0,
    }  # fmt: skip
    return RequestSample(**plain | more)


def transfer(direction: str, tier: str, total_s: float, device_s: float = 0.0) -> TransferSample:
    return TransferSample(0.5, 0, 0, "reuse", direction, tier, 1, 1000, total_s, device_s, 0.0)


def samples_of(
    requests: Sequence[RequestSample], transfers: Sequence[TransferSample] = ()
) -> Samples:
    return Samples([*requests], [*transfers], [Moment(0.0, 1, 0, 0, 0, 0, 0, {})], 2.0)


FAST = [
    transfer("write", "disk", 0.6, 0.0452), transfer("read", "disk", 0.3, 0.12345),
    transfer("read", "memory", 0.0123), transfer("write", "memory", 0.004),
]  # fmt: skip


def verdict(samples: Samples, profile: str = "latency") -> list[str]:
    return [criterion.line for criterion in judge(summarize(samples), profile)]


def test_a_verdict_reads_like_the_source_s():
    requests = [request(history_asked=1000, history_hit=675)]
    assert verdict(samples_of(requests, FAST)) == [
        "[PASS] NVMe Write P95 < 500ms: 45.20ms",
        "[PASS] NVMe Read P95 < 200ms: 123.45ms",
        "[PASS] CPU RAM P95 < 150ms: 12.30ms",
        "[PASS] Cache Hit Rate > 30%: 67.5%",
    ]


@pytest.mark.parametrize(
    ("slow", "line"),
    [
        (transfer("write", "disk", 1, 0.5), "[FAIL] NVMe Write P95 < 500ms: 500.00ms"),
        (transfer("read", "disk", 1, 0.2), "[FAIL] NVMe Read P95 < 200ms: 200.00ms"),
        (transfer("read", "memory", 0.15), "[FAIL] CPU RAM P95 < 150ms: 150.00ms"),
        (transfer("write", "memory", 0.15), "[FAIL] CPU RAM P95 < 150ms: 150.00ms"),
    ],
)
def test_one_limit_that_is_reached_fails_the_whole_verdict(slow, line):
    criteria = judge(summarize(samples_of([request()], [*FAST, slow])), "latency")
    assert [c.line for c in criteria if c.passed is not True] == [line]
    assert not passed(criteria)


def test_a_hit_rate_of_just_thirty_percent_fails():
    assert verdict(samples_of([request(history_hit=3)], FAST))[-1] == (
        "[FAIL] Cache Hit Rate > 30%: 30.0%"
    )


def test_what_could_not_be_judged_is_skipped_and_nothing_judged_is_no_pass():
    criteria = judge(summarize(samples_of([request(history_asked=0, history_hit=0)])), "latency")
    assert [c.line for c in criteria] == [
        "[SKIPPED] NVMe Write P95 < 500ms: this tier did nothing",
        "[SKIPPED] NVMe Read P95 < 200ms: this tier did nothing",
        "[SKIPPED] CPU RAM P95 < 150ms: this tier did nothing",
        "[SKIPPED] Cache Hit Rate > 30%: nothing could be found again",
    ]
    assert not passed(criteria)
    only_memory = judge(summarize(samples_of([request()], FAST[2:])), "latency")
    assert passed(only_memory) and [c.passed for c in only_memory] == [None, None, True, True]


def test_the_profile_of_a_submission_asks_only_whether_anything_was_generated():
    slow = samples_of([request(history_hit=0)], [transfer("read", "disk", 9, 9)])
    assert verdict(slow, "throughput") == ["[PASS] Throughput > 0 tok/s: 25.00 tok/s"]
    assert verdict(samples_of([]), "throughput") == ["[FAIL] Throughput > 0 tok/s: 0.00 tok/s"]


def test_books_that_disagree_fail_a_run_whose_criteria_are_all_met():
    def is_passed(counted: int) -> bool:
        run = documents.Run(
            Options(), Record("…", "…"), "digest", samples=samples_of([request()], FAST),
            accounting=[Line("disk", "blocks", counted, 7)],
        )  # fmt: skip
        return bool(run.document()["verdict"]["passed"])

    assert is_passed(7) and not is_passed(8)


def test_five_of_a_hundred_late_answers_are_within_an_agreement_and_six_are_not():
    def met(num_late: int) -> bool:
        times = [0.2] * num_late + [0.1] * (100 - num_late)
        requests = [request(qos="responsive", storage_s=time) for time in times]
        return bool(summarize(samples_of(requests))["qos_metrics"]["responsive"]["sla"]["met"])

    assert met(5) and not met(6)


def test_what_ends_after_the_run_is_over_counts_nowhere_but_among_the_cut_off():
    late = transfer("read", "disk", 1.0)._replace(ended_s=2.1)
    summary = summarize(samples_of([request(), request(ended_s=2.1, qos="interactive")], [late]))
    assert summary["total_requests"] == 1 and summary["unfinished_requests"] == 1
    assert summary["cache_stats"]["total_read_gb"] == 0
    assert "interactive" not in summary["qos_metrics"]


def of_emulated_users(workload: Workload) -> dict[str, Any]:
    async def run() -> Samples:
        driver = Driver(workload, EmulatedBackend(1e12), BlockShape(256, 1), Pace())
        await driver.ingest(workload.documents())
        await driver.run_users(12, 20.0)
        return driver.samples

    return summarize(fake_time.run(run()))


def test_each_kind_of_reuse_counts_when_it_is_on_and_not_at_all_when_it_is_off():
    on = Workload(MODELS["tiny-1b"], 5, num_documents=3)
    summary = of_emulated_users(on)
    assert summary["multi_turn_stats"]["cache_hits"] > 0
    assert summary["prefix_cache_stats"]["prefix_hits"] > 0
    assert summary["prefix_cache_stats"]["prefix_misses"] >= 3, "nobody has it before the first"
    found = summary["prefix_cache_stats"]["system_prompt_block_hits"]
    assert summary["prefix_cache_stats"]["bytes_saved"] == found * 256
    assert summary["rag_stats"]["chunk_hits"] == summary["rag_stats"]["chunk_blocks"] > 0
    assert summary["cache_stats"]["total_write_gb"] > 0
    for off, stats in (
        ({"multi_turn": False, "system_prompts": False}, "multi_turn_stats"),
        ({"system_prompts": False}, "prefix_cache_stats"),
        ({"num_documents": 0}, "rag_stats"),
    ):
        counters = of_emulated_users(on._replace(**off))[stats]
        counters.pop("longest_conversation", None)
        assert not any(counters.values()), counters


def test_nothing_at_all_is_a_summary_too():
    summary = summarize(Samples())
    assert summary["end_to_end_latency_ms"] is None
    assert summary["cache_stats"]["cache_hit_rate"] is None
    assert summary["dominates"]["component"] is None


def test_samples_get_into_their_place_of_the_json_and_no_other(tmp_path):
    document = {"options": {"samples": None}, "samples": {"elapsed_s": 1.0}, "last": None}
    documents.write(document, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == document


def test_a_system_prompt_that_was_found_in_part_is_reused_and_no_hit():
    requests = [
        request(system_asked=4, system_hit=hit, system_hit_bytes=10 * hit) for hit in (0, 3, 4)
    ]
    stats = summarize(samples_of(requests))["prefix_cache_stats"]
    assert (stats["prefix_hits"], stats["prefix_misses"]) == (1, 2)
    assert (stats["system_prompt_reuse"], stats["bytes_saved"]) == (2, 70)


def test_a_run_in_which_nothing_was_answered_has_not_passed():
    fast = [transfer("write", "disk", 0.01, 0.01)]
    assert verdict(samples_of([], fast))[-1] == "[FAIL] Requests answered > 0: 0.00"
    assert not passed(judge(summarize(samples_of([], fast)), "latency"))
