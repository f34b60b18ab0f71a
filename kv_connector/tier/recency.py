"""Recency on the server of blocks that an engine uses from its own levels.

A prompt that always hits in the engine's cache or in the CPU pool is never read from the server,
which would evict it first. vLLM reports no such use to its tiers. The connector records every
prefix that a request reuses, and `Recency` batches the keys into touches: a key at most once in
`REST_S`, and one request to the server in `BATCH_S`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from remote_server.protocol import KeyState

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
    """Keys of reused prefixes, and the times at which they were last touched on the server.

    Only the scheduler thread uses it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._touched_s: dict[bytes, float] = {}
        """In order of time: a key that is touched again moves to the end."""
        self._batch: list[bytes] = []
        self._next_batch_s = float("-inf")

    def used(
        self, keys: Sequence[bytes], states: Mapping[bytes, object] = MappingProxyType({})
    ) -> None:
        """A request reuses the blocks of `keys`, in prefix order. Those that are READABLE in
        `states` are read from the server, which updates their recency itself.

        A recently touched prefix is found by its last key, at no further cost.
        """
        now_s = self._clock()
        touched_s, state_of, readable = self._touched_s.get, states.get, KeyState.READABLE
        rested_s, first = now_s - REST_S, len(keys)
        while first and touched_s(keys[first - 1], float("-inf")) <= rested_s:
            first -= 1
        used = keys[first:]
        unread = [key for key in used if state_of(key) is not readable]
        room = MOST_KEYS_OF_A_BATCH - len(self._batch)
        if len(unread) > room:
            used = used[: used.index(unread[room])]
            del unread[room:]
        self._batch += unread
        if not self._touched_s.keys().isdisjoint(used):
            for key in used:
                self._touched_s.pop(key, None)
        self._touched_s.update(dict.fromkeys(used, now_s))
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
