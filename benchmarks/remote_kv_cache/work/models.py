"""Shapes of the source document's five models; only the size of their blocks matters."""

from collections.abc import Sequence
from typing import NamedTuple


class Model(NamedTuple):
    """The numbers that determine a token's bytes of KV cache."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_number: int = 2

    @property
    def bytes_per_token(self) -> int:
        """A key and a value for each head of each layer."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.bytes_per_number

    def block_bytes(self, block_size: int = 16) -> int:
        """One block of `block_size` tokens: all layers, in one piece."""
        return self.bytes_per_token * block_size

    def page_bytes(self, block_size: int = 16) -> int:
        """One layer's part of a block."""
        return self.block_bytes(block_size) // self.layers


MODELS = (
    Model("Qwen2.5-32B-Instruct", layers=64, kv_heads=8, head_dim=128),
    Model("Qwen2.5-7B-Instruct", layers=28, kv_heads=4, head_dim=128),
    Model("Qwen2.5-3B-Instruct", layers=36, kv_heads=2, head_dim=128),
    Model("glm-4-9b-chat-1m", layers=40, kv_heads=4, head_dim=128),
    Model("Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128),
)

TINY = Model("tiny", layers=2, kv_heads=2, head_dim=64)
"""16 KiB a block, 8 MiB in all: proves that a benchmark runs; its speed has no meaning."""


def choose(names: str) -> list[Model]:
    """Models by comma-separated parts of their names, as in `3B,7B`. Empty chooses the five.

    Raises `ValueError`, with the known names, when a part matches none or several.
    """
    if not names.strip():
        return list(MODELS)
    return [_find(part.strip(), (*MODELS, TINY)) for part in names.split(",")]


def _find(part: str, models: Sequence[Model]) -> Model:
    found = [model for model in models if part and part.lower() in model.name.lower()]
    if len(found) != 1:
        there = ", ".join(model.name for model in models)
        problem = "names several" if found else "is no part of a model's name"
        raise ValueError(f"{part!r} {problem}: {there}")
    return found[0]
