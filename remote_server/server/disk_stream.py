"""Streamed gets of blocks on disk: a window of blocks is read ahead of sending.

The first blocks are sent while later ones are read, and a get may be larger than memory.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from remote_server.server.outgoing import OutgoingMessage, RequestTimes, blocks_message, next_batch
from remote_server.sizes import MiB
from remote_server.store.gets import Found
from remote_server.store.slabs import Block
from remote_server.store.tier_stack import TierStack

# Read and not sent yet, of one stream: enough to keep the disk's threads busy.
WINDOW_BYTES = 16 * MiB

# The largest part of memory for one window, 1/8, so that several streams fit.
SHARE_OF_MEMORY = 8

# The window is read in so many parts: the first are sent while others are read.
PARTS = 4


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


class DiskStream:
    """The `Blocks` messages of one streamed get, in the order of its keys.

    Pins blocks that are read and not sent. Blocks that were found and then lost are omitted; the
    last message has `more` false.
    """

    def __init__(
        self,
        request_id: int,
        epoch: str,
        namespace: str,
        found: Found,
        tier_stack: TierStack,
        block_bytes: int,
        times: RequestTimes | None = None,
    ) -> None:
        """Takes over the pins of `found`, blocks of `block_bytes` at most. Its messages carry
        `times`, if given."""
        self._times = times
        self._request_id = request_id
        self._epoch = epoch
        self._namespace = namespace
        self._tier_stack = tier_stack
        self._memory = tier_stack.memory
        self._places = deque(
            Place(index, key, block, State.WAITING if block is None else State.HERE)
            for index, key, block in zip(found.indices, found.keys, found.blocks, strict=True)
        )
        self.num_bytes = sum(block.length for block in found.blocks if block is not None)
        self.num_rows = len(self._places)
        room = min(WINDOW_BYTES, self._memory.stats().budget_bytes // SHARE_OF_MEMORY)
        self._window = max(1, room // block_bytes)
        self._num_coming = 0
        self._ended = False

    def go_on(self, last_resort: bool) -> bool:
        """Read as far as the window has room. Whether `next_message` has something now.

        `last_resort`: no message in flight to this client will free memory, so a block that finds
        no room now is lost. Waiting for other clients could be a deadlock.
        """
        is_ready = self._read_on(last_resort)
        if self._times is not None:
            if is_ready:
                self._times.storage_ends()
            else:
                self._times.storage_begins()
        return is_ready

    def _read_on(self, last_resort: bool) -> bool:
        if self._ended:
            return True
        self._drop_lost()
        per_part = max(1, self._window // PARTS)
        while wanted := [*islice(self._waiting(), per_part)]:
            if len(wanted) < per_part and self._num_coming:
                break  # a part at a time: neighbours are read in one call
            self._fetch(wanted)
            if any(place.state is State.WAITING for place in wanted):  # no room
                head = self._places[0]
                if not last_resort or self._num_coming or head.state is not State.WAITING:
                    break
                head.state = State.LOST
                self._tier_stack.gave_up(1)
            self._drop_lost()
        return not self._places or self._places[0].state is State.HERE

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        if self._ended:
            return None
        here_indices: deque[int] = deque()
        here: deque[Block] = deque()
        for place in self._places:
            if place.block is None:
                break
            here_indices.append(place.index)
            here.append(place.block)
        indices, blocks = next_batch(here_indices, here, may_gather)
        for _ in blocks:
            self._places.popleft()
        self._drop_lost()
        self._ended = not self._places
        self.num_bytes -= sum(block.length for block in blocks)
        return blocks_message(
            self._request_id, self._epoch, indices, blocks, self._memory, self._times,
            more=not self._ended,
        )  # fmt: skip

    def cancel(self) -> None:
        """Blocks that are being read are unpinned when they arrive."""
        self._ended = True
        self._memory.unpin_all([place.block for place in self._places if place.block is not None])
        self._places.clear()
        self.num_bytes = 0

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _waiting(self) -> Iterator[Place]:
        """Those within the window."""
        ahead = islice(self._places, self._window)
        return (place for place in ahead if place.state is State.WAITING)

    def _fetch(self, wanted: list[Place]) -> None:
        for place in wanted:
            place.state = State.COMING
        self._num_coming += len(wanted)

        def fetched(blocks: list[Block | None]) -> None:
            self._num_coming -= len(wanted)
            if self._ended:
                self._memory.unpin_all([block for block in blocks if block is not None])
                return
            for place, block in zip(wanted, blocks, strict=True):
                place.block = block
                self.num_bytes += block.length if block is not None else 0
                place.state = State.HERE if block is not None else self._why_not(place)

        keys = [place.key for place in wanted]
        self._tier_stack.fetch(self._namespace, keys, fetched, final=False)

    def _why_not(self, place: Place) -> State:
        """No room, as long as a tier still has the block; lost otherwise."""
        there = self._tier_stack.is_readable(self._namespace, place.key)
        return State.WAITING if there else State.LOST

    def _drop_lost(self) -> None:
        while self._places and self._places[0].state is State.LOST:
            self._places.popleft()
            self._tier_stack.lost()
