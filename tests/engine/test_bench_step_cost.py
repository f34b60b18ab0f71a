"""The benchmark of a step's cost runs on a real engine, and every phase of the way in is seen."""

from pathlib import Path

import pytest

from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache.baseline import step_cost_results as results
from benchmarks.remote_kv_cache.baseline import test_step_cost

LENGTH = 1024


@pytest.mark.whole
@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_no_step_walks_over_the_keys_while_no_answer_is_in(model: Path, tmp_path: Path, clock: str):
    file = tmp_path / "steps.json"
    argv = ["--lengths", str(LENGTH), "--waits", "3", "--trials", "2", "--warm-ups", "1",
            "--models", str(model.parent), "--clock", clock]  # fmt: skip
    assert test_step_cost.main([*argv, "--json", str(file)]) == 0
    rows = {row.operation: row for row in Record.read(file).rows}
    for phase in (results.ASKS, results.NO_ANSWER, results.ANSWERED, results.ADMITS):
        row = rows[results.operation(LENGTH, phase, results.OURS)]
        assert not row.reason and len(row.sample.values) == 2
