"""What people look at: the report, the page, the charts, and the line while they wait."""

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import fake_time
import pytest
from matplotlib.figure import Figure
from pages import Parsed
from workload_files import WorkloadRun

from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.backends.emulated import EmulatedBackend
from benchmarks.storage_workload.figures.samples import Samples
from benchmarks.storage_workload.load.driver import Driver, Pace
from benchmarks.storage_workload.pages import report
from benchmarks.storage_workload.pages.page import page
from benchmarks.storage_workload.pages.plots import charts
from benchmarks.storage_workload.runs.progress import LOGGED_EVERY_S, Progress
from benchmarks.storage_workload.traffic.models import MODELS, BlockShape
from benchmarks.storage_workload.traffic.requests import Workload

HEADERS = [
    "STORAGE PERFORMANCE ASSESSMENT: NOT JUDGED", "TEST CONDITIONS", "OVERALL PERFORMANCE",
    "LATENCY BREAKDOWN", "STORAGE I/O", "CACHE TIER DISTRIBUTION",
    "TIER LATENCY (P50 / P95 / P99)", "CACHE TYPES",
    "INFERENCE PHASES", "PREFIX CACHE (system prompts)", "MULTI-TURN", "RAG",
    "QOS (queue + storage, without generation)", "AUTOSCALING", "VALIDATION AGAINST A TRACE",
    "ACCOUNTING",
]  # fmt: skip

STEP = {
    "timestamp": 10.0, "users": 20, "active": 20, "saturation": 0.5, "next_users": 24,
    "throughput_gb_per_sec": 1.25, "reason": "more",
}  # fmt: skip


def document_of(run: WorkloadRun) -> dict[str, Any]:
    """With a search for users and a recorded trace, as if both had been asked for; nothing has
    failed, however busy the machine was. Its blocks are scaled."""
    found = json.loads(run.json.read_text())
    found["summary"]["autoscaling_stats"] = [STEP]
    found["summary"]["autoscaling_summary"] = {"mode": "qos", "says": "24 users, say"}
    found["validation"] = {
        "passed": False, "says": "the hit rate is off by +50.0%, 5% are allowed",
        "rows": [{"name": "hit rate", "here": 0.6, "trace": 0.4, "off_percent": 50.0}],
    }  # fmt: skip
    found["trace"] = {"requests": 1200, "findable": 0.41234, "hit_rate": 0.4}
    found["verdict"]["passed"] = None
    return dict(found)


def test_a_report_has_every_section_of_the_source_and_its_figures(workload_run):
    text = report.render(document_of(workload_run))
    assert re.findall(r"^### (.*) ###$", text, re.MULTILINE) == HEADERS
    for line in (
        "  10 s: 20 users, saturation 0.50, 1.250 GB/s: more", "  24 users, say",
        "  Answer: 24 users, say",
        "  hit rate: here 0.6, trace 0.4, off by +50.0%",
        "  Counted over the same 1,200 requests, without a store and a limit: 41.23%, here 40.00%",
        "  FAIL: the hit rate is off by +50.0%, 5% are allowed",
    ):  # fmt: skip
        assert f"{line}\n" in text
    for words in (
        "Requests/s: ", "P99 ", "Ratio: ", "IOPS, blocks/s: read ", "Read from nvme: ",
        "nvme read: ", "NVMe Entries: ", "prefill_decode: ", "batch: ",
    ):  # fmt: skip
        assert words in text
    label, *lines = text.splitlines()
    assert label == "SCALED: blocks of 0.05 times their size"
    assert all(line.startswith(("###", "  ")) for line in lines if line)


def test_books_that_disagree_are_told_with_the_verdict(workload_run):
    found = document_of(workload_run)
    found["accounting"][0] |= {"counted": 1234, "arithmetic": 1230, "agrees": False}
    what = found["accounting"][0]["what"]
    assert f"  [FAIL] accounting of memory, {what}: 1,234 and 1,230\n" in report.render(found)
    assert "1,234 and 1,230</td>" in page(found, {})


@pytest.fixture(scope="module")
def plots(workload_run: WorkloadRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn from the JSON of the run, by the command for that."""
    folder = tmp_path_factory.mktemp("report") / "below" / "plots"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        words = ["report", str(workload_run.json), "--plots", str(folder)]
        assert storage_workload.main(words) == 0
    again = out.getvalue().split("\n\npython")[0]
    assert "\n\n### STORAGE" in again and again in workload_run.printed
    return folder


def test_a_page_loads_nothing_and_closes_what_it_opens(workload_run):
    text = workload_run.html.read_text()
    parsed = Parsed(text)
    assert parsed.loads == [] and parsed.unclosed == []
    assert not re.search(r"url\((?!#)|@import", text)
    for name in set(re.findall(r"https?://([\w.-]+)", text)):
        assert name.endswith(("w3.org", "purl.org", "creativecommons.org", "matplotlib.org"))


def test_a_page_has_the_verdict_the_command_every_chart_and_every_section(workload_run):
    found = document_of(workload_run)
    found["notes"] = ["<b>not bold</b>"]
    found["interrupted"] = True
    text = page(found, charts(found))
    assert '<h1>Storage workload: <span class="NOT_JUDGED">NOT JUDGED</span></h1>' in text
    assert [*re.findall(r"<h2>(.*?)</h2>", text)] == HEADERS
    assert text.count("<svg ") == 5 and "<b>not bold</b>" not in text
    first, *others = re.findall(r'<svg [^>]*?width="([0-9.]+)pt"', text)
    assert float(first) > 600 and {float(one) for one in others} == {5.4 * 72}, "two columns"
    assert "--rag-num-docs" in text and "interrupted: only the results until then" in text
    for criterion in found["verdict"]["criteria"]:
        assert criterion["name"].replace("<", "&lt;").replace(">", "&gt;") in text
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_charts_show_the_figures_of_the_timeline_and_of_the_samples(workload_run):
    found = json.loads(workload_run.json.read_text())
    samples = Samples.from_json(found["samples"])
    drawn: dict[str, dict[str, list[float]]] = {}
    for name, chart in charts(found).items():
        axes = Figure().add_subplot()
        chart.draw(axes)
        drawn[name] = {line.get_label(): [*line.get_ydata()] for line in axes.lines}
    timeline = found["throughput_timeline"]
    for name, key, title in (
        ("read", "read_gb_per_sec", "throughput"), ("written", "write_gb_per_sec", "throughput"),
        ("generated", "throughput_tokens_per_sec", "tokens"),
        ("active", "num_users", "users"), ("waiting", "in_flight", "users"),
    ):  # fmt: skip
        assert drawn[title][name] == [moment[key] for moment in timeline], name
    last = timeline[-1]["used_bytes"]
    assert {name: values[-1] for name, values in drawn["tiers"].items()} == {
        tier: used / 2**30 for tier, used in last.items()
    }
    latency = drawn["latency"]
    assert latency.keys() == {"queue", "storage", "end to end"}
    for place, worst in enumerate(latency["end to end"]):
        if not math.isnan(worst):  # a request was answered then
            assert latency["queue"][place] <= latency["storage"][place] <= worst
    slowest = max(request.total_s for request in samples.requests)
    assert 0 < max(filter(lambda each: each > 0, latency["end to end"])) <= 1000 * slowest + 1e-3


def shown_on(stream: io.StringIO, users: int, seconds: float) -> tuple[str, Driver]:
    """What a run of emulated users leaves there."""

    async def run() -> Driver:
        source = Workload(MODELS["tiny-1b"], 1)
        driver = Driver(source, EmulatedBackend(1e9), BlockShape(16, 100), Pace(0.002))
        async with Progress(driver, seconds, stream).shown():
            await driver.run_users(users, seconds)
        return driver

    driver = fake_time.run(run())
    return stream.getvalue(), driver


def test_a_log_gets_a_line_now_and_then_with_the_time_left_users_requests_and_hits():
    text, driver = shown_on(io.StringIO(), 5, 60.5)
    lines = text.splitlines()
    assert len(lines) == 60 // LOGGED_EVERY_S and "\r" not in text
    assert lines[0].startswith("10 of 60.5 s, 50 s left; 5 users, ")
    last = re.fullmatch(
        r"60 of 60\.5 s, 0 s left; 5 users, \d+ waiting for an answer; "
        r"([\d,]+) requests; ([\d.]+)% of the blocks found", lines[-1],
    )  # fmt: skip
    assert last is not None, lines[-1]
    done = [request for request in driver.samples.requests if request.ended_s <= 60]
    hits, asked = (sum(column) for column in zip(*((r.hit, r.asked) for r in done), strict=True))
    assert int(last[1].replace(",", "")) == len(done)
    assert float(last[2]) == pytest.approx(100 * hits / asked, abs=0.06)
