"""A model with sliding windows in two of three layers, made like `examples.tiny_model`'s."""

import shutil
from pathlib import Path

WINDOW_TOKENS = 128


def build_hybrid(path: Path, small: Path) -> Path:
    """Make the model at `path`, with the tokenizer of the model `small`."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from examples.tiny_model import VOCABULARY

    shutil.copytree(small, path)
    config = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,  # as in `examples.tiny_model.Preset`
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    weights = Gemma3ForCausalLM(config).to(torch.bfloat16).state_dict()
    weights.pop("lm_head.weight", None)  # tied
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    return path
