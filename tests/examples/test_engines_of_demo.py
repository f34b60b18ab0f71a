"""The command lines of engines: workers of the demo's, and their part of a GPU."""

from pathlib import Path
from typing import Any

import pytest

from examples import demo
from examples import engine as engine_module
from examples.engine import VllmServer


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demo_s_engines_have_as_many_workers_as_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
):
    engines: list[VllmServer] = []

    def ends(self: demo.Demo) -> list[Any]:
        engines.append(VllmServer("m", args=self._engine_args))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Demo, "run", ends)
    monkeypatch.setattr("examples.tiny_model.build", lambda *_: tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo", "--tensor-parallel", str(ranks)])
    assert demo.main() == 130
    words = engines[0].command
    assert ("--tensor-parallel-size" in words) is (ranks > 1)
    assert ranks == 1 or words[words.index("--tensor-parallel-size") + 1] == "2"


@pytest.mark.parametrize("gpus", [0, 1])
def test_an_engine_wants_a_part_of_a_gpu_only_where_one_is(
    monkeypatch: pytest.MonkeyPatch, gpus: int
):
    monkeypatch.setattr(engine_module, "num_gpus", lambda: gpus)
    engine = VllmServer("m", args=["--gpu-memory-utilization", "0.5"])
    words = engine.command
    assert words.count("--gpu-memory-utilization") == 1 + gpus
    assert words[-1] == "0.5", "the caller's own comes last"
