"""Small models with random weights, one for each kind of KV cache that vLLM knows."""

import json
import shutil
from pathlib import Path
from typing import Any

from examples.tiny_model import VOCABULARY

IMAGE_TOKEN = "<image>"
IMAGE_PIXELS = 112
PATCH_PIXELS = 14
IMAGE_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2

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


def _model_of(architecture: str, config: Any) -> Any:
    """Of transformers' class `architecture`, with random weights, equal on every machine."""
    import torch
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, architecture)(config).to(torch.bfloat16)


def _config_of(architecture: str, config_class: str, fields: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, config_class)
    return kind(architectures=[architecture], **{**_NAMES, **_SIZES, **fields})


def _save(path: Path, small: Path, architecture: str, config_class: str, **fields: Any) -> Path:
    """A model with the tokenizer of the model `small`. Experts are written one by one, as on a
    hub."""
    shutil.copytree(small, path)
    config = _config_of(architecture, config_class, fields)
    _model_of(architecture, config).save_pretrained(path)
    config.save_pretrained(path)  # without what the model adds
    return path


def build_chunked(path: Path, small: Path) -> Path:
    """Attention within chunks of 64 tokens in three of four layers."""
    return _save(
        path, small, "Llama4ForCausalLM", "Llama4TextConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, attention_chunk_size=64,
        intermediate_size_mlp=512, num_local_experts=2, moe_layers=[],
        interleave_moe_layer_step=0,
        no_rope_layers=[1, 1, 1, 0], use_qk_norm=True,
    )  # fmt: skip


def build_sinks(path: Path, small: Path) -> Path:
    """Sliding windows and full attention with sinks, and experts."""
    return _save(
        path, small, "GptOssForCausalLM", "GptOssConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, sliding_window=128,
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=256,
    )  # fmt: skip


def build_latent(path: Path, small: Path) -> Path:
    """MLA: one latent a token, of the size that vLLM's kernels for CPUs take."""
    return _save(
        path, small, "DeepseekV2ForCausalLM", "DeepseekV2Config",
        num_hidden_layers=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=4,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=128,
        topk_method="greedy", n_group=1, topk_group=1,
    )  # fmt: skip


def build_convolution(path: Path, small: Path) -> Path:
    """Short convolutions, each with a state, beside full attention."""
    return _save(
        path, small, "Lfm2ForCausalLM", "Lfm2Config",
        num_hidden_layers=6, num_key_value_heads=2, full_attn_idxs=[2, 5],
        block_ff_dim=512, block_auto_adjust_ff_dim=False, conv_L_cache=3, conv_bias=False,
        conv_dim=256, conv_dim_out=256, block_dim=256,
    )  # fmt: skip


def build_gated_delta(path: Path, small: Path) -> Path:
    """Gated delta networks, whose state is one block, beside full attention."""
    return _save(
        path, small, "Qwen3NextForCausalLM", "Qwen3NextConfig",
        num_hidden_layers=4, num_key_value_heads=2, head_dim=64, full_attention_interval=4,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, decoder_sparse_step=1,
    )  # fmt: skip


def build_state_space(path: Path, small: Path) -> Path:
    """State-space layers alone."""
    return _save(
        path, small, "Mamba2ForCausalLM", "Mamba2Config",
        num_hidden_layers=3, num_heads=8, head_dim=64, state_size=64, n_groups=1, chunk_size=64,
        expand=2,
    )  # fmt: skip


def build_state_space_hybrid(path: Path, small: Path) -> Path:
    """A state-space mixer and full attention in each layer."""
    return _save(
        path, small, "FalconH1ForCausalLM", "FalconH1Config",
        num_hidden_layers=3, num_key_value_heads=2, mamba_d_ssm=512, mamba_n_heads=8,
        mamba_d_head=64, mamba_d_state=64, mamba_chunk_size=64,
    )  # fmt: skip


def build_images(path: Path, small: Path) -> Path:
    """A vision tower before the small model's language model, and the processor of its images."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaProcessor,
        Qwen2Config,
    )

    shutil.copytree(small, path)
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    text = Qwen2Config(**{**_NAMES, **_SIZES, "vocab_size": VOCABULARY + 32},
                       num_hidden_layers=4, num_key_value_heads=2)  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        image_size=IMAGE_PIXELS, patch_size=PATCH_PIXELS, projection_dim=128,
        initializer_range=0.08,
    )  # fmt: skip
    config = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"], text_config=text, vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), eos_token_id=0,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    _model_of("LlavaForConditionalGeneration", config).save_pretrained(path)
    config.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    tower = "vision_tower."  # vLLM expects the names of before transformers 5
    renamed = {name.replace(tower, f"{tower}vision_model."): one for name, one in weights.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = CLIPImageProcessor(size=size, crop_size=size)
    LlavaProcessor(
        images, tokenizer, patch_size=PATCH_PIXELS, vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template, image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    ).save_pretrained(path)  # fmt: skip
    return path


def build_with_eagle(path: Path, small: Path) -> Path:
    """Dense, with a draft head of EAGLE's shape in the folder `draft` beside it."""
    import torch
    from safetensors.torch import save_file

    fields = {"num_key_value_heads": 2, "head_dim": 64}
    _save(path, small, "LlamaForCausalLM", "LlamaConfig", num_hidden_layers=4, **fields)
    draft = path.parent / "draft"
    draft.mkdir()
    config = _config_of("LlamaForCausalLM", "LlamaConfig", fields | {"num_hidden_layers": 1})
    layers = _model_of("LlamaForCausalLM", config).state_dict()
    weights = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in layers.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    width = config.hidden_size
    weights["fc.weight"] = torch.randn(width, 2 * width, dtype=torch.bfloat16) * 0.08
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(draft)
    return path


def build_with_mtp(path: Path, small: Path) -> Path:
    """Dense layers and one with experts, and one more that predicts the token after the next."""
    import torch
    from safetensors.torch import load_file, save_file

    layers = 3
    fields = {
        "num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": 64,
        "first_k_dense_replace": layers - 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    _save(path, small, "Glm4MoeForCausalLM", "Glm4MoeConfig", **fields)
    file = path / "model.safetensors"
    weights = load_file(file)
    last, added = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    extra = {
        added + name.removeprefix(last): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    width = _SIZES["hidden_size"]
    extra[added + "eh_proj.weight"] = torch.randn(width, 2 * width, dtype=torch.bfloat16) * 0.08
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{added}{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    extra[added + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    extra[added + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | extra, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def build_encoder_decoder(path: Path, small: Path) -> Path:
    """An encoder of sound with a decoder that attends to it."""
    from transformers import WhisperConfig, WhisperFeatureExtractor

    shutil.copytree(small, path)
    config = WhisperConfig(
        architectures=["WhisperForConditionalGeneration"], vocab_size=VOCABULARY, d_model=128,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=256, decoder_ffn_dim=256, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        decoder_start_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    _model_of("WhisperForConditionalGeneration", config).save_pretrained(path)
    config.save_pretrained(path)
    WhisperFeatureExtractor().save_pretrained(path)
    return path
