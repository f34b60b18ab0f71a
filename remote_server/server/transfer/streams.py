"""The blocks of streamed gets, batch by batch.

Of those that must be read, a window is read from the tiers below memory ahead of sending. The first
blocks are sent while later ones are read, and a get may be larger than memory.

A client that stops reading keeps a window, and as much in messages: then nothing more is read for
it, but a part of each get whose way is clear. A client may read its lanes in any order."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple, Protocol

from remote_server.server.sending.outgoing import Take
from remote_server.store.gets import Found, Pinned
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.fetches import Fetches
from remote_server.store.stack.tier_stack import TierStack

# The largest part of memory for one window, 1/8, so that several streams fit.
SHARE_OF_MEMORY = 8

# The window is read in so many parts: the first are sent while others are read.
PARTS = 4


class Batch(NamedTuple):
    """The blocks of one message of a streamed get, pinned for it."""

    indices: list[int]
    blocks: list[Block]
    more: bool


class Way(Protocol):
    """The way of a get's messages to its client."""

    def unread_bytes(self) -> int:
        """Of blocks in all messages of the client, on every way, that have not been released."""

    def is_clear(self) -> bool:
        """Whether no message with blocks is on this way."""


class InMemory:
    """The blocks of a streamed get that are all in memory. Owns the pins of those not sent."""

    awaits_storage = False

    def __init__(self, found: Pinned, tier: MemoryTier) -> None:
        self._tier = tier
        # Not pairs: 16,384 new tuples trigger a garbage collection, which took 14 ms.
        self._indices = deque(found.indices)
        self._blocks = deque(found.blocks)
        self.num_bytes = sum([block.length for block in found.blocks])

    def go_on(self, last_resort: bool, way: Way) -> bool:
        return True

    def next_batch(self, take: Take) -> Batch | None:
        if not self._blocks:
            return None
        indices, blocks = take(self._indices, self._blocks)
        self.num_bytes -= sum([block.length for block in blocks])
        return Batch(indices, blocks, more=bool(self._blocks))

    def cancel(self) -> None:
        self._tier.unpin_all(self._blocks)
        self._blocks.clear()
        self.num_bytes = 0


class State(Enum):
    WAITING = auto()  # not requested yet, or there was no room
    COMING = auto()
    HERE = auto()  # in memory, pinned by us
    LOST = auto()  # a miss after all: damaged on disk, cleared, evicted, or no room at all


@dataclass(slots=True)
class Place:
    """One block of the get. `block` is set when the state is HERE."""

    index: int
    key: bytes
    block: Block | None
    state: State


class BelowMemory:
    """The blocks of a streamed get, some of which must be read, in the order of its keys.

    Pins blocks that are read and not sent. Blocks that were found and then lost are omitted; the
    last batch has `more` false.
    """

    def __init__(
        self,
        namespace: str,
        found: Found,
        tier_stack: TierStack,
        fetches: Fetches,
        block_bytes: int,
        deadline: float,
    ) -> None:
        """Takes over the pins of `found`, blocks of `block_bytes` at most. The client wants no
        block after `deadline`."""
        self._deadline = deadline
        self.awaits_storage = False
        """At the last `go_on` its next block was being read, or had no room."""
        self._namespace = namespace
        self._tier_stack = tier_stack
        self._fetches = fetches
        self._memory = tier_stack.memory
        self._places = deque(
            Place(index, key, block, State.WAITING if block is None else State.HERE)
            for index, key, block in zip(found.indices, found.keys, found.blocks, strict=True)
        )
        self.num_bytes = sum(block.length for block in found.blocks if block is not None)
        self._most = self._memory.stats().budget_bytes // SHARE_OF_MEMORY
        room = min(tier_stack.window_bytes, self._most)
        self._window = max(1, room // block_bytes)
        self._num_coming = 0
        self._ended = False

    def go_on(self, last_resort: bool, way: Way) -> bool:
        """Read as far as the window has room. Whether `next_batch` has something now.

        `last_resort`: no message in flight to this client will free memory, so a block that finds
        no room now is lost. Waiting for other clients could be a deadlock.
        """
        self.awaits_storage = False
        if self._ended:
            return True
        self._drop_lost()
        per_part = max(1, self._window // PARTS)
        while self._may_read(way) and (wanted := self._next_waiting(per_part)):
            if len(wanted) < per_part and self._num_coming:
                break  # a part at a time: neighbours are read in one call
            self._fetch(wanted)
            if any(place.state is State.WAITING for place in wanted):  # no room
                head = self._places[0]
                if not last_resort or self._num_coming or head.state is not State.WAITING:
                    break
                head.state = State.LOST
                self._fetches.gave_up(1)
            self._drop_lost()
        is_ready = not self._places or self._places[0].state is State.HERE
        is_held_back = not self._num_coming and not self._may_read(way)
        self.awaits_storage = not (is_ready or is_held_back)
        return is_ready

    def next_batch(self, take: Take) -> Batch | None:
        if self._ended:
            return None
        here_indices: deque[int] = deque()
        here: deque[Block] = deque()
        for place in self._places:
            if place.block is None:
                break
            here_indices.append(place.index)
            here.append(place.block)
        indices, blocks = take(here_indices, here)
        for _ in blocks:
            self._places.popleft()
        self._drop_lost()
        self._ended = not self._places
        self.num_bytes -= sum(block.length for block in blocks)
        return Batch(indices, blocks, more=not self._ended)

    def cancel(self) -> None:
        """Blocks that are being read are unpinned when they arrive."""
        self._ended = True
        self._memory.unpin_all([place.block for place in self._places if place.block is not None])
        self._places.clear()
        self.num_bytes = 0

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _may_read(self, way: Way) -> bool:
        if way.unread_bytes() <= self._most:
            return True
        is_next_wanted = bool(self._places) and self._places[0].state is State.WAITING
        return is_next_wanted and not self._num_coming and way.is_clear()

    def _next_waiting(self, count: int) -> list[Place]:
        """So many of those within the window, or fewer."""
        ahead = islice(self._places, self._window)
        return [*islice((place for place in ahead if place.state is State.WAITING), count)]

    def _fetch(self, wanted: list[Place]) -> None:
        for place in wanted:
            place.state = State.COMING
        self._num_coming += len(wanted)
        keys = [place.key for place in wanted]
        begun: set[bytes] = set()  # that are read: without a block they have failed

        def fetched(blocks: list[Block | None]) -> None:
            self._num_coming -= len(wanted)
            if self._ended:
                self._memory.unpin_all([block for block in blocks if block is not None])
                return
            for place, block in zip(wanted, blocks, strict=True):
                place.block = block
                self.num_bytes += block.length if block is not None else 0
                place.state = State.HERE if block is not None else self._why_not(place, begun)

        self._fetches.fetch(self._namespace, keys, fetched, final=False, deadline=self._deadline)
        begun |= self._fetches.are_coming(self._namespace, keys)

    def _why_not(self, place: Place, begun: Container[bytes]) -> State:
        """No room, as long as a tier still has the block; lost otherwise."""
        if place.key in begun:
            return State.LOST
        there = self._tier_stack.is_readable(self._namespace, place.key)
        return State.WAITING if there else State.LOST

    def _drop_lost(self) -> None:
        while self._places and self._places[0].state is State.LOST:
            self._places.popleft()
            self._fetches.lost()
