"""A generated Qwen2-style model, for machines without access to a model hub.

    python -m examples.tiny_model --preset wide /tmp/wide-model

The weights are random and its output is gibberish, but `vllm serve` treats it as any other model.
Two presets: `small` starts fast and serves the tests; `wide` needs seconds for a prompt of some
thousand tokens, so that a saved prefill is visible.
"""

import argparse
import json
import os
import random
import shutil
import string
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2


@dataclass(frozen=True)
class Preset:
    """The shape of a model. All other properties are equal for all presets."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    max_position: int = 8192
    seed: int = 0
    # With transformers' default of 0.02 such a model repeats one token for any KV cache, and a
    # test that compares outputs proves nothing. With 0.08 the output changes when a few blocks of
    # the prompt do.
    initializer_range: float = 0.08

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * (self.hidden_size // self.heads) * 2


PRESETS = {
    "small": Preset(hidden_size=256, layers=6, heads=4, kv_heads=2),
    "wide": Preset(hidden_size=768, layers=12, heads=12, kv_heads=4),
}


def prompt_tokens(count: int, seed: int = 0) -> list[int]:
    """`count` ordinary token ids, equal for equal seeds on every machine.

    A shorter prompt of the same seed is a prefix of a longer one.
    """
    ordinary = range(len(SPECIAL_TOKENS), VOCABULARY)
    return random.Random(seed).choices(ordinary, k=count)


def build(path: Path, preset: str = "small") -> Path:
    """Make the model at `path`, and return its absolute path. One of the same recipe is kept.

    It appears under its name only when complete: an interrupted build is never taken for a model,
    and of two parallel builds one succeeds and the other uses its result.
    """
    path = Path(path).resolve()  # engines run in another folder
    recipe = json.dumps({"format": 1, "vocabulary": VOCABULARY, **asdict(PRESETS[preset])})
    if _made_by(path) == recipe:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write_tokenizer(unfinished, PRESETS[preset])
        _write_model(unfinished, PRESETS[preset])
        (unfinished / "recipe.json").write_text(recipe)
        unfinished.chmod(0o755)  # mkdtemp makes it private
        if (
            _made_by(path) is not None
        ):  # an older recipe; a foreign directory is kept, and the rename fails
            shutil.rmtree(path)
        os.rename(unfinished, path)
    except OSError:
        if _made_by(path) != recipe:
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def _made_by(path: Path) -> str | None:
    try:
        return (path / "recipe.json").read_text()
    except OSError:
        return None


# The minimum for /v1/chat/completions.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write_tokenizer(directory: Path, preset: Preset) -> None:
    """Byte-level BPE: every byte is a token, so any text works; the rest are merges of letters."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _sentences(), vocab_size=VOCABULARY, min_frequency=1, special_tokens=SPECIAL_TOKENS
    )
    assert tokenizer.get_vocab_size() == VOCABULARY, "too little text to fill the vocabulary"
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": preset.max_position,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _sentences() -> list[str]:
    """Made-up text with enough different pairs of letters for the merges, equal in every run."""
    pick = random.Random(0)
    words = [
        "".join(pick.choices(string.ascii_lowercase, k=pick.randint(2, 7))) for _ in range(300)
    ]
    return [" ".join(pick.choices(words, k=12)).capitalize() + "." for _ in range(200)]


def _write_model(directory: Path, preset: Preset) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.hidden_size * 4,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        max_position_embeddings=preset.max_position,
        initializer_range=preset.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(preset.seed)
    weights = Qwen2ForCausalLM(config).to(torch.bfloat16).state_dict()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    # vLLM takes its sampling defaults from here: a plain request is greedy.
    _write_json(directory / "generation_config.json", {"temperature": 0.0, "eos_token_id": 0})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("path", type=Path, help="the directory to put the model into")
    options = parser.parse_args()
    path = build(options.path, options.preset)
    kib = PRESETS[options.preset].kv_bytes_per_token / 1024
    print(f"{path}: {options.preset}, {kib:g} KiB of KV cache per token")


if __name__ == "__main__":
    main()
