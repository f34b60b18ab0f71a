"""Reads ahead of gets, from tiers across a network."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from remote_server.store.memory.slabs import Block
from remote_server.store.stack.fetches import Fetches, Purpose
from remote_server.store.stack.tier_stack import TierStack

SHARE_AHEAD = 4
"""The largest part of memory into which blocks are read ahead at one time."""

BYTES_AHEAD = 8 << 20
"""Read ahead together, and pinned until all of them have come."""

MAX_WAITING = 16_384
"""Keys that wait until others have been read ahead; those that came first are dropped."""


class Part(NamedTuple):
    """Blocks that follow each other in one prompt."""

    namespace: str
    keys: Sequence[bytes]
    block_bytes: int
    deadline: float


class ReadAhead:
    """Reads of the blocks that clients request next, from tiers across a network. One thread.

    A client requests a few MiB at a time. What it requests next is not seen here in time to keep
    many reads of such a tier under way, so its gets name the keys that follow.
    """

    def __init__(
        self, tier_stack: TierStack, fetches: Fetches, block_bytes_of: Callable[[str], int]
    ) -> None:
        """`block_bytes_of` returns the block size of a namespace with blocks."""
        self._tier_stack = tier_stack
        self._fetches = fetches
        self._block_bytes_of = block_bytes_of
        budget = tier_stack.memory.stats().budget_bytes
        self.most_bytes = 0
        """What a client should name ahead of its requests; 0 when no tier gains by it."""
        if any(tier.is_remote for tier in tier_stack.tiers):
            self.most_bytes = min(tier_stack.window_bytes, budget // SHARE_AHEAD)
        self._room = budget // SHARE_AHEAD
        self._waiting: deque[Part] = deque()
        self._num_waiting = 0
        self._is_going_on = False

    def want(self, namespace: str, keys: Sequence[bytes], deadline: float) -> None:
        """Read those of `keys` into memory that a tier across a network has, and none above it."""
        there = self._tier_stack.remote(namespace, keys)
        if not there:
            return
        self._waiting.append(Part(namespace, there, self._block_bytes_of(namespace), deadline))
        self._num_waiting += len(there)
        while self._num_waiting > MAX_WAITING:
            self._num_waiting -= len(self._waiting.popleft().keys)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_going_on:  # a block that is here already: the loop below goes on by itself
            return
        self._is_going_on = True
        while self._waiting and self._room > 0:
            self._read(self._waiting.popleft())
        self._is_going_on = False

    def _read(self, part: Part) -> None:
        """Begin with the first blocks of `part`; the others wait for their turn."""
        num = max(1, min(self._room, BYTES_AHEAD) // part.block_bytes)
        if part.deadline <= self._tier_stack.clock():
            num = len(part.keys)
        keys, rest = part.keys[:num], part.keys[num:]
        self._num_waiting -= len(keys)
        if rest:
            self._waiting.appendleft(part._replace(keys=rest))
        if part.deadline > self._tier_stack.clock():
            num_bytes = len(keys) * part.block_bytes
            self._room -= num_bytes
            self._fetches.fetch(
                part.namespace, keys, partial(self._came, num_bytes), final=False,
                purpose=Purpose.AHEAD, deadline=part.deadline,
            )  # fmt: skip

    def _came(self, num_bytes: int, blocks: list[Block | None]) -> None:
        self._tier_stack.memory.unpin_all([block for block in blocks if block is not None])
        self._room += num_bytes
        self._go_on()
