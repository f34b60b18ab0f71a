"""The live curve judged by full replays, and its cost: what is compared, counted and recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_trace import write

from benchmarks.harness.pages.goals import Goal, results
from benchmarks.harness.pages.readmes import goals_of
from benchmarks.harness.record import Figure, Record
from benchmarks.remote_kv_cache import test_curve as curve_benchmark
from benchmarks.remote_kv_cache.replay.curve import cost as curve_cost
from benchmarks.remote_kv_cache.replay.curve import study as curve_study
from benchmarks.remote_kv_cache.replay.curve.study import Cell, Replays, Size
from benchmarks.remote_kv_cache.replay.eviction.one_level_report import Room
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE
from remote_server.traces import Request, model_cache

MiB = 1 << 20
BLOCK_BYTES = 28 * MiB


def figures_in(record: Path) -> dict[str, dict[str, float]]:
    return {each["name"]: each["values"] for each in json.loads(record.read_text())["figures"]}


def test_each_source_has_its_errors_at_each_capacity_and_small_sizes_are_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, drawing = tmp_path / "made.json", tmp_path / "made.svg"
    trace = write(tmp_path / "trace.jsonl", requests=400)
    flags = ["--trace", f"{trace}", "--workload", "zipf", "--requests", "300", "--parts",
             "accuracy", "--capacity", "8GiB,16GiB"]  # fmt: skip
    files = ["--json", f"{record}", "--plot", f"{drawing}"]
    assert curve_benchmark.main([*flags, *files]) == 0
    found = figures_in(record)
    assert [*found] == [f"{name}, {room}" for name in ("trace", "zipf")
                        for room in ("8.0 GiB", "16.0 GiB")]  # fmt: skip
    for values in found.values():
        assert values["largest"] == max(values["learned, largest"], values["lru, largest"])
        assert 0 <= values["mean"] <= values["largest"]
    printed = capsys.readouterr().out
    left_out = "8.0 GiB: left out, because a prompt or two fill them: 1.0 GiB (36 blocks), 2.0 GiB"
    assert f"trace, {left_out}" in printed and f"zipf, {left_out}" in printed
    assert drawing.read_text().startswith("<?xml")
    assert drawing.with_stem("made_zipf").exists()


def test_at_its_own_size_the_estimate_of_the_rule_is_what_the_cache_found() -> None:
    room = Room(600 * BLOCK_BYTES, 600)
    requests = MADE["zipf"](room.places, 1)[:1500]
    cell = curve_study.compared("zipf", room, BLOCK_BYTES, Replays(requests))
    in_full = model_cache.replay(requests, room.places, "learned")
    (own,) = (size for size in cell.sizes if size.times == 1)
    assert own.in_full["learned"] == pytest.approx(in_full.found_percent)
    assert own.errors["learned"] < 0.5


def test_a_full_replay_counts_only_requests_that_the_curve_still_counts() -> None:
    """A curve forgets after half a day to a day, so older requests may only fill the cache."""
    blocks = (0, 0, 1, 1, 0, 0)
    requests = [Request(100.0 * number, 512, 1, (block,)) for number, block in enumerate(blocks)]
    replays = Replays(requests)
    assert replays.found_percent(600, "lru", 0.0) == pytest.approx(100 * 4 / 6)
    assert replays.found_percent(600, "lru", 400.0) == 100
    assert replays.found_percent(600, "lru", 100.0) == pytest.approx(100 * 4 / 5)


def test_a_replay_of_one_size_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(places: int, rule: str) -> model_cache.OneLevel:
        made.append(places)
        return model_cache.OneLevel(places, rule)

    monkeypatch.setattr(curve_study, "OneLevel", counted)
    replays = Replays(MADE["zipf"](600, 1)[:20])
    for _ in range(2):
        for places in (300, 600):
            replays.found_percent(places, "lru", 0.0)
    assert made == [300, 600]


def test_the_largest_error_is_that_of_either_rule_at_any_size() -> None:
    sizes = [
        Size(0.5, 1 << 30, {"learned": 10.0, "lru": 8.0}, {"learned": 10.5, "lru": 9.8}),
        Size(1.0, 2 << 30, {"learned": 20.0, "lru": 12.0}, {"learned": 19.0, "lru": 12.0}),
    ]
    values = Cell("zipf", Room(2 << 30, 73), sizes).values
    assert values["largest"] == pytest.approx(1.8)
    assert values["learned, largest"] == pytest.approx(1.0)
    assert values["mean"] == pytest.approx((0.5 + 1.8 + 1.0) / 4)


def judged(goal: Goal, *figures: Figure) -> list[str]:
    record = Record("b", "python -m b", figures=[*figures])
    return [one.verdict for one in results(goal, record)]


def test_the_trace_has_a_goal_of_its_own_and_every_other_workload_that_of_the_generated() -> None:
    trace, generated, cpu, memory = goals_of()["test_curve"]
    figures = [
        Figure("trace, 24.0 GiB", "points", {"largest": 1.7}),
        Figure("zipf, 24.0 GiB", "points", {"largest": 1.8}),
        Figure("chat, 24.0 GiB", "points", {"largest": 2.1}),
        Figure("a key looked up, 4,000 blocks", "us", {"curve": 2.0}),
        Figure(
            "a key looked up, 1,000,000 blocks",
            "us",
            {"curve": 0.4, "low": 0.1, "high": 0.45, "rounds": 7},
        ),
        Figure(
            "memory of the models, 1,000,000 blocks", "MiB", {"measured": 17.0, "own account": 15.0}
        ),
    ]
    assert judged(trace, *figures) == ["missed"]
    assert judged(generated, *figures) == ["met", "missed"]
    assert judged(cpu, *figures) == ["met"]
    assert judged(memory, *figures) == ["missed"]


def test_the_cost_is_measured_once_the_largest_size_is_full(tmp_path: Path) -> None:
    record = tmp_path / "cost.json"
    flags = ["--parts", "cost", "--blocks", "500,600", "--prompt-keys", "32", "--prompts", "20",
             "--trials", "6"]  # fmt: skip
    assert curve_benchmark.main([*flags, "--json", f"{record}"]) == 0
    figures = figures_in(record)
    named = curve_cost.LOOKUP, curve_cost.PUT, curve_cost.MEMORY
    assert [*figures] == [f"{name}, {blocks} blocks" for blocks in (500, 600) for name in named]
    for values in (figures[f"{name}, 600 blocks"] for name in named[:2]):
        assert values["rounds"] == 6
        assert 0 < values["curve, low"] <= values["curve"] <= values["curve, high"]
    assert 0 < figures[f"{named[2]}, 600 blocks"]["measured"] < 16


def test_a_load_fills_the_models_and_half_of_its_prompts_return() -> None:
    load = curve_cost.Load(500, 32)
    while load.num_new < 4000:
        load.run(10)
    report = load.curve.report()
    assert report.seen_bytes > 0.9 * 8 * 500 * curve_cost.BLOCK_BYTES
    assert 0.3 < report.total.found["memory"] / report.total.asked < 0.7


def test_memory_is_that_of_all_objects_once_and_of_arrays_behind_their_views() -> None:
    array = np.zeros(1 << 16)
    shared = [bytes(1000)]
    held = {"views": [array[:4], array[4:8]], "same": [shared, shared], "code": print}
    own = curve_cost.bytes_of(held)
    assert array.nbytes + 1000 < own < array.nbytes + 3000
    assert curve_cost.bytes_of(held, without=[array]) < 3000
