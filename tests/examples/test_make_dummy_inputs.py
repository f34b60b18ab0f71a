"""Prompts have their declared properties: the same each time, and alike exactly so far."""

import json
from pathlib import Path

import pytest

from examples import make_dummy_inputs
from examples.make_dummy_inputs import BadInputs
from examples.tiny_model import SPECIAL_TOKENS, VOCABULARY


def made(count: int = 4, length: int = 256, **more: int) -> list[list[int]]:
    return make_dummy_inputs.make_dummy_inputs(count, length, **more)


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_equal_seeds_give_equal_prompts_and_other_seeds_others():
    assert made(seed=7) == made(seed=7)
    assert all(a[:32] != b[:32] for a, b in zip(made(seed=7), made(seed=8), strict=True))
    assert made(seed=7, shared=64)[0][:64] != made(seed=8, shared=64)[0][:64]


@pytest.mark.parametrize("shared", [0, 32, 224])
def test_any_two_agree_in_exactly_the_tokens_they_share(shared: int):
    prompts = made(made_count := 509, shared=shared)
    assert len(prompts) == made_count
    for i in range(0, made_count, 50):
        for j in range(made_count):
            assert i == j or common(prompts[i], prompts[j]) == shared


def test_a_document_is_whole_blocks_and_one_question_follows_it():
    prompts = made(3, 96, question=5, block_size=48)
    assert {len(prompt) for prompt in prompts} == {101}
    assert len({tuple(prompt[96:]) for prompt in prompts}) == 1
    assert all(len(SPECIAL_TOKENS) <= token < VOCABULARY for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 100}, "--length 100: not whole blocks of 32 tokens; take 96 or 128"),
        ({"length": 20}, "--length 20: not whole blocks of 32 tokens; take 32"),
        ({"length": 0}, "--length 0: at least one block, 32 tokens"),
        ({"shared": 33}, "--shared 33: not whole blocks"),
        ({"shared": 288}, "--shared 288: choose 0 to --length, 256"),
        ({"shared": 256}, "--shared 256: all of --length"),
        ({"question": 0}, "--question 0: something must be left to compute"),
        ({"count": 0}, "--count 0: choose 1 to 509"),
        ({"count": 510}, "--count 510: choose 1 to 509"),
        ({"block_size": 0}, "--block-size 0"),
        ({"seed": -1}, "--seed -1: choose one from 0"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(arguments: dict[str, int], message: str):
    with pytest.raises(BadInputs) as refused:
        made(**arguments)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_reads_as_it_was_written(tmp_path: Path):
    path = tmp_path / "dummy.jsonl"
    for prompts in (made(2), ["some text\nof two lines", "more"]):
        make_dummy_inputs.write(prompts, path)
        assert make_dummy_inputs.read(path) == prompts
        assert len(path.read_text().splitlines()) == 2


def test_any_other_file_is_one_prompt(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("Call me\nIshmael.\n")
    assert make_dummy_inputs.read(path) == ["Call me\nIshmael.\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; make one: python -m examples.make_dummy_inputs --filename"),
        (" \n", "empty"),
        ('{"prompt": [1, 2]}\n{"prompt": []}\n', "line 2: the prompt is neither"),
        ('{"prompt": [1, 2]}\n{"prompt": [true]}\n', "line 2: the prompt is neither"),
        ('{"prompt": [1, 2]}\n{"pro', "line 2: not"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line(
    tmp_path: Path, content: str | bytes | None, message: str
):
    path = tmp_path / "dummy.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInputs) as refused:
        make_dummy_inputs.read(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_text_has_the_models_own_words_and_shares_what_the_tokens_share(model: Path):
    from transformers import AutoTokenizer

    words = make_dummy_inputs.words_of(str(model))
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    assert all(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in words)
    prompts = made(2, 64, shared=32)
    one, other = make_dummy_inputs.as_text(prompts, words)
    shared = "".join(words[(token - 3) % len(words)] for token in prompts[0][:32])
    assert one.startswith(shared) and other.startswith(shared) and one != other


def test_the_program_writes_a_file_and_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "out.jsonl"
    flags = ["--length", "64", "--count", "2", "--shared", "32", "--filename", str(path)]
    assert make_dummy_inputs.main(flags) == 0
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == made(
        2, 64, shared=32
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{path}: 2 prompts of 64 + 13 tokens, the first 32 the same in all"
    assert said[-1].startswith("next: python -m examples.speed_test")
    assert make_dummy_inputs.main(["--length", "60"]) == 2
    assert capsys.readouterr().err.startswith("make_dummy_inputs: --length 60: not whole blocks")
