"""Many workloads: which ones run here, with what, and how they are compared."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workload_files import WorkloadRun

from benchmarks.harness.record import Record
from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.pages import comparison
from benchmarks.storage_workload.pages.comparison import Outcome
from benchmarks.storage_workload.pages.document import Run
from benchmarks.storage_workload.plan import hardware
from benchmarks.storage_workload.plan.hardware import Hardware
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.plan.scenarios import SCENARIOS
from benchmarks.storage_workload.runs import run, suite
from remote_server.errors import ConfigError


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    return suite.parser().parse_args(["--folder", str(folder), *words])


def planned(folder: Path, *words: str, gpu_gb: int = 0) -> dict[str, suite.Planned]:
    machine = Hardware(gpu_gb, 24, folder, 100)
    return {one.name: one for one in suite.plan(arguments(folder, *words), machine)}


def test_parameters_follow_from_the_machine_as_the_source_s_wrapper_has_it(tmp_path):
    runs = planned(tmp_path, gpu_gb=80)
    found = {
        name: (o.num_users, o.duration, o.gpu_mem_gb, o.cpu_mem_gb, o.no_disk)
        for name, (_, o, _) in runs.items()
    }
    assert found == {
        "gpu-only": (50, 120, 80, 0, True),
        "cpu-only": (50, 120, 0, 12, True),
        "storage-only": (50, 120, 0, 0, False),
        "gpu-cpu": (50, 120, 80, 12, True),
        "cpu-storage": (240, 120, 0, 3, False),
        "gpu-cpu-storage": (240, 120, 80, 3, False),
        "storage-saturation": (240, 180, 0, 0, False),
        "production": (50, 180, 80, 12, False),
        "autoscale": (20, 300, 80, 3, False),
        "capacity-autoscale": (10, 300, 0, 0, False),
        "mlperf_submission llama3.1-8b": (150, 600, 0, 4, False),
        "mlperf_submission llama3.1-70b-instruct": (40, 600, 0, 4, False),
    }
    assert all(options.seed == 42 for _, options, _ in runs.values())
    for size, name in (("8b", "llama3.1-8b"), ("70b", "llama3.1-70b-instruct")):
        options = runs[f"mlperf_submission {name}"].options
        for setting, value in SCENARIOS[f"submission-{size}"].items():
            assert getattr(options, setting) == value, setting


def test_every_letter_of_the_wrapper_changes_what_it_says(tmp_path):
    words = "-m tiny-1b -t 1 -s 2 -r 3 -a 4 -u 5 -U 6 -R -D 7"
    runs = planned(tmp_path, *words.split())
    of: dict[Any, Any] = {
        name: options for name, options, _ in (tuple(one) for one in runs.values())
    }
    assert {of[name].model for name in ("cpu-only", "autoscale", "production")} == {"tiny-1b"}
    assert [of[name].duration for name in ("cpu-only", "storage-saturation", "production")] == [
        1, 2, 3,
    ]  # fmt: skip
    assert of["autoscale"].duration == of["capacity-autoscale"].duration == 4
    assert (of["cpu-only"].num_users, of["cpu-storage"].num_users) == (5, 6)
    assert of["cpu-only"].enable_rag and of["cpu-only"].rag_num_docs == 7
    assert not of["storage-saturation"].enable_rag
    full = planned(tmp_path, "--precondition")
    assert full["storage-only"].options.precondition and not full["cpu-only"].options.precondition
    assert list(planned(tmp_path, "-w", "storage-only, cpu-only")) == ["cpu-only", "storage-only"]


@pytest.mark.parametrize("words", ["-t 0", "-u 0", "-U -1", "-R -D 0", "--bytes-scale 0"])
def test_what_no_workload_could_do_ends_the_suite_before_it_begins(tmp_path, words):
    with pytest.raises(ConfigError):
        planned(tmp_path, *words.split())


def fake_run(options: Options, **more: Any) -> Run:
    return Run(options, Record("benchmarks.storage_workload", "…"), "digest", **more)


def test_ctrl_c_in_one_workload_keeps_it_and_skips_the_rest(tmp_path):
    runs = planned(tmp_path, "-w", "cpu-only,storage-only,cpu-storage")
    outcomes = suite.run_all(
        list(runs.values()),
        lambda options: fake_run(options, interrupted=options.num_users == 50 and options.no_disk),
    )
    assert [(o.name, o.document is not None, o.reason) for o in outcomes] == [
        ("cpu-only", True, ""), ("storage-only", False, "interrupted"),
        ("cpu-storage", False, "interrupted"),
    ]  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["cpu-only.json"]
    assert json.loads((tmp_path / "cpu-only.json").read_text())["interrupted"] is True
    assert "SKIPPED (interrupted)" in comparison.render(outcomes)


def test_a_workload_that_cannot_run_is_skipped_with_its_reason_and_the_others_run(tmp_path):
    def run_one(options: Options) -> Run:
        if not options.cpu_mem_gb:
            raise ConfigError("storage_capacity_gb: no room")
        return fake_run(options)

    runs = planned(tmp_path, "-w", "gpu-only,storage-only,cpu-only")
    outcomes = suite.run_all(list(runs.values()), run_one)
    assert [(o.name, o.document is not None, o.reason) for o in outcomes] == [
        ("gpu-only", False, "no GPU"), ("cpu-only", True, ""),
        ("storage-only", False, "storage_capacity_gb: no room"),
    ]  # fmt: skip


def test_a_comparison_says_where_blocks_are_what_is_waited_for_and_what_is_wrong(
    workload_run: WorkloadRun,
):
    found = json.loads(workload_run.json.read_text())
    stats = found["summary"]["cache_stats"]
    text = comparison.render([Outcome("gpu-only", None, "no GPU"), Outcome("mine", found)])
    (row,) = (line.split() for line in text.splitlines() if re.match("mine +(- +){3}", line))
    shares = [float(row[place]) / 100 for place in (5, 8)]
    held = [stats["cpu_used_gb"], stats["nvme_used_gb"]]
    assert shares == pytest.approx([each / sum(held) for each in held], rel=0.01)
    assert f"  mine: {found['summary']['dominates']['component']} is " in text
    assert "the books agree" in text
    broken = json.loads(workload_run.json.read_text())
    broken["accounting"][0]["agrees"] = False
    broken["verdict"]["criteria"][0]["passed"] = False
    broken["driver_alone_requests_per_second"] = 3 * broken["summary"]["requests_per_second"]
    text = comparison.render([Outcome("mine", broken)])
    for said in (
        f"the books disagree: {broken['accounting'][0]['what']}", "not met: NVMe Write P95 < 500ms",
        "the driver alone is only 3.0 times as fast",
    ):  # fmt: skip
        assert said in text


def test_a_suite_of_two_tiers_runs_and_one_without_a_gpu_is_skipped(tmp_path, capsys, monkeypatch):
    def execute(options: Options) -> Run:
        """Ends after so many requests, on a host of any speed, and generates nothing."""
        few = replace(options, max_requests=2, duration=60.0)
        return run.execute(replace(few, think_scale=0.0, generation_mode="none"))

    monkeypatch.setattr(suite, "execute", execute)
    monkeypatch.setattr(run, "HEADROOM_S", 0.05)
    monkeypatch.setattr(hardware, "_gpu_gb", lambda: 0)
    status = storage_workload.main(
        f"suite -w gpu-only,cpu-only,storage-only -t 1 -u 4 -m tiny-1b --bytes-scale 0.01 "
        f"--storage-capacity-gb 0.2 --cache-dir {tmp_path} --folder {tmp_path}".split()
    )
    printed = capsys.readouterr().out
    text = (tmp_path / "comparison.txt").read_text()
    assert text in printed
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()[3:6]}
    assert rows.keys() == {"gpu-only", "cpu-only", "storage-only"}
    assert "SKIPPED (no GPU)" in text.splitlines()[3]
    documents = {
        name: json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("cpu-only", "storage-only")
    }
    for name, document in documents.items():
        assert document["verdict"]["passed"] is not True, "its blocks are scaled"
        assert rows[name] == ("FAIL" if document["verdict"]["passed"] is False else "NOT")
        assert all(line["agrees"] for line in document["accounting"]), name
    assert status == (0 if rows["cpu-only"] == rows["storage-only"] == "NOT" else 1)
    shares = [documents[name]["summary"]["cache_stats"]["read_share_by_tier"] for name in documents]
    assert shares == [{"cpu": 1.0}, {"nvme": 1.0}]
    assert {path.name for path in tmp_path.iterdir()} == {
        "comparison.txt", "hardware.json", "cpu-only.json", "storage-only.json",
    }  # fmt: skip
