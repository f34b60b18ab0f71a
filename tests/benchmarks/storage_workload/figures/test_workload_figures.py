"""Figures of a run: each follows from its raw samples."""

import json
from collections.abc import Sequence
from typing import Any

import fake_time
import pytest
from workload_files import WorkloadRun

from benchmarks.harness.record import Record
from benchmarks.storage_workload.backends.emulated import EmulatedBackend
from benchmarks.storage_workload.backends.host.device_times import Calls, Interval
from benchmarks.storage_workload.figures.accounting import Line
from benchmarks.storage_workload.figures.samples import (
    Moment,
    RequestSample,
    Samples,
    TransferSample,
)
from benchmarks.storage_workload.figures.summary import summarize, throughput_timeline
from benchmarks.storage_workload.load.driver import Driver, Pace
from benchmarks.storage_workload.pages import document as documents
from benchmarks.storage_workload.pages import report
from benchmarks.storage_workload.pages.plots import charts
from benchmarks.storage_workload.pages.verdict import judge, passed
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.traffic.models import MODELS, BlockShape
from benchmarks.storage_workload.traffic.requests import Workload
from remote_server.store.pages import PAGE


@pytest.fixture(scope="module")
def written(workload_run: WorkloadRun) -> dict[str, Any]:
    return dict(json.loads(workload_run.json.read_text()))


def assert_same(found: Any, expected: Any, where: str) -> None:
    """But for keys that only `found` has."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, float) and not isinstance(found, bool):
        # Samples are written to a tenth of a microsecond.
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-3), where
    else:
        assert found == expected, where


def test_the_figures_of_the_json_are_those_of_its_samples_and_of_its_books(written, workload_run):
    assert Record.read(workload_run.json).benchmark == "benchmarks.storage_workload"
    assert written["seed"] == 42
    samples = Samples.from_json(written["samples"])
    assert_same(written["summary"], summarize(samples), "summary")
    timeline = throughput_timeline(samples)
    assert timeline and len(timeline) == len(written["throughput_timeline"])
    for found, expected in zip(written["throughput_timeline"], timeline, strict=True):
        assert_same(found, expected, "timeline")
    stats = written["summary"]["cache_stats"]
    held = {(line["tier"], line["what"].split(":")[0]): line["counted"]
            for line in written["accounting"]}  # fmt: skip
    for tier, name in (("memory", "cpu"), ("disk", "nvme")):
        assert stats[f"{name}_entries"] == held[tier, "blocks"]
        assert stats[f"{name}_used_gb"] == pytest.approx(held[tier, "bytes"] / 2**30)
    assert stats["read_share_by_tier"].keys() == {"cpu", "nvme"}, "the run was to reach the disk"
    assert 0 < stats["cache_hit_rate"] <= 1 and written["summary"]["total_requests"] == 6 * 8
    assert written["summary"]["rag_stats"]["requests"] > 0
    assert written["summary"]["prefix_cache_stats"]["bytes_saved"] > 0


def test_samples_come_back_from_the_json_as_they_were_written(written):
    samples = Samples.from_json(written["samples"])
    assert samples.requests[0].served_s > 0
    assert json.loads(json.dumps(samples.to_json())) == written["samples"]
    broken = {**written["samples"], "requests": {"columns": ["user"], "rows": []}}
    with pytest.raises(ValueError, match="columns"):
        Samples.from_json(broken)


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


def in_ms(*values: float) -> dict[str, float]:
    p50 = values[(len(values) - 1) // 2]
    high = dict.fromkeys(("p95", "p99", "max"), values[-1])
    return {"mean": sum(values) / len(values), "p50": p50, **high}


def test_each_figure_is_computed_as_its_name_says():
    requests = [
        request(queue_s=0.1, storage_s=0.2, generation_s=0.6),
        request(
            arrived_s=0.5, ended_s=2.0, qos="interactive", phase="prefill", turn=3,
            generation_tokens=30, queue_s=0.5, storage_s=0.4, generation_s=0.5, history_hit=5,
            system_asked=4, system_hit=3, system_hit_bytes=30, document_asked=2, document_hit=2,
        ),
    ]  # fmt: skip
    moved = [
        transfer("read", "disk", 0.3, 0.1)._replace(blocks=4, num_bytes=4 * 10**9),
        transfer("read", "memory", 0.1)._replace(purpose="decode", num_bytes=10**9),
        transfer("write", "memory", 0.2)._replace(blocks=5, num_bytes=5 * 10**9),
        transfer("write", "disk", 0.6, 0.5)._replace(purpose="behind", num_bytes=5 * 10**9),
        transfer("write", "disk", 9.0)._replace(purpose="ingest"),
    ]
    found = summarize(samples_of(requests, moved))
    gb = 10**9 / 2**30
    expected = {
        "total_requests": 2, "total_tokens": 80, "avg_throughput_tokens_per_sec": 40.0,
        "requests_per_second": 1.0, "end_to_end_latency_ms": in_ms(1000.0, 1500.0),
        "storage_io_latency_ms": in_ms(200.0, 400.0), "queue_wait_ms": in_ms(100.0, 500.0),
        "generation_latency_ms": in_ms(500.0, 600.0),
        "phases": {"prefill": 1, "prefill_decode": 1},
        "dominates": {"component": "generation", "shares": {
            "queue": 0.24, "storage": 0.24, "generation": 0.44, "driver": 0.08,
        }},
        "cache_stats": {
            "cache_hit_rate": 20 / 26, "cache_hits": 20, "cache_misses": 6,
            "total_read_gb": 5 * gb, "total_write_gb": 5 * gb, "decode_read_gb": gb,
            "read_write_ratio": 1.0, "read_gb_per_sec": 2.5, "write_gb_per_sec": 2.5,
            "read_iops": 2.5, "write_iops": 2.5, "read_share_by_tier": {"cpu": 0.2, "nvme": 0.8},
        },
        "tier_latency_ms": {
            "nvme_read": {"count": 1, "gb": 4 * gb, "total": in_ms(300.0),
                          "device": in_ms(100.0), "host": in_ms(200.0)},
            "nvme_write": {"count": 1, "gb": 5 * gb, "total": in_ms(600.0)},
        },
        "qos_metrics": {
            "interactive": {"latency_ms": in_ms(900.0),
                            "sla": {"target_p95_ms": 50, "actual_p95_ms": 900.0,
                                    "compliance": 0.0, "met": False}},
            "batch": {"latency_ms": in_ms(300.0), "sla": {"target_p95_ms": 1000, "met": True}},
        },
        "prefix_cache_stats": {"prefix_hits": 0, "prefix_misses": 1, "system_prompt_reuse": 1,
                               "bytes_saved": 30, "system_prompt_blocks": 4,
                               "system_prompt_block_hits": 3},
        "multi_turn_stats": {"cache_hits": 1, "cache_misses": 1, "hit_rate": 0.5,
                             "history_blocks": 20, "history_block_hits": 15,
                             "longest_conversation": 3},
        "rag_stats": {"requests": 1, "chunk_blocks": 2, "chunk_hits": 2},
    }  # fmt: skip
    assert_same(found, expected, "summary")
    assert expected.keys() >= found.keys() - {"elapsed_s", "unfinished_requests"}


def test_the_time_of_each_call_of_the_device_stands_beside_that_of_the_whole_operation(
    written, workload_run
):
    calls = written["device"]["calls"]
    figures = {figure["name"]: figure["values"] for figure in written["figures"]}
    for kind in ("read", "write"):
        one, whole = calls[kind], written["summary"]["tier_latency_ms"][f"nvme_{kind}"]
        assert one["count"] > 0
        assert 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["p95"] <= one["latency_ms"]["p99"]
        assert figures[f"device {kind} call"]["p99"] == pytest.approx(
            one["latency_ms"]["p99"], rel=1e-5
        )
        shown = [" / ".join(f"{whole[part][p]:,.1f}" for p in ("p50", "p95", "p99"))
                 for part in ("total", "device", "host")]  # fmt: skip
        line = f"nvme {kind}: {shown[0]} ms in all, device {shown[1]}, host {shown[2]} ("
        assert line in workload_run.printed
        assert f"one {kind} call of the device: " in workload_run.printed


def test_only_calls_during_the_measurement_count():
    calls = Calls(PAGE)
    for is_measured in (False, True, False):
        calls.is_measured = is_measured
        calls.add("read", "segment", PAGE, PAGE, Interval(1.0, 1.5))
    assert [*calls.seconds["read"]] == [0.5] and not calls.seconds["write"]
    assert calls.num_calls["read"] == 3


def test_a_line_of_time_has_the_rates_since_the_moment_before():
    moments = [Moment(1.0, 3, 1, 5, 100, 10**9, 0, {}),
               Moment(3.0, 4, 2, 9, 160, 5 * 10**9, 10**9, {"disk": 7})]  # fmt: skip
    assert throughput_timeline(Samples([], [], moments, 3.0)) == [
        {
            "timestamp": 3.0, "num_users": 4, "in_flight": 2, "throughput_tokens_per_sec": 30.0,
            "read_gb_per_sec": 2.0, "write_gb_per_sec": 0.5, "used_bytes": {"disk": 7},
        }
    ]  # fmt: skip


FAST = [
    transfer("write", "disk", 0.6, 0.0452), transfer("read", "disk", 0.3, 0.12345),
    transfer("read", "memory", 0.0123), transfer("write", "memory", 0.004),
]  # fmt: skip


def verdict(samples: Samples, profile: str = "latency") -> list[str]:
    return [criterion.line for criterion in judge(summarize(samples), profile)]


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


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (Options(emulated_device=2.0), "EMULATED: a device of 2 GB/s, and no storage"),
        (Options(bytes_scale=0.125), "SCALED: blocks of 0.125 times their size"),
    ],
)
def test_a_run_without_a_subject_may_fail_and_never_passes(options: Options, label: str):
    """Its criteria are met whatever storage does, or by blocks of another size."""

    def document_of(counted: int) -> dict[str, Any]:
        return documents.Run(
            options, Record("…", "…"), "digest", samples=samples_of([request()], FAST),
            accounting=[Line("disk", "blocks", counted, 7)],
        ).document()  # fmt: skip

    met, failed = document_of(7), document_of(8)
    assert met["verdict"]["passed"] is None and met["verdict"]["not_judged"]
    assert (documents.word_of(met), documents.word_of(failed)) == ("NOT JUDGED", "FAIL")
    text = report.render(met)
    assert met["label"] == label and text.startswith(label)
    assert "NOT JUDGED" in text and "ASSESSMENT: PASS" not in text
    drawn = charts(met)
    assert all(label in chart.svg() for chart in drawn.values())


@pytest.mark.parametrize("requests", [[request()], []], ids=["some answers", "no answer"])
def test_a_run_that_was_interrupted_is_not_judged(requests: list[RequestSample]) -> None:
    """Ctrl-C after a second of two minutes gave a PASS, and before the first answer a FAIL."""
    interrupted = documents.Run(
        Options(), Record("…", "…"), "digest", samples=samples_of(requests, FAST),
        interrupted=True,
    ).document()  # fmt: skip
    assert interrupted["verdict"]["passed"] is None
    assert documents.word_of(interrupted) == "NOT JUDGED"
    text = report.render(interrupted)
    assert "No verdict: it was interrupted" in text and "ASSESSMENT: PASS" not in text


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
        await driver.run_users(6, 10.0)
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


def test_a_run_in_which_nothing_was_answered_has_not_passed():
    fast = [transfer("write", "disk", 0.01, 0.01)]
    assert verdict(samples_of([], fast))[-1] == "[FAIL] Requests answered > 0: 0.00"
    assert not passed(judge(summarize(samples_of([], fast)), "latency"))
