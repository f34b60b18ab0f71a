"""The benchmark of a busy engine runs on real engines, and its steps are as long as asked."""

from pathlib import Path

import pytest

from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache import busy_results as results
from benchmarks.remote_kv_cache import test_busy
from benchmarks.remote_kv_cache.busy_results import NONE, OFF, Key

STEP_MS, ANSWER = 150, 3


@pytest.mark.whole  # three engines, and steps of 150 ms: minutes
@pytest.mark.timeout(900)
def test_a_queue_is_counted_on_each_engine_and_steps_are_stretched(model: Path, tmp_path: Path):
    file = tmp_path / "busy.json"
    argv = ["--depths", "6", "--step-ms", f"0,{STEP_MS}", "--break-even", "off",
            "--output-len", str(ANSWER), "--cpu-pool", "48MiB", "--kv-cache", "16MiB",
            "--new-between", "1", "--models", str(model.parent)]  # fmt: skip
    assert test_busy.main([*argv, "--json", str(file)]) == 0
    record = Record.read(file)
    cells = results.cells(record)
    assert set(cells) == {Key(ms, 6, engine) for ms in (0.0, STEP_MS) for engine in (NONE, OFF)}
    for key, values in cells.items():
        assert values["answers equal"] + values["answers tied"] == 6
        has_reason = any(": " in name for name in values)
        if key.engine == NONE:
            assert values["from the server"] == 0 and not has_reason
        else:
            assert values["from the server"] == 100 or has_reason, "what did not come has a reason"
    for row in record.rows:
        if f"of {STEP_MS} ms" in row.operation:
            # Twelve prompts, four at a time: three turns, and in each a step for every token.
            assert row.sample.values[0] >= 3 * ANSWER * STEP_MS / 1000
