"""Waiting for the cache against an oracle, in virtual time."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache import test_patience as module
from benchmarks.remote_kv_cache.test_patience import (
    ALWAYS,
    FORMER,
    NEVER,
    OURS,
    OUTAGES,
    Cell,
    outcome_of,
)


def p99(policy: str, scene: str, compute_s: float, link_mb_s: float, answers_ms: float) -> float:
    cell = Cell(policy, scene, compute_s, link_mb_s, answers_ms)
    return percentile(outcome_of(cell, 30).regrets[3:], 99)


@pytest.mark.parametrize("answers_ms", [0, 50])
@pytest.mark.parametrize(
    ("scene", "compute_s", "link_mb_s"),
    [
        ("quick", 0.05, 3000),
        ("late by 1 s", 30.0, 100),
        ("late by 1 s", 1.0, 1000),
        ("stops for 2 s in 60", 30.0, 100),
        ("late by 0.05 to 0.2 s", 5.0, 1000),
        ("quick", 5.0, 100),
    ],
)
def test_once_an_engine_knows_its_server_no_prompt_is_a_fifth_slower_than_it_can_be(
    scene: str, compute_s: float, link_mb_s: float, answers_ms: float
):
    assert p99(OURS, scene, compute_s, link_mb_s, answers_ms) <= 1.2


@pytest.mark.parametrize(
    ("policy", "scene", "compute_s", "link_mb_s"),
    [(FORMER, "late by 1 s", 30.0, 100), (ALWAYS, "quick", 1.0, 10), (NEVER, "quick", 5.0, 1000)],
)
def test_the_others_are_slower_somewhere(
    policy: str, scene: str, compute_s: float, link_mb_s: float
):
    assert p99(policy, scene, compute_s, link_mb_s, 0) > 2.0


@pytest.mark.parametrize("scene", OUTAGES)
@pytest.mark.parametrize("compute_s", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("step_ms", [0, 50])
def test_an_outage_costs_a_tenth_of_a_prompt_or_of_a_second_and_the_step_of_a_lookup(
    scene: str, compute_s: float, step_ms: float
):
    lost_s = outcome_of(Cell(OURS, scene, compute_s, 1000, step_ms), 30).outage_s
    assert lost_s <= 0.103 * max(1.0, compute_s) + step_ms / 1000


def test_the_figures_are_those_of_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, drawing = tmp_path / "record.json", tmp_path / "chart.svg"
    few = ["--compute-s", "1", "--link-mb-s", "1000", "--answers-ms", "0", "--prompts", "6"]
    few += ["--scenes", "quick,frozen in a load", "--policies", "patience,never wait"]
    assert module.main([*few, "--json", str(file), "--plot", str(drawing)]) == 0
    figures: dict[str, Any] = {
        one["name"]: one["values"] for one in json.loads(file.read_text())["figures"]
    }
    assert figures["patience: quick"]["median"] == pytest.approx(1.0, abs=0.05)
    assert figures["never wait: quick"]["computed in vain, %"] == 100
    assert figures["patience: all"].keys() == {"median", "p99", "worst"}
    assert 0 < figures["patience: frozen in a load"]["share of a prompt, %"] < 20
    assert drawing.stat().st_size > 1000
    assert "never wait: quick" in capsys.readouterr().out
