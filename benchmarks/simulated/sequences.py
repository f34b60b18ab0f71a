"""Requests inside the simulated engine, and its own prefix cache. No clock, no bytes."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from benchmarks.engine.driver import Request
from benchmarks.simulated.tiered_pool import Prompt

VOCABULARY = 32_000


def keys_of(tokens: Sequence[int], block_tokens: int) -> list[OffloadKey]:
    """A key for each whole block; it depends on all tokens up to the block's end, as in vLLM."""
    flat = np.asarray(tokens, np.int64)
    keys, before = [], b""
    for end in range(block_tokens, len(flat) + 1, block_tokens):
        before = hashlib.blake2b(
            before + flat[end - block_tokens : end].tobytes(), digest_size=32
        ).digest()
        keys.append(make_offload_key(before, 0))
    return keys


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The same prompt always has the same answer; a longer answer begins like a shorter one."""
    seed = hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(seed)).integers(0, VOCABULARY, num_tokens)
    return [int(token) for token in drawn]


@dataclass(eq=False)
class Running:
    """One request in the engine, from its arrival to its last token."""

    number: int
    request: Request
    block_tokens: int
    keep_answer: bool
    """Blocks of the answer are stored as well."""

    answer: list[int] = field(init=False)
    keys: list[OffloadKey] = field(init=False)
    """The keys of all blocks that may be stored."""

    prompt: Prompt | None = None
    """Set when the request was begun with the pool, if there is one."""

    loaded: bool = False
    """True once the cached part of its prompt is being loaded, or there is none."""

    computed: int = 0
    """Tokens whose KV cache the engine has, loaded ones included."""

    cached: dict[str, int] = field(default_factory=dict)
    generated: int = 0
    stored: int = 0
    """Blocks offered to the pool, or loaded from it."""

    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.answer = answer_to(self.request.prompt, self.request.max_tokens)
        tokens = [*self.request.prompt, *(self.answer[:-1] if self.keep_answer else [])]
        self.keys = keys_of(tokens, self.block_tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def findable(self) -> list[OffloadKey]:
        """Keys of the blocks that a cache may give; at least one token is always computed."""
        return self.keys[: (self.prompt_tokens - 1) // self.block_tokens]

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_tokens

    @property
    def done(self) -> bool:
        return self.generated >= self.request.max_tokens

    def compute(self, num_tokens: int) -> bool:
        """Count `num_tokens` computed tokens. True if this made a token of the answer."""
        self.computed += num_tokens
        if self.prefilling:
            return False
        self.generated += 1
        return True

    def to_store(self) -> list[OffloadKey]:
        """Keys of computed whole blocks not yet offered; marks them as offered."""
        ready = min(self.computed // self.block_tokens, len(self.keys))
        keys, self.stored = self.keys[self.stored : ready], max(self.stored, ready)
        return keys


class PrefixCache:
    """The engine's own prefix cache: keys of up to `capacity` blocks, evicted in LRU order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[OffloadKey, None] = OrderedDict()

    def find(self, keys: Sequence[OffloadKey]) -> int:
        """How many of `keys`, from the first, are here."""
        return sum(1 for _ in self._leading(keys))

    def _leading(self, keys: Sequence[OffloadKey]) -> Iterator[OffloadKey]:
        for key in keys:
            if key not in self._blocks:
                return
            yield key

    def keep(self, keys: Sequence[OffloadKey]) -> None:
        """Record these as used or computed; the first is then the last to be evicted."""
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
