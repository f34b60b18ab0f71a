"""What is asked for: lookups, gets from one tier or both, touches."""

from collections import Counter
from collections.abc import Callable, Sequence

from remote_server.protocol import KeyState
from remote_server.store.answers import Found, KeyStates, Pinned
from remote_server.store.expiry import Expiry
from remote_server.store.slabs import Block
from remote_server.store.tier import Tier
from remote_server.store.waterfall import Waterfall

_READABLE = bytes([KeyState.READABLE])


class Gets:
    """What `Store` says of lookups, gets and touches."""

    def __init__(
        self, tier: Tier, waterfall: Waterfall | None, expiry: Expiry, counters: Counter[str]
    ) -> None:
        self._tier = tier
        self._waterfall = waterfall
        self._expiry = expiry
        self._counters = counters

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> KeyStates:
        self._expiry.expire(namespace, keys)
        states = self.states(namespace, keys)
        hits = states.count(KeyState.READABLE)
        prefix = len(states) - len(states.lstrip(_READABLE))
        self._counters["lookup_keys"] += len(keys)
        self._counters["lookup_hits"] += hits
        return KeyStates(states, prefix)

    def get(self, namespace: str, keys: Sequence[bytes]) -> Pinned:
        self._expiry.expire(namespace, keys)
        first = first_places(keys)
        # From the last key to the first, so that the head of a prefix is the most recently
        # used: without its head the rest of a prefix is worth nothing.
        pinned = self._tier.pin_all(namespace, [*reversed(first)])
        return self._found_in_memory(keys, first, pinned)

    def fetch(
        self, namespace: str, keys: Sequence[bytes], on_found: Callable[[Pinned], None]
    ) -> None:
        if self._waterfall is None:
            on_found(self.get(namespace, keys))
            return
        self._expiry.expire(namespace, keys)
        first = first_places(keys)

        def fetched(pinned: list[Block | None]) -> None:
            on_found(self._found(keys, first, pinned))

        self._waterfall.fetch(namespace, [*reversed(first)], fetched)

    def find(self, namespace: str, keys: Sequence[bytes]) -> Pinned | Found:
        if self._waterfall is None:
            return self.get(namespace, keys)
        self._expiry.expire(namespace, keys)
        first = first_places(keys)
        found = self._waterfall.find(namespace, [*reversed(first)])
        if True not in found:
            pinned = [block if isinstance(block, Block) else None for block in found]
            return self._found_in_memory(keys, first, pinned)
        found.reverse()
        places = [
            (index, key, block if isinstance(block, Block) else None)
            for (key, index), block in zip(first.items(), found, strict=True)
            if block
        ]
        miss, duplicate = len(first) - len(places), len(keys) - len(first)
        self._count_get(len(keys), len(places), miss, duplicate)
        indices, wanted, blocks = zip(*places, strict=True)
        return Found([*indices], [*wanted], [*blocks], miss, duplicate)

    def touch(self, namespace: str, keys: Sequence[bytes]) -> int:
        self._expiry.expire(namespace, keys)
        place = self._waterfall or self._tier
        return sum(place.touch(namespace, key) for key in reversed(first_places(keys)))

    def states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """Of each key the better of what the tiers say, a byte each."""
        return (self._waterfall or self._tier).lookup_all(namespace, keys)

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same for a put, which keeps what may still be found on disk after a start."""
        if self._waterfall is None:
            return self._tier.lookup_all(namespace, keys)
        return self._waterfall.known_states(namespace, keys)

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _found_in_memory(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        found = self._found(keys, first, pinned)
        self._counters["hits_memory"] += len(found.blocks)
        return found

    def _found(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        """`pinned` are those of `first`, from the last to the first."""
        pinned.reverse()
        blocks = [block for block in pinned if block is not None]
        indices = [*first.values()]
        if len(blocks) < len(pinned):
            indices = [
                index for index, block in zip(indices, pinned, strict=True) if block is not None
            ]
        found = Pinned(
            indices=indices,
            blocks=blocks,
            miss=len(first) - len(blocks),
            duplicate=len(keys) - len(first),
        )
        self._count_get(len(keys), len(blocks), found.miss, found.duplicate)
        return found

    def _count_get(self, total: int, hit: int, miss: int, duplicate: int) -> None:
        self._counters["get_total"] += total
        self._counters["get_hit"] += hit
        self._counters["get_miss"] += miss
        self._counters["get_duplicate"] += duplicate


def first_places(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Each distinct key and where it comes first, in the order asked."""
    places = dict(zip(keys, range(len(keys)), strict=True))
    if len(places) < len(keys):
        places = {}
        for index, key in enumerate(keys):
            places.setdefault(key, index)
    return places
