"""The arithmetic of model-shaped transfers, against numbers computed by others and by hand."""

import csv
import io
import json
from pathlib import Path

import pytest

from benchmarks.kvbench.__main__ import main
from benchmarks.kvbench.configurations import Configuration
from benchmarks.kvbench.plan import plan
from remote_server.errors import ConfigError
from remote_server.traces.models import load_models

KiB, MiB = 1 << 10, 1 << 20
MODELS = load_models()
R1, LLAMA_70B, LLAMA_8B = (
    MODELS[name] for name in ("deepseek-r1", "llama-3.1-70b", "llama-3.1-8b")
)

BYTES_PER_TOKEN = {
    "deepseek-r1": 35_136, "llama-3.1-70b": 163_840, "llama-3.1-8b": 65_536,
    "qwen3-8b": 73_728, "qwen3-235b-a22b": 96_256, "gpt-oss-20b": 24_576, "gpt-oss-120b": 36_864,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
@pytest.mark.parametrize("compatible", [False, True])
def test_the_bytes_of_a_token_are_those_of_the_sources_tool(name, compatible):
    planned = plan(MODELS[name], Configuration(), compatible=compatible)
    assert planned.bytes_per_token == BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize(
    ("model", "block_bytes"), [(R1, 549 * KiB), (LLAMA_70B, 5 * MiB // 2), (LLAMA_8B, MiB)]
)
def test_a_block_of_16_tokens_is_as_large_as_the_source_says(model, block_bytes, compatible):
    assert plan(model, Configuration(), compatible=compatible).block_bytes == block_bytes


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize(
    ("pp", "block_bytes"), [(2, 10_240), (4, 5_120), (8, 2_560), (16, 1_280), (32, 640)]
)
def test_a_token_of_70b_over_8_ranks_shrinks_with_the_stages(pp, block_bytes, compatible):
    configuration = Configuration(tp=8, pp=pp, page_size=1)
    assert plan(LLAMA_70B, configuration, compatible=compatible).block_bytes == block_bytes
    by_layer = Configuration(tp=8, pp=pp, page_size=1, pattern="layer")
    assert plan(LLAMA_70B, by_layer, compatible=compatible).block_bytes == 256


@pytest.mark.parametrize("model", [R1, LLAMA_70B, LLAMA_8B], ids=lambda model: model.name)
def test_ten_prompts_fill_630_blocks_and_the_source_counts_625(model):
    def batch(requests: int, *, compatible: bool) -> int:
        return plan(model, Configuration(requests=requests), compatible=compatible).batch

    assert [batch(1, compatible=compatible) for compatible in (False, True)] == [63, 63]
    assert [batch(10, compatible=compatible) for compatible in (False, True)] == [630, 625]


@pytest.mark.parametrize("pattern", ["block", "layer"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (8, 2), (8, 5), (16, 4)])
def test_whoever_shares_a_model_all_of_it_is_moved_once(pattern, tp, pp):
    planned = plan(LLAMA_70B, Configuration(tp=tp, pp=pp, pattern=pattern, requests=3))
    assert planned.num_bytes == 3 * 63 * 16 * 163_840


def test_every_rank_holds_the_whole_latent_so_it_moves_once_and_uncut():
    planned = plan(R1, Configuration(tp=8))
    assert (planned.block_bytes, planned.batch) == (549 * KiB, 63)
    assert "8 ranks hold 1 different" in planned.note
    assert plan(R1, Configuration(tp=8), compatible=True).block_bytes == 549 * KiB // 8


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(ConfigError, match="3 ranks cannot share 8 KV heads"):
        plan(LLAMA_8B, Configuration(tp=3))
    with pytest.raises(ConfigError, match="33 stages for 32 layers"):
        plan(LLAMA_8B, Configuration(pp=33))


def test_files_of_ones_own_are_read_and_mistakes_in_them_named(tmp_path: Path, capsys):
    mine = tmp_path / "mine.toml"
    mine.write_text('[small]\nattention = "gqa"\nlayers = 2\nkv_heads = 1\nhead_dim = 64\n')
    assert main(["plan", "--models", "small", "--models-file", str(mine)]) == 0
    assert "256" in capsys.readouterr().out
    mine.write_text('[small]\nattention = "gqa"\nlayers = 0\nkv_heads = 1\nhead_dim = 64\n')
    assert main(["plan", "--models", "small", "--models-file", str(mine)]) == 2
    assert "[small]: Expected `int` >= 1 - at `$.layers`" in capsys.readouterr().err
    assert main(["plan", "--models", "8b"]) == 2
    assert "names several: llama-3.1-8b, qwen3-8b" in capsys.readouterr().err


def test_all_three_formats_say_the_same(capsys):
    arguments = ["plan", "--models", "70b", "--tp", "8", "--requests", "1,10", "--format"]
    assert main([*arguments, "json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main([*arguments, "csv"]) == 0
    as_csv = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [plan["batch"] for plan in as_json] == [504, 5040]
    assert [{name: str(value) for name, value in plan.items()} for plan in as_json] == as_csv
    assert main([*arguments, "text"]) == 0
    assert "327,680" in capsys.readouterr().out
