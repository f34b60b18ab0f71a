"""Calls of an engine on small blocks: a lookup, a put, a get, each of one prompt, one at a time.

Each prompt's keys have the chain fields that an engine's connector sends. All prompts of one length
have the same bytes, which are compared after the calls.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    chain_of,
    connect,
    key_of,
)
from remote_server.protocol import Stretch

Prompt = Sequence[bytes]
"""The keys of its blocks."""


def prompts(first: int, number: int, num_keys: int) -> list[Prompt]:
    """So many prompts of `num_keys` keys, which begin at the key number `first`."""
    return [
        [key_of(first + prompt * num_keys + place) for place in range(num_keys)]
        for prompt in range(number)
    ]


class Calls:
    """A client of its own, until `stack` ends. Every call raises unless it did all of its work."""

    def __init__(
        self, stack: ExitStack, endpoint: str, namespace: str, transport: str,
        num_blocks: int, block_bytes: int,
    ) -> None:  # fmt: skip
        """For prompts of at most `num_blocks` blocks. Raises `Skipped` without the transport."""
        source, target = blocks.filled_pools(stack, num_blocks, block_bytes)
        self._client = connect(
            endpoint, namespace, block_bytes, transport=transport, rows=(source, target)
        )
        stack.callback(self._client.close)
        self._namespace = namespace
        self._source, self._target = source, target

    def look_up(self, prompt: Prompt, *, found: bool) -> None:
        """All keys have a block, or none."""
        reply = self._client.lookup(
            self._namespace, prompt, timeout_s=PATIENCE_S, chain=_chain(prompt)
        )
        prefix = reply.result().prefix
        if prefix != (len(prompt) if found else 0):
            raise AssertionError(f"{prefix} of {len(prompt)} keys found")

    def put(self, prompt: Prompt) -> None:
        """Blocks that the server does not have, until its reply."""
        if (created := self._put(prompt)) != len(prompt):
            raise AssertionError(f"{created} of {len(prompt)} blocks created")

    def keep(self, prompt: Prompt) -> None:
        """Put those blocks that the server does not have."""
        self._put(prompt)

    def _put(self, prompt: Prompt) -> int:
        rows = [memoryview(row) for row in self._source.pool[: len(prompt)]]
        put = self._client.put(
            self._namespace, prompt, rows, deferred=False, timeout_s=PATIENCE_S,
            chain=_chain(prompt),
        )  # fmt: skip
        result = put.result()
        if result.error is not None:
            raise result.error
        return result.created

    def get(self, prompt: Prompt) -> None:
        rows = [memoryview(row) for row in self._target.pool[: len(prompt)]]
        got = self._client.get(
            self._namespace, prompt, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
        ).result()
        if len(got.landed) != len(prompt):
            raise AssertionError(f"not all blocks came: {got.outcomes}, {got.error}")

    def poison(self) -> None:
        """Before gets: only they can make the bytes right that `verify` compares."""
        blocks.poison(self._target.pool)

    def verify(self, num_blocks: int) -> None:
        """The last get's blocks have the bytes of their put."""
        places = np.arange(num_blocks)
        blocks.verify(self._source.pool, self._target.pool, blocks.Batch(places, places))


def _chain(prompt: Prompt) -> list[Stretch]:
    return chain_of(prompt, blocks.BLOCK_SIZE)
