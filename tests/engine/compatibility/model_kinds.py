"""Kinds of models and of requests for `make matrix`, and how an engine starts for each."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import asking
import model_builders as build
from adapter import build_adapter
from asking import Ask, EmbeddingEngine
from cluster import ENGINE_BLOCKS, QuickEngine
from hybrid_model import build_hybrid

from examples.tiny_model import PRESETS, prompt_tokens
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS

PROMPT_TOKENS = 2 * MAX_PACK_TOKENS + 100

Build = Callable[[Path, Path], Path]
"""Makes a model at a path, with the tokenizer of the small model at the other."""

ALONE = "one worker"

ALIGNED = ("--mamba-cache-mode", "align")


def lacks(kind: "Kind") -> str:
    """What this host lacks for the kind; empty: nothing."""
    if kind.needs_amx and " amx_tile" not in Path("/proc/cpuinfo").read_text():
        return "this CPU has no AMX"
    return ""


def _speculative(**fields: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"num_speculative_tokens": 3, **fields})


class Kind(NamedTuple):
    """One kind of model, how an engine starts with it, and what it is asked."""

    about: str
    build: Build | None = None
    """None for the small model itself."""

    args: tuple[str, ...] = ()
    """{folder} is the folder above the model's."""

    ask: Ask = asking.tokens(prompt_tokens(PROMPT_TOKENS, seed=5000))
    engine: type[QuickEngine] = QuickEngine

    is_model: bool = True
    """Whether it is also tried with several workers. Else it is a way to use the dense model."""

    windows: bool = False
    """Whether groups keep windows, or states, in rows of the same size as full attention's. A pack
    ends where vLLM keeps one, which takes a setting."""

    absent: Mapping[str, str] = {}
    """Levels from which nothing comes, by design, and why."""

    needs_amx: bool = False
    """Whether vLLM has it on a CPU with AMX alone: without, kvferry refuses it."""

    vllm_cannot: tuple[str, ...] = ()
    """Numbers of workers with which vLLM itself does not run it on a CPU."""


def _with_adapter(path: Path, small: Path) -> Path:
    build_adapter(path.parent / "adapter", seed=3)
    return small


_LORA_STAYS = "an adapter's name does not identify its weights on another host"
_STAYS = dict.fromkeys(("server", "disk", "bucket"), _LORA_STAYS)

KINDS = {
    "dense": Kind("full attention, grouped queries"),
    "sliding window": Kind(
        "two of three layers see 128 tokens (Gemma 3)", build_hybrid, windows=True
    ),
    "chunked local": Kind(
        "three of four layers see chunks of 64 tokens (Llama 4)", build.build_chunked,
        ("--num-gpu-blocks-override", str(3 * ENGINE_BLOCKS)),
    ),
    "attention sinks": Kind(
        "sinks, windows and experts (gpt-oss)", build.build_sinks, windows=True,
        vllm_cannot=("DP 2",),
    ),
    "MLA": Kind(
        "one latent a token (DeepSeek V2); on a CPU it needs AMX", build.build_latent,
        needs_amx=True,
    ),
    "gated delta": Kind(
        "recurrent states beside attention (Qwen3-Next)", build.build_gated_delta, ALIGNED,
        vllm_cannot=("PP 2", "DP 2"),
    ),
    "state space hybrid": Kind(
        "recurrent states and attention in each layer (Falcon-H1)",
        build.build_state_space_hybrid, ALIGNED, vllm_cannot=(ALONE,),
    ),
    "state space": Kind(
        "recurrent states alone (Mamba 2)", build.build_state_space,
        (*ALIGNED, "--enable-prefix-caching", "--mamba-block-size", "256"), vllm_cannot=(ALONE,),
    ),
    "short convolution": Kind(
        "small states beside attention (LFM2)", build.build_convolution, ALIGNED,
        windows=True,
    ),
    "fp8 KV cache": Kind(
        "keys and values of 8 bits", None, ("--kv-cache-dtype", "fp8"), is_model=False
    ),
    "two images": Kind(
        "a vision tower before the language model (LLaVA), in a chat", build.build_images,
        ("--limit-mm-per-prompt", '{"image": 2}'), asking.two_images(700), is_model=False,
    ),
    "LoRA": Kind(
        "an adapter of the engine's start", _with_adapter,
        ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "mine={folder}/adapter"),
        asking.tokens(prompt_tokens(PROMPT_TOKENS, seed=5000), model="mine"),
        is_model=False, absent=_STAYS,
    ),
    "drafts by n-grams": Kind(
        "speculative decoding without a draft model", None,
        _speculative(method="ngram", prompt_lookup_max=4), is_model=False,
    ),
    "drafts by EAGLE": Kind(
        "a draft head with KV cache of its own", build.build_with_eagle,
        _speculative(method="eagle", model="{folder}/draft"), is_model=False,
    ),
    "drafts by MTP": Kind(
        "a layer of the model that drafts (GLM 4.5)", build.build_with_mtp,
        _speculative(method="mtp", num_speculative_tokens=1), is_model=False,
    ),
    "pooling": Kind(
        "vectors of prompts, in place of answers", None,
        ("--runner", "pooling", "--convert", "embed", "--pooler-config",
         '{"seq_pooling_type": "LAST"}', "--enable-prefix-caching"),
        engine=EmbeddingEngine, is_model=False,
    ),
    "embeddings as prompts": Kind(
        "without tokens", None, ("--enable-prompt-embeds",),
        asking.embeddings(PROMPT_TOKENS, PRESETS["small"].hidden_size), is_model=False,
    ),
    "encoder and decoder": Kind(
        "attention to what an encoder made (Whisper)", build.build_encoder_decoder,
        ("--max-model-len", "448", "--max-num-batched-tokens", "2048"), is_model=False,
        vllm_cannot=(ALONE,),
    ),
}  # fmt: skip
