"""Engines that differ in one fact never share, equal ones do, and the difference is named.

Generated from the lists of facts: a fact that nothing here knows how to change fails.
"""

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_configs import (
    DRAFTED,
    PREPARED,
    SETTING_NAMES,
    Built,
    build,
    change_of,
    rewrite,
    take_once,
    with_draft,
)
from vllm.platforms import current_platform

from kv_connector.identity.namespace import (
    ADVISORY,
    ENGINE_FACTS,
    MOST_SETTINGS,
    engine_facts,
    label_of,
    namespace_of,
    worker_facts,
)
from remote_server.protocol import NamespaceStats, TierShare
from remote_server.protocol.namespace_diff import FOR_PEOPLE, all_gaps
from remote_server.server.entrance.hellos import MAX_FINGERPRINT_FIELDS

# What cannot differ alone.
IMPLIED = {"dtype": {"kv_dtype"}}

Factory = Callable[..., Built]


# Facts that are changed in the files of an engine: it has a folder of its own.
IN_FILES = {"weights", "draft_weights", "weight_settings", "remote_code", "processor"}


@pytest.fixture(scope="module")
def prototypes(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Built, Built]]:
    """An engine, and one with a draft model. Others are copies of their configs."""
    place = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        take_once(patch)
        yield build(model, place / "plain", patch), with_draft(model, place / "drafts", patch)


@pytest.fixture
def engine(
    model: Path, prototypes: tuple[Built, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Factory:
    """Makes engines that may have any fact at all."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    number = itertools.count()

    def make(fact: str = "", **arguments: Any) -> Built:
        part = fact.partition(".")[0]
        drafts = part in DRAFTED
        if arguments or fact in IN_FILES:
            folder = tmp_path / f"engine {next(number)}"
            make_one = with_draft if drafts else build
            built = make_one(model, folder, monkeypatch, **arguments)
        else:
            known = prototypes[drafts]
            config, cache = deepcopy((known.config, known.cache))
            built = replace(known, config=config, cache=cache, patch=monkeypatch)
        if (prepare := PREPARED.get(fact, PREPARED.get(part))) is not None:
            prepare(built)
        return built

    return make


def declared(here: dict[str, str], there: dict[str, str]) -> dict[str, NamespaceStats]:
    """What a server knows of two engines that both stored something."""
    known: dict[str, NamespaceStats] = {}
    for name, facts in {"there": there, "here": here}.items():
        namespace = namespace_of("label", facts)
        others = known[namespace].fingerprint if namespace in known else facts
        differs = {field: others.get(field, "") for field in {**facts, **others}}
        known[namespace] = NamespaceStats(
            block_bytes=1,
            tiers={"memory": TierShare(blocks=1, used_bytes=1)},
            client=name,
            fingerprint=facts,
            engines={"there": differs, "here": {}},
        )
    return known


@pytest.mark.parametrize("fact", [*ENGINE_FACTS, *SETTING_NAMES])
def test_two_engines_share_unless_they_differ_in_a_fact_which_is_then_named(
    fact: str, engine: Factory
):
    one, same, other = engine(fact), engine(fact), engine(fact)
    base = one.facts()
    assert namespace_of("label", base) == namespace_of("label", same.facts())
    change_of(fact)(other)
    facts = other.facts()
    differ = {name for name in {**base, **facts} if base.get(name) != facts.get(name)}
    assert differ - {"model_name"} - IMPLIED.get(fact, set()) == {fact} - {"model_name"}
    apart = namespace_of("label", base) != namespace_of("label", facts)
    assert apart == (fact not in (*ADVISORY, *FOR_PEOPLE))
    lines = [gap.line() for gap in all_gaps(declared(base, facts))]
    if fact in FOR_PEOPLE:
        assert lines == []
    else:
        assert lines and all(fact in line and "model_name" not in line for line in lines)


UNDECISIVE = {"model_name", "hash_algo", "hash_seed", "multimodal.mm_hasher_algorithm"}
"""Facts that never change the bytes of a block, named here once more."""


def test_every_other_fact_changes_the_namespace():
    known = {*ENGINE_FACTS, *SETTING_NAMES, "attention", "device"}
    assert known >= UNDECISIVE
    apart = {
        name for name in known if namespace_of("m", {name: "a"}) != namespace_of("m", {name: "b"})
    }
    assert known - apart == UNDECISIVE


def test_every_fact_of_a_worker_keeps_engines_apart(monkeypatch: pytest.MonkeyPatch):
    def facts(backend: str = "FLASH_ATTN") -> dict[str, str]:
        layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
        compilation = SimpleNamespace(static_forward_context={"layer": layer})
        config: Any = SimpleNamespace(compilation_config=compilation)
        return worker_facts(config, ["layer"])

    base = facts()
    assert facts() == base
    changed = {"attention": facts("TRITON_ATTN")}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
    assert current_platform.is_cpu()
    changed["device"] = facts()
    assert set(changed) == set(base)
    for fact, values in changed.items():
        assert {name for name in base if base[name] != values[name]} == {fact}
        assert namespace_of("x", values) != namespace_of("x", base)


class Gpus:
    """vLLM's platform with these GPUs; those without a capability have a name."""

    device_type = "cuda"

    def __init__(self, *capabilities: tuple[int, int] | None) -> None:
        self._capabilities = capabilities

    def is_cpu(self) -> bool:
        return False

    def get_device_capability(self, index: int) -> tuple[int, int] | None:
        return self._capabilities[index]

    def get_device_name(self, index: int) -> str:
        return f"GPU of kind {index}"


def test_the_gpu_of_each_worker_is_a_fact(monkeypatch: pytest.MonkeyPatch):
    gpus = Gpus((8, 0), (8, 6), (8, 0), None, None)
    monkeypatch.setattr("vllm.platforms.current_platform", gpus)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    found = []
    for own in range(5):
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda own=own: own)
        found.append(worker_facts(config, [])["device"])
    assert found[0] == found[2] == "cuda (8, 0)"
    assert len(set(found)) == 4, "others have other bytes, or may have"


NEEDLESS: dict[str, dict[str, Any]] = {
    "shorter sequences": {"max_model_len": 1024},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "another way to read the files": {"load_format": "safetensors"},
    "prefetching them": {"safetensors_load_strategy": "prefetch"},
    "reading them in threads": {
        "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3}
    },
    "a dtype that is the model's": {"kv_cache_dtype": "bfloat16"},
    "longer positions": {"hf_overrides": {"max_position_embeddings": 16384}},
    "another seed": {"seed": 7},
    "more memory": {"kv_cache_memory_bytes": 1 << 30},
    "another name": {"served_model_name": "other"},
}


@pytest.mark.parametrize("difference", NEEDLESS)
def test_what_changes_no_value_keeps_no_engines_apart(difference: str, engine: Factory):
    one, other = engine(), engine(**NEEDLESS[difference])
    assert namespace_of("x", one.facts()) == namespace_of("x", other.facts())
    assert label_of(one.config, "") == label_of(other.config, "")


def test_random_weights_keep_every_engine_apart(engine: Factory):
    one = engine(load_format="dummy")
    assert one.facts()["weights"] != one.facts()["weights"]
    assert one.facts()["loader"] != engine().facts()["loader"]


def test_a_fact_that_cannot_be_taken_is_a_reason_not_to_share(engine: Factory):
    unreadable = engine("weights")
    rewrite(unreadable.folder / "model.safetensors", b"")
    strange = engine()
    strange.config.model_config.hf_config.strange = object()
    broken = engine()
    broken.config.cache_config = None
    unnamed = engine()
    object.__setattr__(unnamed.config.compilation_config, "inductor_passes", {"x": lambda x: x})
    for built, reason in [
        (unreadable, "weights is not known: "),
        (strange, "model_config is not known: a object has no text"),
        (broken, "kv_dtype is not known: AttributeError"),
        (unnamed, "a setting is not known: a function has no text"),
    ]:
        _, unknown = engine_facts(built.config, built.cache)
        assert any(reason in line for line in unknown), unknown


def test_a_class_that_takes_weights_from_elsewhere_is_a_reason_not_to_share(
    engine: Factory, monkeypatch: pytest.MonkeyPatch
):
    from vllm.model_executor.models.registry import ModelRegistry

    built = engine()
    monkeypatch.setitem(
        ModelRegistry.models, "Qwen2ForCausalLM", ModelRegistry.models["UltravoxModel"]
    )
    _, unknown = engine_facts(built.config, built.cache)
    assert unknown and "reads weights from outside its" in unknown[0]


def test_a_draft_whose_kv_is_not_known_is_a_reason_not_to_share(engine: Factory):
    built = engine()
    custom = SimpleNamespace(
        method="custom_class", model="my.Proposer", uses_draft_kv_cache=lambda: False
    )
    object.__setattr__(built.config, "speculative_config", custom)
    _, unknown = engine_facts(built.config, built.cache)
    assert unknown == ["draft_weights is not known: whether my.Proposer has KV of its own"]


def test_a_server_takes_all_facts_of_an_engine_and_what_is_too_much_still_decides(engine: Factory):
    def all_changed() -> Built:
        built = engine("multimodal")
        for fact in SETTING_NAMES:
            if fact.partition(".")[0] in ("cache", "attention", "kernel", "mamba", "multimodal"):
                change_of(fact)(built)
        return built

    one, other = all_changed(), all_changed()
    assert one.facts() == {**other.facts(), "model_name": one.facts()["model_name"]}
    other.config.model_config.multimodal_config.video_pruning_rate = 0.5  # the last by name
    assert "more_settings" in one.facts()
    assert one.facts()["more_settings"] != other.facts()["more_settings"]
    more = ("more_settings", "attention", "device", "user", "weight_epoch")
    assert len(ENGINE_FACTS) + MOST_SETTINGS + len(more) <= MAX_FINGERPRINT_FIELDS
    assert all(len(value) <= 1024 for value in one.facts().values())
