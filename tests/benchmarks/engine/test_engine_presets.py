"""The presets of the engine benchmarks: what is taken from the source, and what is refused."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.engine import presets
from benchmarks.engine.presets import LAPTOP, PAPER
from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache import (
    test_busy,
    test_long_prefill,
    test_miss_cost,
    test_prefetch,
    test_swap,
    test_transfer_in,
)
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from benchmarks.remote_kv_cache.baseline import (
    test_engine_cost,
    test_memory_io,
    test_server,
    test_step_cost,
    test_zmq_transfer,
)
from remote_server.errors import ConfigError

BENCHMARKS = (transfer_out, test_transfer_in, test_long_prefill, test_swap, test_prefetch)


def parsed(module, *argv: str):
    arguments = presets.parser(module.MODULE, "q", module.PRESETS).parse_args(argv)
    return arguments, presets.chosen(arguments, module.PRESETS)


@pytest.mark.parametrize("module", BENCHMARKS)
def test_the_default_is_the_laptop_and_every_number_is_a_flag(module):
    arguments, numbers = parsed(module)
    assert arguments.preset == LAPTOP
    assert numbers == module.PRESETS[LAPTOP]
    for field in dataclasses.fields(numbers):
        old = getattr(numbers, field.name)
        new = {int: 7, str: "wide", tuple: old[:1] if isinstance(old, tuple) else ()}[type(old)]
        if field.name in ("cpu_pool", "memory_space", "kv_cache"):
            new = 3 << 20
        shown = ",".join(map(str, new)) if isinstance(new, tuple) else str(new)
        _, given = parsed(module, f"--{field.name.replace('_', '-')}", shown)
        assert given == dataclasses.replace(numbers, **{field.name: new}), field.name


@pytest.mark.parametrize("module", BENCHMARKS)
def test_a_run_without_a_gpu_or_without_weights_is_refused_and_says_what_would_run(
    module, tmp_path: Path
):
    arguments, numbers = parsed(module, "--preset", "paper")
    with pytest.raises(ConfigError, match=r"--preset paper.*no NVIDIA GPU here.*laptop runs"):
        presets.refuse(arguments, numbers, has_gpu=lambda: False)
    absent = dataclasses.replace(numbers, model=str(tmp_path / "Qwen2.5-3B-Instruct"))
    with pytest.raises(ConfigError, match="no weights of it here"):
        presets.refuse(arguments, absent, has_gpu=lambda: True)
    (tmp_path / "Qwen2.5-3B-Instruct").mkdir()
    (tmp_path / "Qwen2.5-3B-Instruct" / "model.safetensors").touch()
    presets.refuse(arguments, absent, has_gpu=lambda: True)
    assert absent.shape.name == "Qwen2.5-3B-Instruct", "a directory named like the model"
    presets.refuse(*parsed(module), has_gpu=lambda: False)


def test_a_refusal_is_the_exit_status_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(presets, "gpu_is_here", lambda: False)
    for module in BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            module.main(["--preset", PAPER])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "no NVIDIA GPU here" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "module",
    [*BENCHMARKS, test_busy, test_miss_cost, test_engine_cost, test_step_cost, test_memory_io,
     test_zmq_transfer, test_server],
    ids=lambda module: module.MODULE.rpartition(".")[2],
)  # fmt: skip
def test_without_memory_the_row_is_skipped_with_the_reason(module, tmp_path: Path, capsys):
    file = tmp_path / "a.json"
    only = ["--only", "models", "--models", "tiny"] if module is test_server else []
    assert module.main(["--memory", "1MiB", *only, "--json", str(file)]) == 0
    rows = Record.read(file).rows
    assert rows and all(row.reason.startswith("SKIPPED: needs ") for row in rows)
    assert "SKIPPED: needs" in capsys.readouterr().out
