"""Prompts that are cached to a known part, and the bytes that must move for them.

Only whole blocks are found, and at least one token of a prompt is always computed. So a prompt is
made one token longer than its blocks: then every level can give all of them, and a share of them
is exactly a number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.driver import DIRECTIONS, LEVELS, Request
from examples.tiny_model import prompt_tokens
from remote_server.errors import ConfigError

MOST_OFF = 0.02
"""A hit rate that blocks cannot express this closely is refused."""


def check_length(tokens: int, block_tokens: int) -> None:
    """Raises `ConfigError` where an engine hit and a pool hit would not be of the same length."""
    if tokens % block_tokens == 0:
        raise ConfigError(
            f"--input-len {tokens}: a multiple of the {block_tokens} tokens of a block, whose last "
            f"block the engine's own cache does not give; {tokens + 1} is sensible"
        )


def distinct(
    count: int, tokens: int, seed: int, max_tokens: int, at_s: float = 0.0
) -> list[Request]:
    """Prompts that share nothing, not even with those of another `seed`."""
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
        """The hit rate when the shared part is cached and nothing else."""
        return self.shared / self.tokens

    def requests(self, max_tokens: int) -> list[Request]:
        prefix = self._prefix()
        return [
            Request([*prefix, *request.prompt], max_tokens)
            for request in distinct(self.count, self.tokens - self.shared, self.seed, max_tokens)
        ]

    def first(self) -> list[Request]:
        """The request that has the shared part cached; none where nothing is shared."""
        if not self.shared:
            return []
        return [Request([*self._prefix(), 3 + self.seed % 500], 1)]

    def _prefix(self) -> list[int]:
        return prompt_tokens(self.shared, seed=self.seed * 1_000_003 + 999_983)


def share(rate: float, tokens: int, block_tokens: int) -> int:
    """Tokens of the blocks that are `rate` of a prompt. `ConfigError` if none are close enough."""
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
    """Where the tokens of a batch must come from, and the bytes that must move for it."""

    cached: dict[str, int]
    moved: dict[str, int]

    @classmethod
    def of(cls, cached: dict[str, int], block_tokens: int, block_bytes: int, new_tokens: int,
           *, pool: bool = True, server: bool = True) -> "Expected":  # fmt: skip
        """Of `cached` prompt tokens by level and `new_tokens` computed ones in whole blocks.

        What comes from the server passes the pool. What is computed goes to the pool and on to
        the server, where they exist.
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
        """Everything that was not as it must be, in words; empty when all of it was."""
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
