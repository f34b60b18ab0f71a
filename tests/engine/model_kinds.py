"""Small models with random weights, one for each kind of KV cache that vLLM knows."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_model import build_hybrid

from examples.tiny_model import VOCABULARY

_NAMES = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,  # as in `examples.tiny_model.Preset`
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _save(path: Path, small: Path, architecture: str, config_class: str, **fields: Any) -> Path:
    """A model of transformers' class `architecture`, with the tokenizer of the model `small`."""
    import torch
    import transformers
    from safetensors.torch import save_file

    shutil.copytree(small, path)
    config = getattr(transformers, config_class)(
        architectures=[architecture], **{**_NAMES, **_SIZES, **fields}
    )
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    return path


def _chunked_local(path: Path, small: Path) -> Path:
    """Attention within chunks of 64 tokens in three of four layers."""
    return _save(
        path, small, "Llama4ForCausalLM", "Llama4TextConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, attention_chunk_size=64,
        intermediate_size_mlp=512, num_local_experts=2, moe_layers=[],
        no_rope_layers=[1, 1, 1, 0], use_qk_norm=True,
    )  # fmt: skip


def _sinks(path: Path, small: Path) -> Path:
    """Sliding windows and full attention with sinks, and experts."""
    return _save(
        path, small, "GptOssForCausalLM", "GptOssConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, sliding_window=128,
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=256,
    )  # fmt: skip


def _latent(path: Path, small: Path) -> Path:
    """MLA: one latent a token, of the size that vLLM's kernel for CPUs takes."""
    return _save(
        path, small, "DeepseekV2ForCausalLM", "DeepseekV2Config",
        num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=3,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=128,
        topk_method="greedy", n_group=1, topk_group=1,
    )  # fmt: skip


def _convolution(path: Path, small: Path) -> Path:
    """Short convolutions, each with a state, beside full attention."""
    return _save(
        path, small, "Lfm2ForCausalLM", "Lfm2Config",
        num_hidden_layers=6, num_key_value_heads=2, full_attn_idxs=[2, 5],
        block_ff_dim=512, block_auto_adjust_ff_dim=False, conv_L_cache=3, conv_bias=False,
    )  # fmt: skip


def _gated_delta(path: Path, small: Path) -> Path:
    """Gated delta networks, whose state is one block, beside full attention."""
    return _save(
        path, small, "Qwen3NextForCausalLM", "Qwen3NextConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, full_attention_interval=4,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, decoder_sparse_step=1,
    )  # fmt: skip


def _mamba(path: Path, small: Path) -> Path:
    """State-space layers alone."""
    return _save(
        path, small, "Mamba2ForCausalLM", "Mamba2Config",
        num_hidden_layers=3, num_heads=8, head_dim=64, state_size=64, n_groups=1, chunk_size=64,
        expand=2,
    )  # fmt: skip


def _llama(path: Path, small: Path) -> Path:
    """Dense, of the family that EAGLE's drafts read from."""
    return _save(
        path, small, "LlamaForCausalLM", "LlamaConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip


def build_adapter(path: Path, seed: int, *, layers: int = 6, hidden: int = 256) -> Path:
    """A LoRA adapter with random weights for the model `small`, that changes what it answers."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for module, width in (("q_proj", hidden), ("v_proj", hidden // 2)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (8, hidden)), ("lora_B", (width, 8))):
                values = torch.randn(shape, generator=generator) * 0.1
                weights[f"{name}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "small",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


class Kind(NamedTuple):
    """One kind of model, and how an engine starts with it."""

    about: str
    build: Callable[[Path, Path], Path] | None = None
    """Makes the model at a path, with the tokenizer of the small model; None is that model."""
    args: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    ranks: int = 1
    """Workers of the engine, each with a core of its own."""

    keeps_prefix: bool = True
    """Whether every block of a prefix is found again, not only those at the ends of prompts."""


KINDS = {
    "dense": Kind("full attention, grouped queries"),
    "sliding window": Kind("two of three layers see 128 tokens", build_hybrid, keeps_prefix=False),
    "chunked local": Kind("three of four layers see chunks of 64 tokens", _chunked_local,
                          keeps_prefix=False),
    "attention sinks": Kind("sinks, windows and experts (gpt-oss)", _sinks, keeps_prefix=False),
    "MLA": Kind("one latent a token (DeepSeek)", _latent),
    "short convolution": Kind("a recurrent state beside attention (LFM2)", _convolution,
                              ("--mamba-cache-mode", "align"), keeps_prefix=False),
    "gated delta": Kind("a recurrent state beside attention (Qwen3-Next)", _gated_delta,
                        ("--mamba-cache-mode", "align"), keeps_prefix=False),
    "state space": Kind("recurrent states alone (Mamba 2)", _mamba,
                        ("--mamba-cache-mode", "align"), keeps_prefix=False),
    "drafts by n-grams": Kind(
        "speculative decoding without a draft model", None,
        ("--speculative-config",
         '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'),
    ),
    "two ranks": Kind("tensor parallel", None, ("--tensor-parallel-size", "2"), ranks=2),
    "two stages": Kind("pipeline parallel", None, ("--pipeline-parallel-size", "2"), ranks=2),
    "fp8 KV cache": Kind("keys and values of 8 bits", None, ("--kv-cache-dtype", "fp8")),
}  # fmt: skip
