"""The model that the tests and the demo serve."""

import json
from pathlib import Path

import pytest

from examples.tiny_model import SPECIAL_TOKENS, VOCABULARY, build, prompt_tokens


def test_a_prompt_is_repeatable_and_holds_no_special_token() -> None:
    prompt = prompt_tokens(5000, seed=3)
    assert len(prompt) == 5000
    assert min(prompt) >= len(SPECIAL_TOKENS) and max(prompt) < VOCABULARY
    assert prompt == prompt_tokens(5000, seed=3)
    assert prompt[:100] == prompt_tokens(100, seed=3)
    assert prompt != prompt_tokens(5000, seed=4)


def test_two_builds_are_the_same_model(model: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", "small")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (model / name).read_bytes()
    assert list(tmp_path.iterdir()) == [again], "nothing unfinished is left"


def test_the_path_of_a_model_holds_in_every_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one was given to engines, which run in the folder of this project."""
    monkeypatch.chdir(model.parent)
    built = build(Path(model.name), "small")
    assert built == model.resolve() and built.is_absolute()


def test_a_model_made_by_another_recipe_is_replaced(tmp_path: Path) -> None:
    old = tmp_path / "model"
    old.mkdir()
    (old / "recipe.json").write_text("{}")
    build(old, "small")
    assert json.loads((old / "recipe.json").read_text())["hidden_size"] == 256


def test_a_directory_that_is_no_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        build(tmp_path, "small")
    assert (tmp_path / "notes.txt").read_text() == "mine"
