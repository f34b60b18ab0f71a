"""The device of a run, its state before the measurement, and whether a steady state was reached."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import origin
from benchmarks.storage_workload.figures import steady
from benchmarks.storage_workload.figures.samples import Samples, TransferSample
from benchmarks.storage_workload.pages import conditions, report
from benchmarks.storage_workload.plan import flags
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import run
from remote_server.errors import ConfigError

ROUND_S = 20.0


def written(gb_of_round: Callable[[int], float], tier: str = "disk") -> Samples:
    """A run of ten rounds with one write in each, from its beginning to its end."""
    moved = [
        TransferSample(
            (number + 1) * ROUND_S, 0, 0, "new", "write", tier, 1,
            round(1e9 * gb_of_round(number)), ROUND_S, 0.0, 0.0,
        )
        for number in range(steady.ROUNDS)
    ]  # fmt: skip
    return Samples([], moved, [], steady.ROUNDS * ROUND_S)


@pytest.mark.parametrize(
    ("gb_of_round", "state"),
    [
        (lambda number: 10.0 if number < 5 else 2.0, "reached"),  # only the last five count
        (lambda number: 2.0 + 0.19 * (number % 2), "reached"),
        (lambda number: 2.0 + 0.50 * (number == 7), "not reached"),  # a peak: its range is 24 %
        (lambda number: 2.0 + 0.08 * number, "not reached"),  # rises by 12.5 %, within the range
        (lambda number: 2.0 + 0.03 * number, "reached"),
    ],
)
def test_a_steady_state_has_neither_peaks_nor_a_slope_at_the_end(gb_of_round, state):
    assert steady.judge(written(gb_of_round))["state"] == state


def test_what_is_judged_is_the_slowest_tier_that_was_used():
    constant = written(lambda _: 2.0)
    memory = written(lambda number: 9.0 * number, "memory")
    both = Samples([], [*constant.transfers, *memory.transfers], [], constant.elapsed_s)
    found = steady.judge(both)
    assert [figure["name"] for figure in found["figures"]] == ["nvme write"]
    assert found["figures"][0]["average"] == pytest.approx(2.0 / ROUND_S)
    assert steady.judge(memory)["figures"][0]["name"] == "cpu write"


def test_a_short_run_and_one_with_other_users_at_its_end_are_not_judged():
    short = replace(written(lambda _: 2.0), elapsed_s=60.0)
    found = steady.judge(short)
    assert found["state"] == "not judged" and "6.0 s" in found["why_not_judged"]
    why = steady.why_not_judged({"enable_autoscaling": True}, interrupted=False, failed=False)
    assert steady.judge(written(lambda _: 2.0), why)["state"] == "not judged"
    still = written(lambda number: 1.0 if number < 5 else 0.0)
    assert steady.judge(still)["state"] == "not judged"
    for interrupted, failed in ((True, False), (False, True)):
        assert steady.why_not_judged(
            {"enable_autoscaling": False}, interrupted=interrupted, failed=failed
        )


def test_bytes_of_a_transfer_are_those_of_all_rounds_that_it_lasted():
    of_two = TransferSample(30.0, 0, 0, "new", "write", "disk", 1, 400, 20.0, 0.0, 0.0)
    at_once = of_two._replace(ended_s=45.0, total_s=0.0, num_bytes=7)
    assert steady.bytes_by_round([of_two, at_once], ROUND_S)[:4] == pytest.approx([200, 200, 7, 0])


SMALL = Options(
    model="tiny-1b", num_users=2, max_requests=2, think_scale=0, generation_mode="none",
    block_tokens=64, bytes_scale=1 / 16, gpu_mem_gb=0, cpu_mem_gb=1 / 64,
    storage_capacity_gb=1 / 16, seed=3, precondition=True,
)  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"cpu_mem_gb": 0}, {"cascade": True}], ids=str)
def test_the_whole_disk_is_written_once_before_the_run_and_none_of_it_is_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
):
    monkeypatch.setattr(run, "HEADROOM_S", 0.05)
    made = run.execute(replace(SMALL, cache_dir=tmp_path, **settings))
    found = made.document()
    done = found["preconditioning"]
    assert done["written_once"] and made.agrees
    # All but the headers of segments, the rest of each, and blocks that are cut to a page.
    assert done["written_bytes"] > 0.9 * done["disk_bytes"] == 0.9 * 2**26
    purposes = {transfer.purpose for transfer in made.samples.transfers}
    assert "precondition" in purposes
    of_run = [each for each in made.samples.transfers if each.purpose != "precondition"]
    assert found["summary"]["cache_stats"]["total_write_gb"] * 2**30 == pytest.approx(
        sum(each.num_bytes for each in of_run if each.direction == "write" and each.user >= 0)
    )
    assert found["device"]["tier_written_bytes"] < done["written_bytes"]
    figures = {figure["name"]: figure["values"] for figure in found["figures"]}
    assert figures["preconditioned"][""] == pytest.approx(done["written_bytes"] / 1e9, rel=1e-5)
    text = report.render(found)
    assert "Preconditioned: yes, every file written once: 0.0" in text
    assert "Steady state: not judged: a tenth of this run has " in text


def test_a_report_names_the_device_its_file_system_and_what_is_not_known():
    document: dict[str, Any] = {
        "tiers": ["memory", "disk"], "device": {"direct": True},
        "storage": {"cache_dir": {"type": "xfs", "options": "rw,noatime", "device": "solid",
                                  "model": "A Drive 990", "write_cache": "write back"}},
        "steady_state": steady.judge(written(lambda number: 2.0 + number)),
    }  # fmt: skip
    assert [*conditions.lines(document)] == [
        "Device: A Drive 990, solid, write cache write back",
        "File system: xfs, mounted rw,noatime, O_DIRECT",
        "Preconditioned: no, the files of the disk tier were new",
        f"Steady state: not reached, by {steady.RULE}",
        "Rounds of 20 s:",
        "  nvme write: 0.450 GB/s, range 44 %, fit 44 %: NOT steady",
    ]
    assert [*conditions.lines({"tiers": ["memory"]})] == []
    older = [*conditions.lines({"tiers": ["disk"], "device": {}})]
    assert older[0] == "Device: not shown by the kernel"


def test_facts_of_a_device_are_those_of_the_disk_that_a_partition_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk, partition = tmp_path / "disk", tmp_path / "disk" / "part"
    for folder in (disk / "queue", disk / "device", partition):
        folder.mkdir(parents=True)
    for name, text in (
        ("queue/rotational", "0\n"), ("queue/scheduler", "none [mq-deadline] kyber\n"),
        ("queue/write_cache", "write back\n"), ("device/model", "A Drive 990   \n"),
    ):  # fmt: skip
        (disk / name).write_text(text)
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / "8:1").symlink_to(partition)
    monkeypatch.setattr(origin, "_BLOCK_DEVICES", str(devices))
    assert origin._kind_of("8:1") == "solid"
    assert origin._about_device("8:1") == {
        "model": "A Drive 990", "scheduler": "mq-deadline", "write_cache": "write back",
    }  # fmt: skip
    assert (origin._kind_of("9:9"), origin._about_device("9:9")) == ("none", {})


@pytest.mark.parametrize("words", ["--no-disk", "--emulated-device 1", "--server tcp://a:1"])
def test_there_is_nothing_to_precondition_without_a_disk(words: str):
    with pytest.raises(ConfigError, match="precondition: True changes nothing without a disk"):
        flags.parse(["--precondition", *words.split()])
