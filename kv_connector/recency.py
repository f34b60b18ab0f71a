"""Recency on the server for blocks that are used above it.

A prompt that always hits in the engine's cache or in the CPU pool is never read from the server,
which would evict it first. vLLM reports no such use to its tiers. The connector records every
prefix that a request reuses, and this module batches the keys into touches: a key at most once in
`REST_S`, and one request to the server in `BATCH_S`. Only the scheduler thread uses it.
"""

from collections.abc import Callable, Sequence
from itertools import islice

# Least time between touches of a key. A server that evicts blocks sooner after their last use is
# too small to be a cache.
REST_S = 5.0

BATCH_S = 0.5

# The prefixes of two prompts of 131,072 tokens. A touch costs the server about 1 µs a key, so an
# engine uses at most 2 % of a server's loop. Further keys are touched at their next use.
MOST_KEYS_OF_A_BATCH = 8192

# About 10 MB.
MOST_REMEMBERED = 65_536


class Recency:
    """Keys of reused prefixes, and the times at which they were last touched on the server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._touched_s: dict[bytes, float] = {}
        """In order of time: a key that is touched again moves to the end."""
        self._batch: list[bytes] = []
        self._next_batch_s = float("-inf")

    def used(
        self, keys: Sequence[bytes], *, read: Callable[[bytes], bool] = lambda _: False
    ) -> None:
        """A request reuses the blocks of `keys`, in prefix order. Those for which `read` is true
        are read from the server, which updates their recency itself.

        A recently touched prefix is found by its last key, at no further cost.
        """
        now_s = self._clock()
        first = len(keys)
        while first and self._touched_s.get(keys[first - 1], float("-inf")) + REST_S <= now_s:
            first -= 1
        for key in islice(keys, first, len(keys)):
            if len(self._batch) >= MOST_KEYS_OF_A_BATCH:
                break
            self._touched_s.pop(key, None)
            self._touched_s[key] = now_s
            if not read(key):
                self._batch.append(key)
        for key in list(islice(self._touched_s, max(0, len(self._touched_s) - MOST_REMEMBERED))):
            del self._touched_s[key]

    def take_batch(self) -> list[bytes]:
        """The keys to touch now, each once, in prefix order; empty until `BATCH_S` has passed."""
        now_s = self._clock()
        if not self._batch or now_s < self._next_batch_s:
            return []
        self._next_batch_s = now_s + BATCH_S
        batch, self._batch = self._batch, []
        return batch

    def forget(self) -> None:
        """Drop all keys: the namespace has changed."""
        self._touched_s, self._batch = {}, []
