"""The presets of the engine benchmarks: what is taken from the source, and what is refused."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.engine import presets
from benchmarks.engine.kinds import label
from benchmarks.engine.presets import LAPTOP, PAPER
from benchmarks.remote_kv_cache import (
    test_long_prefill,
    test_prefetch,
    test_swap,
    test_transfer_in,
)
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from remote_server.errors import ConfigError

BENCHMARKS = (transfer_out, test_transfer_in, test_long_prefill, test_swap, test_prefetch)


def parsed(module, *argv: str):
    arguments = presets.parser(module.MODULE, "q", module.PRESETS).parse_args(argv)
    return arguments, presets.chosen(arguments, module.PRESETS)


def test_the_papers_numbers_are_the_sources_with_one_token_more_a_prompt():
    _, out = parsed(transfer_out, "--preset", "paper")
    assert (out.input_len, out.output_len, out.num_prompts, out.max_num_requests) == (8193, 1, 4, 1)
    assert out.max_num_batched_tokens == (1024, 768, 512, 384, 256, 128, 64, 32)
    assert (out.shape.name, out.max_model_len) == ("Qwen2.5-3B-Instruct", 10_000)
    _, into = parsed(test_transfer_in, "--preset", "paper")
    assert (into.num_prompts, into.output_len, into.max_num_requests) == (1000, 24, 32)
    assert into.hit_rate == tuple(tenth / 10 for tenth in range(11))
    _, long = parsed(test_long_prefill, "--preset", "paper")
    assert (long.shape.name, long.input_len) == ("Qwen2.5-7B-Instruct", 10 * 1024 + 1)
    assert (long.num_prompts, long.max_num_requests) == (10, 2)
    assert long.output_len == (2, 4, 8, 16, 32, 64, 128)


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


def test_a_model_of_unknown_shape_is_refused_with_those_that_are_known():
    _, numbers = parsed(transfer_out, "--model", "somebody/something")
    with pytest.raises(ConfigError, match="its shape is not known; known: small, wide, Qwen"):
        _ = numbers.shape


@pytest.mark.parametrize("module", BENCHMARKS)
def test_without_memory_the_row_is_skipped_with_the_reason(
    module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert module.main(["--memory", "1MiB", "--json", str(tmp_path / "a.json")]) == 0
    assert "SKIPPED: needs " in capsys.readouterr().out


def test_what_was_not_measured_on_vllm_is_named_so():
    assert label("vllm") == ""
    assert label("simulated") == "simulated: "
