"""Prefetch: blocks read into memory before a client gets them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from remote_server.protocol import KeyState
from remote_server.sizes import MiB
from remote_server.store.expiry import Expiry
from remote_server.store.slabs import Block
from remote_server.store.tier_stack import TierStack
from remote_server.turns import KEYS_PER_STEP

# Bytes of one prefetch that are read at a time: gets share the tiers with it.
WINDOW_BYTES = 16 * MiB

# One prefetch fills at most half of the memory: more would evict its own beginning.
SHARE_OF_MEMORY = 2


class Prefetched(NamedTuple):
    """The fate of the distinct keys of a prefetch. The counts add up to all of them."""

    in_memory: int = 0
    """Were in memory before."""
    read: int = 0
    """Were read from a tier below."""
    absent: int = 0
    """Are in no tier, or were lost while they were read."""
    no_room: int = 0
    """Were not read: memory is full of pinned blocks, or the keys before them fill half of it."""
    coming: int = 0
    """Are not processed yet, or are being read."""


class Prefetch:
    """One request to read `keys` into memory. One thread calls it.

    The keys are a prefix, the first one first. They are read from the last to the first, as gets
    pin them, so that the head is the most recently used. Nothing stays pinned.
    """

    def __init__(
        self,
        tier_stack: TierStack,
        block_bytes: int,
        expiry: Expiry,
        namespace: str,
        keys: Sequence[bytes],
        go_on_later: Callable[[Callable[[], None]], object],
        on_end: Callable[[Prefetched], None],
    ) -> None:
        """`block_bytes` is that of the namespace. `go_on_later` has the loop call a function in
        another turn; `on_end` is called once."""
        self._memory = tier_stack.memory
        self._tier_stack = tier_stack
        self._block_bytes = block_bytes
        self._expiry = expiry
        self._namespace = namespace
        self._left = [*dict.fromkeys(keys)]
        most = len(self._left)
        if tier_stack.below:
            share = self._memory.stats().budget_bytes // SHARE_OF_MEMORY
            most = min(most, share // block_bytes)
        self._done = Prefetched(no_room=len(self._left) - most)
        del self._left[most:]
        self._go_on_later = go_on_later
        self._on_end = on_end
        self._num_reading = 0

    @property
    def so_far(self) -> Prefetched:
        return self._done._replace(coming=len(self._left) + self._num_reading)

    def go_on(self) -> None:
        """Process one part of the keys. The next part follows when this part's reads have ended, or
        in another turn."""
        if not self._left:
            self._on_end(self.so_far)
            return
        part = self._take_part()
        self._expiry.expire(self._namespace, part)
        states = self._memory.lookup_all(self._namespace, part)
        missing = [key for key, state in zip(part, states, strict=True)
                 if state != KeyState.READABLE]  # fmt: skip
        self._count(in_memory=len(part) - len(missing))
        below = self._readable(missing)
        self._count(absent=len(missing) - len(below))
        if below:
            self._read(below)
        else:
            self._go_on_later(self.go_on)

    def _take_part(self) -> list[bytes]:
        size = KEYS_PER_STEP
        if self._tier_stack.below:
            size = max(1, min(size, WINDOW_BYTES // self._block_bytes))
        part, self._left = self._left[-size:], self._left[:-size]
        part.reverse()
        return part

    def _readable(self, keys: Sequence[bytes]) -> list[bytes]:
        states = self._tier_stack.lookup_all(self._namespace, keys)
        return [key for key, state in zip(keys, states, strict=True)
                if state == KeyState.READABLE]  # fmt: skip

    def _read(self, keys: list[bytes]) -> None:
        self._num_reading = len(keys)

        def came(blocks: list[Block | None]) -> None:
            self._memory.unpin_all([block for block in blocks if block is not None])
            # In a turn of its own, so that an exception there ends the prefetch.
            self._go_on_later(partial(self._count_read, keys, blocks))

        self._tier_stack.fetch(self._namespace, keys, came, final=False, for_get=False)

    def _count_read(self, keys: list[bytes], blocks: list[Block | None]) -> None:
        self._num_reading = 0
        not_here = [key for key, block in zip(keys, blocks, strict=True) if block is None]
        no_room = len(self._readable(not_here))
        self._count(read=len(keys) - len(not_here), no_room=no_room, absent=len(not_here) - no_room)
        self.go_on()

    def _count(self, **more: int) -> None:
        old = self._done._asdict()
        self._done = self._done._replace(**{name: old[name] + n for name, n in more.items()})
