"""A LoRA adapter for the small model."""

import json
from pathlib import Path


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
