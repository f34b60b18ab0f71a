"""Engines that differ in what does not matter share: a pair for every field and every variable
that is listed as harmless."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.config
from engine_configs import Built, build, other_value, put, with_draft
from vllm.config import ECTransferConfig, LoRAConfig, MultiModalConfig, VllmConfig
from vllm_fields import HARMLESS, HARMLESS_VARIABLES, SEEN_IN

from kv_connector.config_facts import SETTINGS
from kv_connector.namespace import engine_facts, label_of, namespace_of

# Configs that this engine has none of, and what stands in for them.
MADE = {
    "ec_transfer_config": ECTransferConfig,
    "lora_config": lambda: LoRAConfig(max_lora_rank=8),
    "model_config.multimodal_config": MultiModalConfig,
}


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """With a draft model and one of every config that has fields here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        built = with_draft(model, tmp_path_factory.mktemp("engines") / "one", patch)
        for path, make in MADE.items():
            put(path, make())(built)
        yield built


def name_of(built: Built) -> str:
    facts, unknown = engine_facts(built.config, built.cache)
    assert not unknown, unknown
    return namespace_of(label_of(built.config, ""), facts)


def owner_of(config: VllmConfig, kind: str) -> Any:
    """The one object of this class in an engine's config, None without any."""
    if kind == "VllmConfig":
        return config
    paths = [f"{field.name}" for field in dataclasses.fields(VllmConfig)]
    for path in [*paths, "model_config.multimodal_config"]:
        found: Any = config
        for step in path.split("."):
            found = getattr(found, step, None)
        if type(found).__name__ == kind:
            return found
    return None


def fields_of(kind: str) -> list[str]:
    """Those listed as harmless."""
    named = HARMLESS[kind]
    if "*" not in named:
        return [field for field in named if (kind, field) not in LOOKED_INTO]
    facts = {name for chosen in SETTINGS.values() if chosen.kind == kind for name in chosen.fields}
    other = facts | set(SEEN_IN.get(kind, {}))
    every = dataclasses.fields(getattr(vllm.config, kind))
    return [field.name for field in every if field.name not in other]


# A config of its own, whose fields are a parameter of the test below.
LOOKED_INTO = {("ModelConfig", "multimodal_config")}

# Configs that this engine has none of: nothing of theirs is looked at.
NONE_OF_ITS = {
    *("EngramConfig", "KVEventsConfig", "ReasoningConfig", "WatermarkConfig"),
    "WeightTransferConfig",
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_no_harmless_field_keeps_engines_apart(kind: str, engine: Built):
    owner = owner_of(engine.config, kind)
    if kind in NONE_OF_ITS:
        assert owner is None
        return
    base, apart = name_of(engine), []
    for field in fields_of(kind):
        before = getattr(owner, field)
        object.__setattr__(owner, field, other_value(before))
        try:
            if name_of(engine) != base:
                apart.append(field)
        finally:
            object.__setattr__(owner, field, before)
    assert apart == []
    assert name_of(engine) == base


@pytest.mark.parametrize("variable", HARMLESS_VARIABLES)
def test_no_harmless_variable_keeps_engines_apart(
    variable: str, engine: Built, monkeypatch: pytest.MonkeyPatch
):
    base = name_of(engine)
    monkeypatch.setenv(variable, "1")
    assert name_of(engine) == base


def test_files_that_no_loader_takes_keep_no_engines_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another tokenizer, a chat template, notes, an older format beside the weights."""
    one = build(model, tmp_path / "one", monkeypatch)
    other = build(model, tmp_path / "renamed and more", monkeypatch)
    for name in ("README.md", "chat_template.jinja", "vocab.txt", "pytorch_model.bin", "notes.py"):
        (other.folder / name).write_bytes(b"something else")
    (other.folder / "tokenizer_config.json").unlink()
    (other.folder / "tokenizer_config.json").write_text("{}")
    assert name_of(one) == name_of(other)
