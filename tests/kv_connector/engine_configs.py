"""Real configs of the tiny model, and one change for every fact that a namespace is made of."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import (
    DiffusionConfig,
    ECTransferConfig,
    KVTransferConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kv_connector.identity import config_facts, namespace
from kv_connector.identity.config_facts import SETTINGS

LAYER = "model.layers.0.self_attn.attn"


@dataclass
class Built:
    """An engine that could start, and what a change may use to alter it."""

    config: Any
    """A `VllmConfig` of its own."""
    cache: Any
    """Its `KVCacheConfig`."""
    folder: Path
    """The model's, of its own."""
    patch: pytest.MonkeyPatch

    def facts(self) -> dict[str, str]:
        facts, unknown = namespace.engine_facts(self.config, self.cache)
        assert not unknown, unknown
        return facts


Change = Callable[[Built], Any]


def link(source: str, target: str) -> None:
    """Or copy, between file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def build(model: Path, folder: Path, patch: pytest.MonkeyPatch, **arguments: Any) -> Built:
    shutil.copytree(model, folder, copy_function=link)
    config: VllmConfig = EngineArgs(
        model=str(folder),
        block_size=32,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"),
        **arguments,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    cache = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
    )
    cache.kv_cache_layout = "LBNHC"
    return Built(config, cache, folder, patch)


def take_once(patch: pytest.MonkeyPatch) -> None:
    """What costs most of an engine's facts: the defaults of vLLM's classes."""
    patch.setattr(config_facts, "_default_of", cache(config_facts._default_of))


def with_draft(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Built:
    """An engine of which `folder` has the draft model below `draft`."""
    shutil.copytree(model, folder / "draft", copy_function=link)
    draft = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 2}
    built = build(model, folder / "target", patch, speculative_config=draft)
    return replace(built, folder=folder)


def put(path: str, value: Any) -> Change:
    """A change that sets an attribute of the config."""

    def change(built: Built) -> None:
        *way, name = path.split(".")
        owner = built.config
        for step in way:
            owner = getattr(owner, step)
        object.__setattr__(owner, name, value)

    return change


def give(path: str, kind: type) -> Change:
    """A change that sets an attribute to a new object of its own."""
    return lambda built: put(path, kind())(built)


def rope(kind: str) -> Change:
    parameters = {"rope_theta": 10_000.0, "rope_type": kind, "factor": 2.0}
    return put("model_config.hf_config.rope_parameters", parameters)


def other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    rewrite(path, bytes(content))


def rewrite(path: Path, content: bytes) -> None:
    """Another content in this engine's folder only: the folders have links to one file."""
    path.unlink()
    path.write_bytes(content)


def other_default(built: Built) -> None:
    """A release of vLLM with another default that this engine goes along with."""
    real = config_facts._default_of
    built.config.cache_config.replayssm_buffer_len = 99
    built.patch.setattr(
        config_facts,
        "_default_of",
        lambda kind, name: 99 if name == "replayssm_buffer_len" else real(kind, name),
    )


def other_class(built: Built) -> None:
    entry = _LazyRegisteredModel("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM")
    built.patch.setitem(ModelRegistry.models, "Qwen2ForCausalLM", entry)


def other_spec(built: Built) -> None:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    built.cache.kv_cache_groups = [KVCacheGroupSpec([LAYER], spec)]


def write(name: str, text: str) -> Change:
    return lambda built: (built.folder / name).write_text(text)


# What both engines have, so that the fact is one at all.
PREPARED: dict[str, Change] = {
    "max_model_len": rope("dynamic"),
    "load.model_loader_extra_config": put("load_config.load_format", "sharded_state"),
    "remote_code": put("model_config.trust_remote_code", True),
    "processor": give("model_config.multimodal_config", MultiModalConfig),
    "diffusion": give("diffusion_config", DiffusionConfig),
    "encoder": give("ec_transfer_config", ECTransferConfig),
    "multimodal": give("model_config.multimodal_config", MultiModalConfig),
}

# Facts of which the engine has a draft model.
DRAFTED = ("draft", "draft_weights", "draft_config")

CHANGES: dict[str, Change] = {
    "row_format": lambda built: built.patch.setattr(namespace, "ROW_FORMAT", "999"),
    "vllm": lambda built: built.patch.setattr(vllm, "__version__", "0.999.0"),
    "vllm_defaults": other_default,
    "environment": lambda built: built.patch.setenv("VLLM_BATCH_INVARIANT", "1"),
    "model_name": put("model_config.served_model_name", "nothing to do with it"),
    "model_class": other_class,
    "model_config": put("model_config.hf_config.rms_norm_eps", 0.5),
    "rope": put("model_config.hf_config.rope_parameters", {"rope_theta": 7.0}),
    "max_model_len": put("model_config.max_model_len", 77),
    "runner": put("model_config.runner_type", "pooling"),
    "loader": put("load_config.load_format", "runai_streamer"),
    "weights": lambda built: other_weights(built.folder),
    "weight_settings": write("hf_quant_config.json", "{}"),
    "remote_code": write("modeling_mine.py", "x = 1"),
    "processor": write("preprocessor_config.json", json.dumps({"size": 99})),
    "quantization": put("model_config.quantization", "fp8"),
    "dtype": put("model_config.dtype", torch.float16),
    "kv_dtype": put("cache_config.cache_dtype", "fp8"),
    "layout": lambda built: setattr(built.cache, "kv_cache_layout", "BLHNC"),
    "blocks_per_row": put("kv_transfer_config.kv_connector_extra_config", {"blocks_per_chunk": 4}),
    "groups": other_spec,
    "parallel": put("parallel_config.tensor_parallel_size", 2),
    "draft_weights": lambda built: other_weights(built.folder / "draft"),
    "draft_config": put("speculative_config.draft_model_config.hf_config.rms_norm_eps", 0.5),
    "hash_algo": put("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "hash_seed": lambda built: built.patch.setenv("PYTHONHASHSEED", "42"),
    "additional_config": put("additional_config", {"something": 1}),
}

# Values of settings for which "another one" has to be a particular one.
VALUES: Mapping[str, Any] = {
    "draft.method": "eagle",
    "load.safetensors_load_strategy": "torchao",
    "model.model_class_overrides": {
        "OtherForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM"
    },
}


def change_setting(fact: str) -> Change:
    """A change of the field behind `fact` to a value that it has not."""
    part, _, field = fact.partition(".")
    path = f"{SETTINGS[part].where}.{field}"

    def change(built: Built) -> None:
        value = built.config
        for step in path.split("."):
            value = getattr(value, step)
        put(path, VALUES.get(fact, other_value(value)))(built)

    return change


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, Mapping):
        return {**value, "other": 1}
    if isinstance(value, (list, tuple)):
        return [*value, "other"]
    return f"{value} other"


SETTING_NAMES = [f"{part}.{name}" for part, one in SETTINGS.items() for name in one.fields]
"""The names of all facts that `setting_facts` may yield."""


def change_of(fact: str) -> Change:
    """Raises `KeyError` for a fact of which nothing here knows how to differ in it."""
    return change_setting(fact) if fact in SETTING_NAMES else CHANGES[fact]
