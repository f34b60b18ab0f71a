"""Prompts of which a known part is cached, and the bytes that must move for them.

A cache gives only whole blocks, and at least one token of a prompt is always computed. So a prompt
is one token longer than its blocks: then every level can give all of them, and a share of them is
exactly a number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.driver import DIRECTIONS, LEVELS, Request
from examples.tiny_model import prompt_tokens
from remote_server.errors import ConfigError

MOST_OFF = 0.02
"""The tolerance of a hit rate; a rate that whole blocks cannot express within it is refused."""


def check_length(tokens: int, block_tokens: int) -> None:
    """Raises `ConfigError` when an engine hit and a pool hit would differ in length."""
    if tokens % block_tokens == 0:
        raise ConfigError(
            f"--input-len {tokens}: a multiple of the {block_tokens} tokens of a block, whose last "
            f"block the engine's own cache does not give; {tokens + 1} is sensible"
        )


def distinct(
    count: int, tokens: int, seed: int, max_tokens: int, at_s: float = 0.0
) -> list[Request]:
    """Prompts that share no prefix, also not with those of another `seed`."""
    return [
        Request(prompt_tokens(tokens, seed=seed * 1_000_003 + number), max_tokens, at_s)
        for number in range(count)
    ]


@dataclass(frozen=True)
class SharedPrefix:
    """`count` prompts of `tokens` tokens that begin with the same `shared` tokens."""

    count: int
    tokens: int
    shared: int
    seed: int

    @property
    def rate(self) -> float:
        """The hit rate when only the shared part is cached."""
        return self.shared / self.tokens

    def requests(self, max_tokens: int) -> list[Request]:
        prefix = self._prefix()
        return [
            Request([*prefix, *request.prompt], max_tokens)
            for request in distinct(self.count, self.tokens - self.shared, self.seed, max_tokens)
        ]

    def first(self) -> list[Request]:
        """The request that brings the shared part into the cache; none when nothing is shared."""
        if not self.shared:
            return []
        return [Request([*self._prefix(), 3 + self.seed % 500], 1)]

    def _prefix(self) -> list[int]:
        return prompt_tokens(self.shared, seed=self.seed * 1_000_003 + 999_983)


def share(rate: float, tokens: int, block_tokens: int) -> int:
    """Tokens of the blocks that are `rate` of a prompt. Raises `ConfigError` if none is close."""
    check_length(tokens, block_tokens)
    blocks = tokens // block_tokens
    shared = round(rate * blocks) * block_tokens
    if abs(shared / tokens - rate) > MOST_OFF:
        good = 10 * block_tokens
        raise ConfigError(
            f"--input-len {tokens}: blocks of {block_tokens} tokens cannot make a hit rate of "
            f"{rate:.0%} of it, the nearest is {shared / tokens:.1%}; a multiple of {good} and "
            f"one more expresses every tenth: {max(good, round(tokens / good) * good) + 1}"
        )
    return shared


@dataclass(frozen=True)
class Expected:
    """The expected origin of a batch's tokens, and the bytes that must move for it."""

    cached: dict[str, int]
    moved: dict[str, int]

    @classmethod
    def of(cls, cached: dict[str, int], block_tokens: int, block_bytes: int, new_tokens: int,
           *, pool: bool = True, server: bool = True) -> "Expected":  # fmt: skip
        """For `cached` prompt tokens by level and `new_tokens` computed ones in whole blocks.

        Blocks from the server pass through the pool. Computed blocks go to the pool and on to the
        server, where these exist.
        """
        by_level = {level: cached.get(level, 0) for level in LEVELS}
        blocks = {level: tokens // block_tokens for level, tokens in by_level.items()}
        new = new_tokens // block_tokens * block_bytes
        moved = {
            "engine_to_pool": new if pool else 0,
            "pool_to_engine": (blocks["pool"] + blocks["server"]) * block_bytes,
            "pool_to_server": new if pool and server else 0,
            "server_to_pool": blocks["server"] * block_bytes,
        }
        return cls(by_level, moved)

    def differences(self, cached: dict[str, int], moved: dict[str, int]) -> list[str]:
        """Every difference from the expected values, in words; empty without one."""
        found = [
            f"{cached[level]:,} of {self.cached[level]:,} prompt tokens came from the {level}"
            for level in LEVELS
            if cached[level] != self.cached[level]
        ]
        return found + [
            f"{moved[way]:,} of {self.moved[way]:,} bytes went {way.replace('_', ' ')}"
            for way in DIRECTIONS
            if moved[way] != self.moved[way]
        ]


def whole_blocks(requests: Sequence[Request], block_tokens: int) -> int:
    """Tokens of the whole blocks of these prompts together."""
    return sum(len(request.prompt) // block_tokens * block_tokens for request in requests)


def keys_of(prompt: Sequence[int], block_tokens: int) -> list[bytes]:
    """The keys under which an engine with default settings stores this prompt's whole blocks."""
    from vllm.utils.hashing import sha256  # imports torch, which takes seconds
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import make_offload_key

    kv_cache_utils.init_none_hash(sha256)
    keys: list[bytes] = []
    parent: Any = None
    for start in range(0, len(prompt) // block_tokens * block_tokens, block_tokens):
        block = tuple(prompt[start : start + block_tokens])
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, block, None)
        keys.append(bytes(make_offload_key(parent, 0)))
    return keys
