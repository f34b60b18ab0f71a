"""More lanes on a machine of many cores: measured there, skipped with the reason elsewhere."""

import pytest

from benchmarks.harness.record import Row
from benchmarks.harness.runner import Runner, Sample
from benchmarks.remote_kv_cache.baseline.links import lane_scaling
from benchmarks.remote_kv_cache.baseline.links.lane_scaling import SCALING, measure, verdicts
from remote_server.values import MiB


def test_on_few_cores_it_is_skipped_with_the_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane_scaling, "CORES", 100_000)
    (row,) = measure(Runner(1, 0), None, 64 * MiB)
    assert row.reason.startswith("SKIPPED: needs 100000 cores, this machine has ")


def test_each_number_of_lanes_moves_all_blocks_both_ways(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane_scaling, "CORES", 1)
    rows = measure(Runner(1, 0), None, 4 * MiB)
    measured = {row.operation for row in rows if row.seconds}
    assert measured > {f"{name}: {way}" for name in ("1 lane", "2 lanes", "4 lanes")
                       for way in ("put", "get")}  # fmt: skip
    assert [line.split(":")[0] for line in verdicts(rows)] == ["put", "get"]


def test_a_verdict_compares_four_lanes_with_one():
    def row(operation: str, gb_per_s: float) -> Row:
        return Row(SCALING.name, operation, 10**9, Sample([1 / gb_per_s]))

    rows = [row("1 lane: put", 2.0), row("4 lanes: put", 6.5)]
    assert verdicts(rows) == ["put: 6.50 GB/s over 4 lanes, 3.25 times one lane's"]
