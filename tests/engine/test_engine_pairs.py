"""Pairs of real engines, one after the other against one server: equal ones share, others never.

The first engine stores a prompt. Each of the others differs from it in one thing, asks for the
same prompt, and finds the blocks of the first or does not. With `-s` a table is printed.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector
from safetensors.numpy import save_file

from examples.processes import StartFailed
from examples.tiny_model import prompt_tokens

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3600)]

PROMPT = prompt_tokens(640 + 3, seed=970)


@dataclass(frozen=True)
class Pair:
    """How the second engine differs from the first."""

    shares: bool
    args: Sequence[str] = ()
    change: Callable[[Path], None] | None = None
    """To its own copy of the model's folder."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)


def one_tensor(folder: Path) -> None:
    """Another value projection in one layer: the smallest change that a trainer would make."""
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    start, end = header["model.layers.3.self_attn.v_proj.weight"]["data_offsets"]
    first = 8 + header_bytes + start
    raw[first : first + end - start] = raw[first : first + end - start][::-1]
    path.write_bytes(raw)


def other_words(folder: Path) -> None:
    """Another chat template and notes: nothing that tokens or KV are made of."""
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "chat_template": "{{ messages }}"}))
    (folder / "NOTES.md").write_text("nothing to do with it")


def adapter(folder: Path) -> None:
    """A LoRA adapter of the first layer's query projection."""
    place = folder / "adapter"
    place.mkdir()
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
        "base_model_name_or_path": "small", "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config))
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    random = np.random.default_rng(0)
    tensors = {
        f"{name}_A.weight": random.normal(size=(8, size)).astype(np.float32),
        f"{name}_B.weight": random.normal(size=(size, 8)).astype(np.float32),
    }
    save_file(tensors, place / "adapter_model.safetensors")


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}

PAIRS: dict[str, Pair] = {
    "nothing: started again": Pair(True),
    "the folder's name": Pair(True, change=lambda folder: None),
    "tokenizer's template, notes": Pair(True, change=other_words),
    "seed, shorter sequences": Pair(True, args=["--seed", "7", "--max-model-len", "2048"]),
    "one tensor of the weights": Pair(False, change=one_tensor),
    "load format dummy": Pair(False, args=["--load-format", "dummy"]),
    "dtype": Pair(False, args=["--dtype", "float32"]),
    "KV dtype": Pair(False, args=["--kv-cache-dtype", "fp8"]),
    "rope": Pair(False, args=["--hf-overrides", json.dumps(ROPE)]),
    "block size": Pair(False, args=["--block-size", "64"]),
    "rows of two blocks": Pair(False, settings={"blocks_per_row": 2}),
    "hash algorithm": Pair(False, args=["--prefix-caching-hash-algo", "sha256_cbor"]),
    "namespace": Pair(False, settings={"namespace": "mine"}),
    "LoRA enabled, not used": Pair(
        True, args=["--enable-lora", "--max-lora-rank", "8"], change=adapter
    ),
    "LoRA used": Pair(
        False, args=["--enable-lora", "--max-lora-rank", "8", "--lora-modules", "tuned=ADAPTER"],
        change=adapter, request={"model": "tuned"},
    ),
}  # fmt: skip


def test_equal_engines_share_and_different_ones_never(cluster: Cluster, model: Path, logs: Path):
    with Engine(
        model, connector=connector(cluster.server.endpoint, **PATIENT), args=ENGINE_ARGS,
        log=logs / "first.log",
    ) as first:  # fmt: skip
        first.when_ready()
        expected = first.ask(PROMPT)
        first.settle()
    wrong = []
    for number, (name, pair) in enumerate(PAIRS.items()):
        try:
            answer, tokens = second(pair, cluster, model, logs, f"pair-{number}")
        except StartFailed:
            shared, found = None, 0
        else:
            found = tokens["server"]
            shared = found > 0
            same = found == 640 // BLOCK * BLOCK and answer.agrees_with(expected)
        if shared != pair.shares or (shared and not same):
            wrong.append(name)
        verdict = {None: "no start"}.get(shared, "yes" if shared else "no")
        print(f"{name:30} shared: {verdict:8} {found} tokens from the server")
    assert wrong == []


def second(pair: Pair, cluster: Cluster, model: Path, logs: Path, name: str) -> tuple[Any, Any]:
    """What an engine of this pair answers, and where the prompt's tokens came from."""
    folder = model
    if pair.change is not None:
        folder = logs / name
        shutil.copytree(model, folder)
        pair.change(folder)
    args = [arg.replace("ADAPTER", str(folder / "adapter")) for arg in pair.args]
    settings = connector(cluster.server.endpoint, **PATIENT, **pair.settings)
    with Engine(
        folder, connector=settings, args=[*ENGINE_ARGS, *args],
        log=logs / f"{name}.log",
    ) as engine:  # fmt: skip
        engine.when_ready()
        return engine.ask_from(PROMPT, **pair.request)
