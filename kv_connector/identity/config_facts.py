"""Namespace facts from vLLM's settings: each that differs from vLLM's default is a fact.

A setting is listed here when it can change the bytes of KV blocks by more than rounding, or the
meaning of their keys. A test compares this list with the fields of vLLM's config classes: a field
must be listed here, be a fact of its own, or be listed in the test with the reason why it does not
matter.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm.config

from kv_connector.identity.fact_text import digest_of, text_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Settings(NamedTuple):
    """The relevant fields of one of vLLM's config classes."""

    where: str
    """The path from a `VllmConfig` to the object."""
    kind: str
    """Its class in `vllm.config`."""
    fields: tuple[str, ...]


# By the first part of the fact's name.
SETTINGS: Mapping[str, Settings] = {
    "model": Settings(
        "model_config",
        "ModelConfig",
        (
            *("code_revision", "quantization_config"),
            *("disable_sliding_window", "model_class_overrides"),
        ),
    ),
    "cache": Settings(
        "cache_config",
        "CacheConfig",
        (
            *("block_size", "prefix_match_unit", "kv_cache_dtype_skip_layers"),
            *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
            *("enable_mamba_shared_prefix_checkpoint", "use_replayssm", "replayssm_buffer_len"),
            *("use_kda_recoverssm", "kv_sharing_fast_prefill", "swa_bounded_replay"),
        ),
    ),
    "parallel": Settings(
        "parallel_config",
        "ParallelConfig",
        ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size", "worker_cls"),
    ),
    "load": Settings(
        "load_config", "LoadConfig", ("safetensors_load_strategy", "model_loader_extra_config")
    ),
    "attention": Settings(
        "attention_config",
        "AttentionConfig",
        (
            *("use_trtllm_attention", "disable_flashinfer_q_quantization", "hisparse_config"),
            *("use_prefill_query_quantization", "indexer_kv_dtype", "indexer_sparse_logits"),
            "use_non_causal",
        ),
    ),
    "mamba": Settings(
        "mamba_config",
        "MambaConfig",
        ("backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds"),
    ),
    "kernel": Settings(
        "kernel_config",
        "KernelConfig",
        ("moe_backend", "linear_backend", "linear_backend_per_quant"),
    ),
    "diffusion": Settings(
        "diffusion_config", "DiffusionConfig", ("canvas_length", "max_denoising_steps")
    ),
    "compilation": Settings("compilation_config", "CompilationConfig", ("inductor_passes",)),
    "encoder": Settings(
        "ec_transfer_config",
        "ECTransferConfig",
        (
            *("ec_connector", "ec_connector_module_path", "ec_role"),
            "ec_connector_extra_config",
        ),
    ),
    "multimodal": Settings(
        "model_config.multimodal_config",
        "MultiModalConfig",
        (
            *("language_model_only", "limit_per_prompt", "enable_mm_embeds", "media_io_kwargs"),
            *("mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_only"),
            *("mm_encoder_attn_dtype", "mm_hasher_algorithm"),
            *("video_pruning_rate", "video_pruning_method"),
        ),
    ),
    "draft": Settings(
        "speculative_config",
        "SpeculativeConfig",
        (
            *("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
            *("draft_tensor_parallel_size", "quantization", "moe_backend", "kv_cache_dtype"),
            *("max_model_len", "code_revision", "index_share_for_mtp_iteration"),
            *("parallel_drafting", "disable_eagle_block_drop"),
        ),
    ),
}

# Values equivalent to the default: other ways to read the same files.
_AS_DEFAULT: Mapping[str, frozenset[str]] = {
    "load.safetensors_load_strategy": frozenset(("lazy", "eager", "prefetch")),
}

_HARMLESS_LOADER_KEYS = frozenset(
    ("enable_multithread_load", "num_threads", "enable_weights_track")
)

# Variables of vLLM's environment that change values by more than rounding, or the layout.
ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_VIDEO_LOADER_BACKEND",
)


def setting_facts(vllm_config: "VllmConfig") -> Iterator[tuple[str, str]]:
    """Settings that differ from the defaults of vLLM's classes. Raises `NotKnown`."""
    defaults = _defaults()
    for part, settings in SETTINGS.items():
        config: Any = vllm_config
        for step in settings.where.split("."):
            config = getattr(config, step, None)
        if config is None or (part == "draft" and not has_draft_kv(vllm_config)):
            continue
        for name in settings.fields:
            fact = f"{part}.{name}"
            value = text_of(_value(fact, getattr(config, name)))
            if value != defaults[fact] and value not in _AS_DEFAULT.get(fact, ()):
                yield fact, value


def defaults_fact() -> str:
    """A digest of the defaults, which `setting_facts` omits: releases of one line may differ."""
    return digest_of(_defaults())


def _defaults() -> dict[str, str]:
    return {
        f"{part}.{name}": text_of(_default_of(getattr(vllm.config, settings.kind), name))
        for part, settings in SETTINGS.items()
        for name in settings.fields
    }


def environment_fact() -> str:
    """The relevant variables that are set."""
    found = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return text_of(" ".join(f"{name}={value}" for name, value in found.items()))


def has_draft_kv(vllm_config: "VllmConfig") -> bool:
    """Whether speculative decoding has KV of its own; n-gram and suffix matching have none."""
    speculative: Any = vllm_config.speculative_config
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def _default_of(kind: type, name: str) -> Any:
    """The default of a field of one of vLLM's config classes; None if it has none."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return None
    described = getattr(field.default, "get_default", None)  # pydantic's own kind of default
    return described(call_default_factory=True) if described else field.default


def _value(fact: str, value: Any) -> Any:
    if fact == "load.model_loader_extra_config" and isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if key not in _HARMLESS_LOADER_KEYS}
    return value
