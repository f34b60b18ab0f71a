"""The replays of one level as a benchmark: every policy, a real server beside the model, and the
names that it knows."""

import json

import pytest

from benchmarks.remote_kv_cache import test_trace as trace_benchmark
from benchmarks.remote_kv_cache.replay.eviction import (
    one_level_report,
    one_level_wire,
    workload_study,
)
from benchmarks.remote_kv_cache.replay.eviction.one_level_report import LevelPoint, LevelStudy, Room
from benchmarks.remote_kv_cache.replay.eviction.workload_study import BELOW, Cell, WorkloadStudy
from benchmarks.remote_kv_cache.replay.levels.flags import EVICTIONS
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE
from benchmarks.remote_kv_cache.replay.requests.workloads import scan
from remote_server.traces import model_cache

SMALL = ["--workload", "chat", "--requests", "250", "--capacity", "2GiB,8GiB"]

IN_PIECES = {"transport": "tcp", "batch_bytes": 16 * one_level_wire.PAYLOAD,
             "lane_window_bytes": 64 * one_level_wire.PAYLOAD}  # fmt: skip
"""Every put and every get is cut into messages of 16 blocks."""


def test_every_policy_is_recorded_and_drawn_and_none_finds_more_than_the_optimum(tmp_path, capsys):
    record, drawing = tmp_path / "made.json", tmp_path / "made.svg"
    flags = ["--eviction", ",".join(EVICTIONS), "--json", f"{record}", "--plot", f"{drawing}"]
    assert trace_benchmark.main([*SMALL, "--replay", "store", *flags]) == 0
    figures = {each["name"]: each["values"] for each in json.loads(record.read_text())["figures"]}
    rooms = ("2.0 GiB", "8.0 GiB")
    assert [*figures] == [f"store: {name}, {room}" for room in rooms for name in EVICTIONS]
    for name, values in figures.items():
        best = figures[f"store: optimum, {name.rpartition(', ')[2]}"]
        assert 0 < values["found"] <= best["found"]
        if "optimum" not in name:
            assert values["blocks found"] + values["blocks written"] <= values["blocks requested"]
            assert values["us a block"] > 0
    for name in ("lru", "optimum"):
        less, more = (figures[f"store: {name}, {room}"]["found"] for room in rooms)
        assert less < more
    printed = capsys.readouterr().out
    assert all(name in printed for name in EVICTIONS)
    assert drawing.read_text().startswith("<?xml")
    assert drawing.with_suffix(".png").exists()


def test_all_workloads_have_a_figure_at_each_capacity_with_means_over_the_seeds(
    tmp_path, capsys, monkeypatch
):
    few = {name: MADE[name] for name in ("zipf", "loop", "agents")}
    monkeypatch.setattr(workload_study, "MADE", few)
    record = tmp_path / "all.json"
    flags = ["--workload", "all", "--requests", "40", "--capacity", "1GiB,2GiB", "--seeds", "2"]
    policies = ["--eviction", "lru,learned,optimum", "--replay", "store", "--json", f"{record}"]
    assert trace_benchmark.main([*flags, *policies]) == 0
    figures = {each["name"]: each["values"] for each in json.loads(record.read_text())["figures"]}
    assert [*figures] == [f"{name}, {room}" for name in few for room in ("1.0 GiB", "2.0 GiB")]
    requests = [MADE["zipf"](36, seed)[:40] for seed in (1, 2)]
    found = [model_cache.replay(each, 36, "lru").found_percent for each in requests]
    assert figures["zipf, 1.0 GiB"]["lru"] == pytest.approx(sum(found) / 2, rel=1e-4)
    printed = capsys.readouterr().out
    assert all(name in printed for name in few)


def test_the_most_that_a_workload_lost_to_lru_is_that_of_the_worst_seed():
    cell = Cell("made up", Room(1 << 30, 36), {"lru": [50.0, 60.0], "learned": [50.5, 59.2]})
    assert cell.values["learned"] == pytest.approx(54.85)
    assert cell.values[BELOW] == pytest.approx(0.8)
    study = WorkloadStudy([cell], ["FAILED: it found more"])
    assert "0.80" in workload_study.describe(study)
    assert workload_study.describe(study).endswith("FAILED: it found more")


def test_a_real_server_beside_the_model_is_equal_to_the_block(capsys):
    flags = ["--workload", "chat", "--requests", "150", "--model", "tiny",
             "--capacity", "512MiB"]  # fmt: skip
    wire = ["--replay", "wire", "--eviction", "lru,hinted"]
    assert trace_benchmark.main([*flags, *wire]) == 0
    printed = capsys.readouterr().out
    assert "wire: lru, 512.0 MiB: equal to the block" in printed
    assert "store: hinted" not in printed


@pytest.mark.real_time
def test_a_server_finds_and_writes_what_the_policy_alone_does_to_the_block():
    places = one_level_wire.places_for(1)
    requests = scan(places)[:560]
    alone = model_cache.replay(requests, places, "learned")
    served = one_level_wire.replay(requests, places, "learned", IN_PIECES)
    assert (served.found, served.written) == (alone.found, alone.written)
    assert served.requested > 5 * places
    assert alone.reigned["learned"] > 100


def test_a_server_that_differs_by_a_block_and_a_policy_above_the_optimum_are_failures():
    room = Room(1 << 30, 36)
    study = LevelStudy("made up")
    study.points += [
        LevelPoint("store", "lru", room, 100, 50, 40),
        LevelPoint("store", "optimum", room, 100, 49),
        LevelPoint("wire", "lru", room, 100, 49, 41),
    ]
    differs, above = study.failures()
    assert "found -1 blocks and written +1 to the model's" in differs
    assert "more than the optimum" in above
    assert "equal" not in one_level_report.describe(study)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--workload", "zipf"], "--workload: only with --eviction"),
        (["--workload", "zipf", "--eviction", "lru", "--servers", "2"], "no --servers"),
        (["--workload", "zipf", "--eviction", "hinted", "--replay", "wire"], "over the wire lru"),
        (["--eviction", "lru"], "--trace --workload"),
        (["--workload", "zipf", "--eviction", "lru,fifo"],
         f"'fifo' is none of {', '.join(EVICTIONS)}"),
        (["--workload", "zapf", "--eviction", "lru"],
         f"'zapf' is none of {', '.join(MADE)}, all"),
        (["--workload", "all", "--eviction", "lru"], "--workload all: with --replay store"),
        (["--workload", "all", "--eviction", "lru", "--replay", "store", "--plot", "a.svg"],
         "--workload all: with --replay store, and without --plot"),
        (["--workload", "zipf", "--eviction", "lru", "--seeds", "2"],
         "--seeds: only with --workload all"),
    ],
)  # fmt: skip
def test_flags_that_exclude_each_other_and_wrong_names_are_refused_with_the_reason(
    flags, why, capsys
):
    with pytest.raises(SystemExit) as left:
        trace_benchmark.main(flags)
    assert left.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]
