"""Shapes of the source document's models; only the size of a token matters."""

from typing import NamedTuple

from remote_server.errors import ConfigError
from remote_server.values import GiB, format_bytes

MAX_BLOCK_BYTES = 4 * GiB
"""The most bytes of one block: 16,384 tokens of the largest model here are 5 GiB."""


class Model(NamedTuple):
    """The numbers that determine a token's bytes of KV cache. Values have 16 bits."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int

    @property
    def bytes_per_token(self) -> int:
        """A key and a value for each KV head of each layer."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2

    @property
    def is_large(self) -> bool:
        """Whether it is large; large models get shorter documents, as in the source."""
        return self.hidden >= 8192 or self.layers >= 64


MODELS = {
    model.name: model
    for model in (
        Model("tiny-1b", 12, 1024, 8, 4),
        Model("mistral-7b", 32, 4096, 32, 8),
        Model("llama2-7b", 32, 4096, 32, 32),
        Model("llama3.1-8b", 32, 4096, 32, 8),
        Model("llama3.1-70b-instruct", 80, 8192, 64, 8),
        Model("tinyllama-1.1b", 22, 2048, 32, 4),
    )
}


class BlockShape(NamedTuple):
    """The division of tokens into blocks of the store."""

    tokens: int
    """Tokens of a full block."""

    bytes_per_token: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a full block: the namespace's `block_bytes`."""
        return self.tokens * self.bytes_per_token

    def lengths(self, tokens: int) -> list[int]:
        """Bytes of each block of `tokens` tokens: all are full but the last."""
        full, rest = divmod(tokens, self.tokens)
        return [self.num_bytes] * full + ([rest * self.bytes_per_token] if rest else [])


def shape_of(model: Model, block_tokens: int, bytes_scale: float) -> BlockShape:
    """Raises `ConfigError` when `bytes_scale` reduces a token to nothing, or when blocks are too
    large for any store."""
    scaled = round(model.bytes_per_token * bytes_scale)
    if scaled < 1:
        raise ConfigError(
            f"bytes_scale: {bytes_scale} leaves nothing of the {model.bytes_per_token} bytes that "
            f"a token of {model.name} has"
        )
    shape = BlockShape(block_tokens, scaled)
    if shape.num_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"block_tokens: {block_tokens} of {format_bytes(scaled)} are blocks of "
            f"{format_bytes(shape.num_bytes)}; the most is {format_bytes(MAX_BLOCK_BYTES)}"
        )
    return shape
