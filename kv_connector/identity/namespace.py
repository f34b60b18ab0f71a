"""The namespace: a fingerprint of every fact that must match for engines to share blocks.

A block's key identifies its tokens (vLLM's block hash covers the whole prefix, multimodal inputs,
`cache_salt` and LoRA). It does not identify the model that computed the bytes, their precision, or
their layout. The namespace does: two engines that differ in any of the facts below do not read
each other's KV.

Systems that omitted one of these facts served wrong output silently: revision, layout, RoPE
overrides and parallel sizes have each been reported against a peer. An engine with a fact that
cannot be established does not share.
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import vllm

from kv_connector.identity import config_facts, model_facts
from kv_connector.identity.fact_text import NotKnown, digest_of, text_of
from kv_connector.identity.model_facts import loader_of, weights_of
from remote_server.client import CacheClient
from remote_server.errors import ConfigError
from remote_server.plain_text import plain
from remote_server.protocol import StatsReply
from remote_server.protocol.namespace_diff import FOR_PEOPLE, gaps_of

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

Facts = dict[str, str]

# Facts that a bare tier cannot see.
UNSEEN_BARE = (
    "model revision and weights, quantization, RoPE and other overrides, the attention backend, "
    "the CPU's instruction set, the content of LoRA adapters"
)

# Changes with the meaning of a row's bytes and with the way in which facts are taken.
ROW_FORMAT = "2"

# Facts that already change the keys. The server stores them to show why two engines miss each
# other, but the namespace does not need them: engines with equal keys may share blocks.
ADVISORY = ("hash_algo", "hash_seed", "multimodal.mm_hasher_algorithm")


# A server accepts 64 facts of one engine. Further settings, which no known engine has, are joined
# into one fact.
MOST_SETTINGS = 30

_NAME_CHARS = 200


class Engine(NamedTuple):
    """Sources of an engine's facts on the scheduler's side."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"

    @property
    def model(self) -> "ModelConfig":
        return self.vllm_config.model_config

    @property
    def load(self) -> "LoadConfig":
        return self.vllm_config.load_config


def namespace_of(label: str, facts: Mapping[str, str]) -> str:
    """The namespace of these blocks on the server: the readable label, then the digest.

    `label` is part of the name: it must be equal for engines that share.
    """
    undecisive = (*ADVISORY, *FOR_PEOPLE)
    decisive = {name: value for name, value in facts.items() if name not in undecisive}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]
    readable = "".join(c if c.isalnum() or c in "._-" else "-" for c in label)[:64]
    return f"{readable or 'kv'}@{digest}"


def label_of(vllm_config: "VllmConfig", user_namespace: str) -> str:
    """The readable part: the operator's name, else the kind of model. Not the folder's name:
    equal models in two folders share their blocks."""
    if user_namespace:
        return user_namespace.rstrip("/").rpartition("/")[2]
    return str(getattr(vllm_config.model_config.hf_config, "model_type", None) or "model")


def engine_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> tuple[Facts, list[str]]:
    """The facts of the scheduler's side, and a reason for each that could not be established.

    The workers add theirs (`worker_facts`). With any reason the engine must not use the server.
    Reads up to a few megabytes of the model's files. Never raises.
    """
    engine = Engine(vllm_config, kv_cache_config)
    facts: Facts = {}
    unknown: dict[str, None] = {}
    for name, take in ENGINE_FACTS.items():
        try:
            value = take(engine)
        except Exception as error:  # vLLM's configs may hold any value
            unknown[_reason(name, error)] = None
        else:
            if value:
                facts[name] = value
    try:
        settings = sorted(config_facts.setting_facts(vllm_config))
    except Exception as error:
        unknown[_reason("a setting", error)] = None
    else:
        facts.update(settings[:MOST_SETTINGS])
        if len(settings) > MOST_SETTINGS:
            facts["more_settings"] = digest_of(settings[MOST_SETTINGS:])
    return facts, list(unknown)


def _reason(name: str, error: Exception) -> str:
    if isinstance(error, NotKnown):
        return f"{name} is not known: {error}"
    return f"{name} is not known: {type(error).__name__}: {error}"


def _row_format(engine: Engine) -> str:
    """Older rows of hybrid models may hold bytes of other requests, so new ones differ in name."""
    one_group = len(engine.kv_cache_config.kv_cache_groups) == 1
    return ROW_FORMAT if one_group else f"{ROW_FORMAT} cleared"


def _vllm_line() -> str:
    return ".".join(vllm.__version__.split(".")[:2])


def _kv_dtype(engine: Engine) -> str:
    dtype = str(engine.vllm_config.cache_config.cache_dtype)
    return str(engine.model.dtype).removeprefix("torch.") if dtype == "auto" else dtype


def _blocks_per_row(engine: Engine) -> str:
    transfer = engine.vllm_config.kv_transfer_config
    assert transfer is not None
    return str(int(transfer.kv_connector_extra_config.get("blocks_per_chunk", 1)))


def _groups(engine: Engine) -> str:
    """Kind, geometry and layers of each KV cache group, as one digest."""
    groups = engine.kv_cache_config.kv_cache_groups
    specs = [(group.kv_cache_spec, sorted(group.layer_names)) for group in groups]
    return digest_of([[type(spec).__name__, str(spec), layers] for spec, layers in specs])


def _parallel(engine: Engine) -> str:
    parallel = engine.vllm_config.parallel_config
    return (
        f"tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size} "
        f"pcp={parallel.prefill_context_parallel_size} "
        f"dcp={parallel.decode_context_parallel_size}"
    )


def _hash_seed(engine: Engine) -> str:
    """The seed of this engine's keys, for a person to compare. For xxhash only a digest: a known
    seed is enough to make colliding keys, because xxhash is not cryptographic."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        return "vLLM's own"
    if str(engine.vllm_config.cache_config.prefix_caching_hash_algo).startswith("xxhash"):
        return "digest " + hashlib.sha256(seed.encode()).hexdigest()[:8]
    return seed


def _draft_weights(engine: Engine) -> str:
    """The draft model's weights, if it has KV of its own; else empty."""
    speculative = engine.vllm_config.speculative_config
    if speculative is None:
        return ""
    if speculative.method == "custom_class":
        raise NotKnown(f"whether {speculative.model} has KV of its own")
    # The model of the method that extracts hidden states has no weights.
    has_files = speculative.method != "extract_hidden_states"
    if not config_facts.has_draft_kv(engine.vllm_config) or not has_files:
        return ""
    return weights_of(speculative.draft_model_config, speculative.draft_load_config or engine.load)


def _draft_config(engine: Engine) -> str:
    speculative = engine.vllm_config.speculative_config
    if speculative is None or not config_facts.has_draft_kv(engine.vllm_config):
        return ""
    draft = speculative.draft_model_config
    taken = model_facts.config_of(draft), model_facts.rope_of(draft), model_facts.length_of(draft)
    return digest_of([*taken, str(draft.dtype), str(draft.quantization)])


ENGINE_FACTS: Mapping[str, Callable[[Engine], str]] = {
    "row_format": _row_format,
    "vllm": lambda _: _vllm_line(),
    "vllm_defaults": lambda _: config_facts.defaults_fact(),
    "environment": lambda _: config_facts.environment_fact(),
    "model_name": lambda engine: plain(str(engine.model.model))[-_NAME_CHARS:],
    "model_class": lambda engine: model_facts.model_class_of(engine.model),
    "model_config": lambda engine: model_facts.config_of(engine.model),
    "rope": lambda engine: model_facts.rope_of(engine.model),
    "max_model_len": lambda engine: model_facts.length_of(engine.model),
    "runner": lambda engine: f"{engine.model.runner_type} {engine.model.convert_type}",
    "loader": lambda engine: loader_of(engine.load),
    "weights": lambda engine: weights_of(engine.model, engine.load),
    "weight_settings": lambda engine: model_facts.weight_settings_of(engine.model, engine.load),
    "remote_code": lambda engine: model_facts.remote_code_of(engine.model, engine.load),
    "processor": lambda engine: model_facts.processor_of(engine.model, engine.load),
    "quantization": lambda engine: str(engine.model.quantization),
    "dtype": lambda engine: str(engine.model.dtype),
    "kv_dtype": _kv_dtype,
    "layout": lambda engine: str(engine.kv_cache_config.kv_cache_layout),
    "blocks_per_row": _blocks_per_row,
    "groups": _groups,
    "parallel": _parallel,
    "draft_weights": _draft_weights,
    "draft_config": _draft_config,
    "hash_algo": lambda engine: str(engine.vllm_config.cache_config.prefix_caching_hash_algo),
    "hash_seed": _hash_seed,
    "additional_config": lambda engine: text_of(engine.vllm_config.additional_config or ""),
}
"""By name, all facts of the scheduler's side except the settings in `config_facts`. An empty value
is no fact."""


def worker_facts(vllm_config: "VllmConfig", layer_names: Iterable[str]) -> Facts:
    """The facts of a worker: its attention backend and its device.

    The CPU platform packs KV by instruction set, GPUs by kernel, so the bytes differ.
    """
    import torch
    from vllm.platforms import current_platform

    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        layers[name].get_attn_backend().get_name()
        for name in layer_names
        if hasattr(layers.get(name), "get_attn_backend")
    }
    if current_platform.is_cpu():
        device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
        device += f" amx={torch.cpu._is_amx_tile_supported()}"
    else:
        own = torch.accelerator.current_device_index()
        capability = current_platform.get_device_capability(own)
        generation = capability or current_platform.get_device_name(own)
        device = f"{current_platform.device_type} {generation}"
    return {"attention": ",".join(sorted(backends)) or "none", "device": device}


def bare_facts(config: "OffloadingConfig", user_namespace: str) -> tuple[str, Facts]:
    """Label and facts for a tier that sees only vLLM's offloading config.

    Raises `ConfigError` without `user_namespace`, by which the operator must distinguish the facts
    that the tier cannot see. Also raises it for a model with several KV cache groups: rows that
    vLLM's own worker fills may hold bytes of other requests.
    """
    if len(config.groups) > 1:
        raise ConfigError(
            f"RemoteTier: this model has {len(config.groups)} KV cache groups; use "
            "KVFerryConnector: unlike OffloadingConnector it clears a row's previous content"
        )
    if not user_namespace:
        raise ConfigError(
            "RemoteTier: set 'namespace' to a name that is different for every model, revision, "
            f"quantization and set of overrides; a bare tier cannot see: {UNSEEN_BARE}"
        )
    parallel = config.parallel
    facts = {
        "row_format": ROW_FORMAT,
        "vllm": _vllm_line(),
        "model": config.model.name,
        "kv_dtype": config.model.dtype,
        "layout": str(config.kv_cache_layout),
        "blocks_per_row": str(config.cache.blocks_per_chunk),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "groups": str([(g.group_id, g.tokens_per_block, g.layer_names) for g in config.groups]),
        "block_bytes": str(config.worker_kv_bytes_per_block),
        "canonical": str(config.canonical_layout),
        "parallel": (
            f"tp={parallel.tp_size} pp={parallel.pp_size} "
            f"pcp={parallel.pcp_size} dcp={parallel.dcp_size}"
        ),
        "user": user_namespace,
    }
    return user_namespace, facts


def new_weight_epoch() -> str:
    """A random value, unique to this engine: no other engine is known to have the same weights. Two
    engines that each updated once would have equal counters with different weights."""
    return secrets.token_hex(8)


MISMATCH_CHECK_TIMEOUT_S = 5.0


def look_for_gaps(
    client: CacheClient,
    namespace: str,
    engine: str,
    facts: Mapping[str, str],
    logger: logging.Logger,
) -> None:
    """Query the server's namespaces, and log the facts that keep this engine from using them.
    Returns at once; the client's thread logs. A failed query is ignored."""

    def log_gaps(reply: "Future[StatsReply]") -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        for gap in gaps_of(namespace, engine, facts, reply.result().namespaces):
            logger.warning("%s", gap.line())

    client.stats(fingerprints=True, timeout_s=MISMATCH_CHECK_TIMEOUT_S).add_done_callback(log_gaps)
