"""The same run several times: figures over the trials, what passes, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.record import Record
from benchmarks.storage_workload.pages import page, report
from benchmarks.storage_workload.pages.document import BENCHMARK, Run
from benchmarks.storage_workload.plan import flags
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import trials
from remote_server.errors import ConfigError


def document(tokens: float, hits: bool | None = True, **more: Any) -> dict[str, Any]:
    """As much of a run's as is looked at."""
    latency = {"p95": 10.0 * tokens}
    return {
        "summary": {
            "requests_per_second": tokens / 10, "avg_throughput_tokens_per_sec": tokens,
            "elapsed_s": 60.0, "end_to_end_latency_ms": latency, "storage_io_latency_ms": None,
            "cache_stats": {"cache_hit_rate": None, "read_gb_per_sec": 1.0,
                            "write_gb_per_sec": 0.0},
            "tier_latency_ms": {"nvme_read": {"device": latency}},
        },
        "verdict": {"criteria": [{"name": "Hits", "passed": hits}]},
        "accounting": [{"agrees": True}], "failure": None, "label": "", **more,
    }  # fmt: skip


def test_mean_deviation_and_variation_are_of_all_trials_that_have_the_figure():
    found = {one.name: one for one in trials.spreads([document(90), document(100), document(110)])}
    speed = found["tokens/s"]
    assert (speed.mean, speed.deviation, speed.cv_percent) == (100, 10, 10)
    assert found["NVMe read P95, device, ms"].values == (900, 1000, 1100)
    assert "hit rate, %" not in found and "storage P95, ms" not in found
    assert found["write GB/s"].cv_percent is None, "there is no part of nothing"
    (one,) = [one for one in trials.spreads([document(90)]) if one.name == "tokens/s"]
    assert (one.deviation, one.cv_percent) == (None, None)


def judged(*of_trials: dict[str, Any], cv: float = 10.0) -> list[bool | None]:
    return [one.passed for one in trials.judge(of_trials, trials.spreads(of_trials), cv)]


def test_a_criterion_passes_in_every_trial_or_not_at_all():
    assert judged(document(100), document(100)) == [True, True, True]
    assert judged(document(100), document(100, hits=False)) == [False, True, True]
    assert judged(document(100), document(100, hits=None)) == [True, True, True]
    assert judged(document(100, hits=None)) == [None, True, None]
    wrong = document(100, accounting=[{"agrees": False}])
    assert judged(document(100), wrong) == [True, False, True]
    assert judged(document(100), document(100, failure="the server left")) == [True, False, True]


def test_trials_that_were_interrupted_never_pass() -> None:
    """One trial of three was a PASS, and nothing named the two that were missing."""
    first = document(100, options={}, interrupted=False)
    spreads = trials.spreads([first])
    criteria = trials.judge([first], spreads, 10.0)
    text = trials.render([first], spreads, criteria, interrupted=True)
    assert "VALIDATION: NOT JUDGED" in text and "No verdict: it was interrupted" in text
    assert "PASS ###" in trials.render([first], spreads, criteria, interrupted=False)


def test_throughput_that_varies_by_more_than_allowed_fails():
    three = [document(90), document(100), document(110)]
    assert judged(*three, cv=10.0)[-1] is True
    assert judged(*three, cv=9.9)[-1] is False
    assert not trials.passed([])


def run_of(options: Options) -> Run:
    run = Run(options, Record.begin(BENCHMARK, []), "digest")
    run.samples.elapsed_s = 1.0
    return run


def test_validate_writes_each_trial_and_its_verdict_and_ends_with_1_when_it_fails(
    tmp_path: Path, capsys
):
    seen: list[Options] = []

    def run_one(options: Options) -> Run:
        seen.append(options)
        return run_of(options)

    words = ["--trials", "2", "--warm-up", "3", "--folder", str(tmp_path), "--scenario", "quick"]
    assert trials.main([*words, "--scale", "0.5"], run_one) == 1, "nothing was generated"
    assert [one.duration for one in seen] == [3, 120, 120]
    assert len({(one.seed, one.cpu_mem_gb, one.bytes_scale) for one in seen}) == 1
    out = capsys.readouterr().out
    assert out.startswith("### VALIDATION: FAIL (SCALED: blocks of 0.5 times their size) ###")
    assert (tmp_path / "validation.txt").read_text().splitlines() == out.splitlines()[:-2]
    record = json.loads((tmp_path / "validation.json").read_text())
    assert record["parameters"]["verdict"]["passed"] is False
    assert record["command"].endswith(
        "validate --trials 2 --warm-up 3 --scenario quick --scale 0.5"
    )
    figure = {one["name"]: one["values"] for one in record["figures"]}["elapsed, s"]
    assert {"mean", "std", "trial 1", "trial 2"} <= figure.keys()
    assert all((tmp_path / f"trial_{number}.json").exists() for number in (1, 2))


def test_scale_shrinks_blocks_and_tiers_but_not_what_the_command_line_names():
    options = flags.parse(["--scenario", "submission-70b", "--scale", "0.125", "--duration", "60"])
    assert (options.bytes_scale, options.cpu_mem_gb, options.gpu_mem_gb) == (0.125, 0.5, 0)
    assert (options.model, options.num_users) == ("llama3.1-70b-instruct", 40)
    named = flags.parse(["--scale", "0.5", "--cpu-mem-gb", "7", "--storage-capacity-gb", "6"])
    assert (named.bytes_scale, named.cpu_mem_gb, named.storage_capacity_gb) == (0.5, 7, 6)
    with pytest.raises(ConfigError):
        flags.parse(["--scale", "many"])


def test_a_scaled_submission_is_called_so_in_the_json_the_report_and_the_page(workload_run):
    options = flags.parse(["--scenario", "submission-8b", "--scale", "0.125", "--duration", "60"])
    label = (
        "SCALED: blocks of 0.125 times their size; NO MLPERF SUBMISSION: its load on this "
        "project's own store; 60 s in place of 600"
    )
    found = run_of(options).document()
    assert found["label"] == found["parameters"]["label"] == label
    measured = {**json.loads(workload_run.json.read_text()), "label": label}
    assert report.render(measured).startswith(f"{label}\n\n### STORAGE PERFORMANCE ASSESSMENT: ")
    shown = page.page(measured, {})
    escaped = label.replace("'", "&#x27;")
    assert f"<title>Storage workload, {escaped}</title>" in shown
    assert f"<strong>{escaped}</strong>" in shown
