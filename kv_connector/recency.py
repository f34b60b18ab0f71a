"""Recency on the server for blocks that are used above it.

A prompt that always hits in the engine's cache or in the CPU pool is never read from the server,
and would be the first that the server evicts. vLLM reports no such use to its tiers. So the
connector reports every prefix that a request reuses, and this module turns those reports into a
few touches: a key at most once in `REST_S`, and one request to the server in `BATCH_S`. The
scheduler thread alone uses it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from remote_server.protocol import KeyState

# A server whose blocks are evicted sooner than this after their last use holds no cache.
REST_S = 5.0

BATCH_S = 0.5

# The prefixes of two prompts of 131,072 tokens. A touch costs the server about a microsecond a
# key, so an engine takes at most 2 % of a server's loop. What is beyond it waits for its next use.
MOST_KEYS_OF_A_BATCH = 8192

# About 10 MB.
MOST_REMEMBERED = 65_536


class Recency:
    """Prefixes that were reused above the server, and when their keys were last touched there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._touched_s: dict[bytes, float] = {}
        """In the order of time: a key that is touched again goes to the end."""
        self._batch: list[bytes] = []
        self._next_batch_s = float("-inf")

    def used(
        self, keys: Sequence[bytes], states: Mapping[bytes, object] = MappingProxyType({})
    ) -> None:
        """A request reuses the blocks of `keys`, in prefix order. Those that `states` has as
        READABLE come from the server, which knows it.

        Costs nothing for a prefix that was touched lately: it is found by its last key.
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
        """The keys to touch now, each once, in prefix order; none while it is too early."""
        now_s = self._clock()
        if not self._batch or now_s < self._next_batch_s:
            return []
        self._next_batch_s = now_s + BATCH_S
        batch, self._batch = self._batch, []
        return batch

    def forget(self) -> None:
        """The keys belong to another namespace from now on."""
        self._touched_s, self._batch = {}, []
