"""No field of vLLM's config is overlooked: each is a fact, seen in one, or listed as harmless; and
engines that differ in what is harmless share."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.config
import vllm.envs
from engine_configs import Built, build, other_value, put, take_once, with_draft
from vllm.config import ECTransferConfig, LoRAConfig, MultiModalConfig, VllmConfig
from vllm_fields import (
    HARMLESS,
    HARMLESS_VARIABLES,
    OF_SOME_VERSIONS,
    SEEN_IN,
    VARIABLES_OF_SOME_VERSIONS,
)

from kv_connector.identity.config_facts import ENVIRONMENT, SETTINGS
from kv_connector.identity.namespace import ENGINE_FACTS, engine_facts, label_of, namespace_of

WORKER_FACTS = ("attention", "device")

# Config classes that are no field of `VllmConfig` itself.
BELOW = ("MultiModalConfig",)


def config_classes() -> Iterator[type]:
    yield VllmConfig
    for field in dataclasses.fields(VllmConfig):
        for kind in re.findall(r"\w+Config\b", str(field.type)):
            # QuantizationConfig stands for `quant_config`, which is no dataclass.
            if dataclasses.is_dataclass(found := getattr(vllm.config, kind, None)):
                yield found
    for kind in BELOW:
        yield getattr(vllm.config, kind)


def settings_of(kind: str) -> set[str]:
    return {name for chosen in SETTINGS.values() if chosen.kind == kind for name in chosen.fields}


@pytest.mark.parametrize("kind", list(config_classes()), ids=lambda kind: kind.__name__)
def test_every_field_is_a_fact_or_has_a_reason_why_it_is_none(kind: type):
    fields = {field.name for field in dataclasses.fields(kind)}
    if kind is VllmConfig:
        by_class = {name for name in fields if name.endswith("_config")}
        fields -= by_class - {"additional_config", "quant_config"}
    name = kind.__name__
    facts = settings_of(name)
    explained = set(SEEN_IN.get(name, {})) | set(HARMLESS.get(name, {}))
    rest = "*" in explained
    named = explained - {"*"}
    assert not facts & named, "a fact that is also explained away"
    assert not set(SEEN_IN.get(name, {})) & set(HARMLESS.get(name, {})) - {"*"}, "both"
    gone = (facts | named) - fields - OF_SOME_VERSIONS.get(name, set())
    assert not gone, "explains a field that no supported vLLM has"
    if not rest:
        assert fields <= facts | named, "decide for each: does it change what KV bytes mean?"


def test_every_class_that_is_explained_is_one_of_vllms():
    classes = {kind.__name__ for kind in config_classes()}
    assert (set(SEEN_IN) | set(HARMLESS)) - classes <= set(OF_SOME_VERSIONS)
    assert {chosen.kind for chosen in SETTINGS.values()} <= classes


def test_what_a_field_is_seen_in_is_a_fact():
    seen_in = {fact for fields in SEEN_IN.values() for fact in fields.values()}
    assert seen_in <= {*ENGINE_FACTS, *WORKER_FACTS}


# What a variable is called that changes numbers or where they lie.
SOUNDS = re.compile(
    r"QUANT|PRECISION|FP4|FP8|BF16|A16|INT4|INT8|SCALE|LAYOUT|E8M0|INVARIANT|ACCUM|DTYPE|PARTITION"
)


def test_every_variable_that_sounds_as_if_it_changed_values_is_a_fact_or_has_a_reason():
    known = set(vllm.envs.environment_variables)
    explained = {*ENVIRONMENT, *HARMLESS_VARIABLES}
    assert explained - known <= VARIABLES_OF_SOME_VERSIONS
    assert not set(ENVIRONMENT) & set(HARMLESS_VARIABLES)
    assert {name for name in known if SOUNDS.search(name)} <= explained


# ── engines that differ in what is harmless ──────────────────────────────────────────────


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
        take_once(patch)
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
    every = [field.name for field in dataclasses.fields(getattr(vllm.config, kind))]
    if "*" not in named:
        return [name for name in every if name in named and (kind, name) not in LOOKED_INTO]
    other = settings_of(kind) | set(SEEN_IN.get(kind, {}))
    return [name for name in every if name not in other]


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
    if kind in NONE_OF_ITS or not hasattr(vllm.config, kind):
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
