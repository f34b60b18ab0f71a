"""`kvferry advise`: what it prints, for people and for scripts, and what it refuses."""

import json
import re

import pytest
from typed_commands import flags_of

from remote_server.cli.__main__ import main
from remote_server.server import settings
from remote_server.traces.models import bytes_of_model

MODEL = ["--model", "qwen2.5-7b"]


def line(second: int, ids: list[int], **more: object) -> str:
    return json.dumps({
        "timestamp": 1000 * second, "input_length": 512 * len(ids), "output_length": 9,
        "hash_ids": ids,
    } | more)  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Twenty prompts that return once each, and the same beginning in all."""
    path = tmp_path / "trace.jsonl"
    ids = [[0, *range(10 * n + 1, 10 * n + 10)] for n in range(20)]
    lines = [line(second, ids[second % 20]) for second in range(40)]
    path.write_text("\n".join([*lines[:5], line(1, [0]), *lines[5:]]) + "\n")
    return path


def test_people_get_rooms_ways_a_command_and_what_was_assumed(trace, capsys):
    assert main(["advise", str(trace), *MODEL]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trace.jsonl: Mooncake, 41 prompts in 0 min 39 s, ")
    assert "  note: 1 line: earlier than the line before, sorted by time" in printed
    assert re.search(r"\n  4\.9 GiB +54\.9 % .* <- more brings under 1 %\n", printed)
    assert re.search(r"\n  memory +1 ", printed) and re.search(r"\n  disk +1 ", printed)
    assert "requests a month" in printed and "Assumed:\n  an engine computes 10,000" in printed
    (command,) = re.findall(r"^  kvferry serve (.*)$", printed, re.MULTILINE)
    assert settings.choose(flags_of("serve", command.split()), {}).config.disk
    assert all(len(each) <= 80 for each in printed.splitlines() if "kvferry serve" not in each)


def test_the_columns_are_aligned(trace, capsys):
    main(["advise", str(trace), *MODEL])
    tables = capsys.readouterr().out.split("\n\n")
    rooms = [each.split("<-")[0].rstrip() for each in tables[1].splitlines()]
    assert len({len(each) for each in rooms}) == 1
    ways = re.findall(r"^(?:  memory|  disk|  bucket below| +hosts) .*$", tables[2], re.MULTILINE)
    assert len(ways) == 4 and len({*map(len, ways)}) == 1


def test_scripts_get_one_object(trace, capsys):
    assert main(["advise", str(trace), *MODEL, "--json", "--memory-price", "1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["format"], made["prompts"], made["seconds"]) == ("Mooncake", 41, 39.0)
    assert made["given"]["kv_bytes"] == 57344 and made["given"]["memory_price"] == 1.0
    assert made["problems"] == [
        {"num_lines": 1, "first_line": 6, "text": "earlier than the line before, sorted by time"}
    ]
    assert made["serve"].startswith("kvferry serve --memory 1GiB")
    assert made["can_be_found"] == made["rooms"][-1]["share"] == pytest.approx(220 / 401)
    assert {way["name"] for way in made["ways"]} == {"memory", "disk", "bucket below"}


def test_a_recording_needs_no_model_and_shows_what_its_server_found(tmp_path, capsys):
    fields = {"type": "lookup", "namespace": 0, "block_size": 512, "block_bytes": 1 << 20}
    lines = [line(n, [1, 2, 3], **fields, found=1 if n else 0) for n in range(5)]
    path = tmp_path / "recorded.jsonl"
    end = json.dumps({"end": True, "requests": 5, "lost": 0})
    path.write_text("\n".join(['{"kvferry_trace": 1}', *lines, end]) + "\n")
    assert main(["advise", str(path), "--link", "50"]) == 0
    printed = capsys.readouterr().out
    assert "The server that recorded it found 26.7 %" in printed
    assert "2,048 bytes a token. With room for all of it 80.0 % of" in " ".join(printed.split())


def test_where_a_cache_gives_nothing_the_status_is_1_and_the_reason_is_printed(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text("\n".join(line(n, [2 * n, 2 * n + 1]) for n in range(5)))
    assert main(["advise", str(path), *MODEL]) == 1
    printed = capsys.readouterr().out
    assert "No cache: prompts do not return" in printed and "kvferry serve" not in printed
    assert main(["advise", str(path), *MODEL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["serve"] is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "nonesuch"], "--model: 'nonesuch' names none; there are deepseek-r1"),
        (["--model", "qwen3"], "--model: 'qwen3' names several"),
        (["--model", "deepseek-r1-distill-qwen-32b"], "names none"),
        (["--kv-bytes-per-token", "56 kilo"], "--kv-bytes-per-token: '56 kilo' is not a size"),
        (["--kv-bytes-per-token", "0"], "--kv-bytes-per-token: '0' is no room at all"),
        ([*MODEL, "--kv-bytes-per-token", "1KiB"], "not allowed with argument --model"),
        (["--link", "0"], "--link: '0' is not above zero"),
        (["--link", "nan"], "--link: 'nan' is not a number from 0 on"),
        (["--memory-price", "-1"], "--memory-price: '-1' is not a number from 0 on"),
        (["--bucket-price", "1,2"], "--bucket-price: '1,2': three prices, as 0.023,0.005,0.0004"),
        (["--memory-prise", "3"], "unknown flag --memory-prise; did you mean --memory-price?"),
    ],
)
def test_a_wrong_flag_takes_two_lines(trace, capsys, flags, says):
    with pytest.raises(SystemExit) as ended:
        main(["advise", str(trace), *flags])
    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and says in first
    assert second.endswith("`kvferry advise --help` lists the flags, with examples")


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        (None, MODEL, "No such file or directory"),
        ("a,b\n1,2\n", MODEL, "line 1: no known format"),
        (line(0, [1]), MODEL, "all requests come within a second"),
        (line(0, [1]), [], "--model or --kv-bytes-per-token is missing: the trace has no bytes"),
        (line(0, [1]), ["--model", "/nonesuch/config.json"], "names none"),
    ],
)
def test_a_wrong_file_takes_one_line(tmp_path, capsys, text, flags, says):
    path = tmp_path / "t"
    if text is not None:
        path.write_text(text)
    assert main(["advise", str(path), *flags]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("kvferry advise: ") and says in error


# ── models ───────────────────────────────────────────────────────────────────────────────

QWEN = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28}


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("qwen2.5-7b", 57344),
        ("Qwen/Qwen2.5-7B-Instruct", 57344),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 131072),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 131072),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 192512),
        ("deepseek-ai/DeepSeek-R1", 70272),
    ],
)
def test_a_model_is_known_by_its_name_on_a_hub(name, num_bytes):
    assert bytes_of_model(name, "bf16") == num_bytes == 2 * bytes_of_model(name, "fp8")


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (QWEN | {"num_key_value_heads": 4}, 57344),
        (QWEN | {"num_key_value_heads": 4, "head_dim": 64}, 28672),
        (QWEN, 28 * 2 * 28 * 128 * 2),
        ({"text_config": QWEN | {"num_key_value_heads": 4}, "vision_config": {}}, 57344),
        (QWEN | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 28 * 576 * 2),
        (QWEN | {"num_key_value_heads": 4, "layer_types": ["sliding_attention"]}, 57344),
    ],
)
def test_a_models_own_file_gives_its_bytes(tmp_path, config, num_bytes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bytes_of_model(str(tmp_path), "bf16") == num_bytes
    assert bytes_of_model(str(tmp_path / "config.json"), "fp8") == num_bytes // 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config.json: no JSON"),
        ("[]", "no num_hidden_layers: not the config.json of a language model"),
        ('{"architectures": []}', "no num_hidden_layers"),
        (json.dumps({"num_hidden_layers": 4}), "config.json: Expected `int`, got `null`"),
        (json.dumps(QWEN | {"layer_types": ["linear_attention"]}), "give --kv-bytes-per-token"),
        (json.dumps(QWEN | {"hidden_size": "x"}), "config.json: Expected `int`, got `null`"),
    ],
)
def test_a_file_that_is_no_models_is_refused(tmp_path, capsys, trace, text, says):
    (tmp_path / "config.json").write_text(text)
    assert main(["advise", str(trace), "--model", str(tmp_path / "config.json")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert says in error
