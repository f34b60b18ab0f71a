"""Which cached bytes an engine may use: a fingerprint of everything that must match.

A block's key says which tokens it stands for (vLLM's block hash folds in the whole prefix,
multimodal inputs, `cache_salt` and LoRA). It does not say which model computed the bytes, in
which precision, for which layout. The namespace does: two engines that differ in any of the
facts below miss each other instead of reading each other's KV.

Systems that left one of these out served wrong output silently: revision, layout, RoPE
overrides and parallel sizes have each been reported against a peer.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
import xxhash

from remote_server.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

Facts = dict[str, str]

# What an engine differs in without a bare tier noticing.
UNSEEN_BARE = (
    "model revision and weights, quantization, RoPE and other overrides, the attention backend, "
    "the CPU's instruction set, the content of LoRA adapters"
)

# Changes when the bytes of a row mean something else than before.
ROW_FORMAT = "1"

# Facts that change every key by themselves. They are told to the server, so that a person can
# see why two engines miss each other, but two engines that agree on keys may share blocks.
ADVISORY = ("hash_algo", "hash_seed")

# Read from each weight file: enough to tell checkpoints of one shape apart without reading
# hundreds of gigabytes at every start.
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 64 << 10

# Entries of a model's config that say where it came from, not what it computes.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "architectures_source")


def namespace_of(label: str, facts: Mapping[str, str]) -> str:
    """The name under which the server keeps these blocks: readable, then the digest.

    `label` is for people (it also is among `facts` when it must separate users).
    """
    decisive = {name: value for name, value in facts.items() if name not in ADVISORY}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]
    readable = "".join(c if c.isalnum() or c in "._-" else "-" for c in label)[:64]
    return f"{readable or 'kv'}@{digest}"


def engine_facts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Facts:
    """What the scheduler side can see. The workers add theirs (`worker_facts`)."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    text_config = model.hf_text_config.to_dict()
    facts = {
        "row_format": ROW_FORMAT,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "model": model_identity(model.model, model.revision),
        "model_config": _digest_config(text_config),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "blocks_per_row": str(_blocks_per_row(vllm_config)),
        "groups": _describe_groups(kv_cache_config),
        "parallel": (
            f"tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size} "
            f"pcp={parallel.prefill_context_parallel_size} "
            f"dcp={parallel.decode_context_parallel_size}"
        ),
        "hash_algo": str(cache.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(str(cache.prefix_caching_hash_algo)),
    }
    if _rope_depends_on_length(text_config):
        facts["max_model_len"] = str(model.max_model_len)
    if vllm_config.speculative_config is not None:
        facts["speculative"] = str(vllm_config.speculative_config.model)
    return facts


def _hash_seed(algorithm: str) -> str:
    """What every key of this engine begins from, for a person to compare. With an algorithm that
    is not cryptographic whoever knows the seed can make keys that collide: only a digest then."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        return "vLLM's own"
    if algorithm.startswith("xxhash"):
        return "digest " + hashlib.sha256(seed.encode()).hexdigest()[:8]
    return seed


def worker_facts(vllm_config: "VllmConfig", layer_names: Iterable[str]) -> Facts:
    """What only a worker knows: the attention backend chosen and the device it runs on.

    The CPU platform packs KV by instruction set, GPUs by kernel; the bytes differ.
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
        device = f"{current_platform.device_type} {current_platform.get_device_capability()}"
    return {"attention": ",".join(sorted(backends)) or "none", "device": device}


def bare_facts(config: "OffloadingConfig", user_namespace: str) -> tuple[str, Facts]:
    """Label and facts for a tier that sees only vLLM's offloading config.

    Raises `ConfigError` without `user_namespace`: what cannot be seen from here must then be
    told apart by the operator.
    """
    if not user_namespace:
        raise ConfigError(
            "RemoteTier: set 'namespace' to a name that is different for every model, revision, "
            f"quantization and set of overrides; from here the tier cannot see: {UNSEEN_BARE}"
        )
    parallel = config.parallel
    facts = {
        "row_format": ROW_FORMAT,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
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
    """A value no other engine has: after a weight update nobody else holds these weights.

    A counter would not do. Two engines that each updated once would agree on it, whatever
    weights they loaded.
    """
    return secrets.token_hex(8)


def model_identity(model: str, revision: str | None) -> str:
    """Which weights: a digest of the files where they can be found, else name and revision.

    Files are sampled, not read whole: size, the header, and windows spread over each file. Two
    checkpoints that share all of those are treated as one model.
    """
    folder = _local_folder(model, revision)
    if folder is None:
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    files = sorted(
        path
        for pattern in ("config.json", "*.index.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")
        for path in folder.glob(pattern)
    )
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(_sample(path))
    return digest.hexdigest()[:32]


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    sampled = xxhash.xxh3_128()
    with path.open("rb") as file:
        for i in range(_SAMPLES_PER_FILE):
            file.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
            sampled.update(file.read(_SAMPLE_BYTES))
    return sampled.digest()


def _local_folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:  # any trouble with the hub's cache only costs precision here
        return None
    return Path(config).parent if isinstance(config, str) else None


def _digest_config(config: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in config.items() if name not in _CONFIG_NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _rope_depends_on_length(text_config: Mapping[str, Any]) -> bool:
    rope = text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}
    return any(kind in str(rope).lower() for kind in ("longrope", "dynamic"))


def _blocks_per_row(vllm_config: "VllmConfig") -> int:
    assert vllm_config.kv_transfer_config is not None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return int(extra.get("blocks_per_chunk", 1))


def _describe_groups(kv_cache_config: "KVCacheConfig") -> str:
    """Kind, geometry and layers of each KV cache group, as one digest."""
    described = [
        f"{type(group.kv_cache_spec).__name__} {group.kv_cache_spec} {sorted(group.layer_names)}"
        for group in kv_cache_config.kv_cache_groups
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
