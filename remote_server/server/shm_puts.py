"""Puts copied from clients' shared memory: their queue, their turns and their end."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import eq
from typing import Protocol

from remote_server import protocol
from remote_server.fault_points import Gate
from remote_server.guard import Guard
from remote_server.protocol import Declined, PutShared, Stored
from remote_server.server.put import PartedPut, stored_reply
from remote_server.shm.arena import Arena
from remote_server.shm.mapping import copy_and_hash_group, copy_group, group_blocks
from remote_server.shm.region import Region
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import Turns

log = logging.getLogger(__name__)

# Bytes copied before requests get their turn again: half a millisecond, more with hashing.
TURN_BYTES = 8 << 20


class SharedPut:
    """One put whose slots are reserved. It is copied in turns, then ended part by part, and
    answered when its first part ends."""

    def __init__(
        self,
        request: PutShared,
        region: Region,
        put: PartedPut,
        store: Store,
        answer: Callable[[Stored], None],
    ) -> None:
        self.region = region
        self.num_bytes = sum(request.lengths)
        self.num_keys = len(request.keys)
        self._request = request
        self._put = put
        self._store = store
        self._answer = answer
        self._intact: list[list[bool]] = [[] for _ in put.parts]  # of the blocks copied so far
        self._num_open = len(put.parts)
        self._keeps = True
        self._reason = Declined.CHECKSUM
        self._blocks_per_turn = max(1, TURN_BYTES // max(request.lengths, default=1))
        self._to_copy = deque(
            (number, start)
            for number, part in enumerate(put.parts)
            for start in range(0, len(part.blocks), self._blocks_per_turn)
        )

    def copy_some(self, arena: Arena) -> bool:
        """Copy for one turn. True when there is nothing left to copy."""
        if not self._to_copy or not self._stands:
            self._to_copy.clear()
            return True
        number, start = self._to_copy.popleft()
        part, end = self._put.parts[number], start + self._blocks_per_turn
        offsets = self._request.offsets
        first = number * len(self._put.parts[0].outcomes)
        self._intact[number] += copy_shared(
            self._request.namespace,
            part.blocks[start:end],
            [offsets[first + index] for index in part.indices[start:end]],
            self.region,
            arena,
        )
        return not self._to_copy

    def end_some(self, *, failed: bool = False) -> bool:
        """End the last open part, and publish its intact blocks if the client still held the put's
        ticket at the first call. True when no part is left: the put is answered then.

        The ticket is read after the last byte was copied. The client changes the ticket before it
        changes a row, so the published bytes were read before that.
        """
        if self._num_open == len(self._put.parts):
            self._keeps = not failed and self._stands
            if not failed and not self._keeps:
                self._reason = Declined.WITHDRAWN
        self._num_open -= 1
        part = self._put.parts[self._num_open]
        self._store.end_put(
            part, self._intact[self._num_open] if self._keeps else None, self._reason
        )
        if self._num_open:
            return False
        whole = self._put.as_one()
        self._answer(stored_reply(self._request.request_id, self._store.epoch, whole))
        return True

    def end(self) -> bool:
        """End all remaining parts at once. True."""
        while not self.end_some():
            pass
        return True

    @property
    def _stands(self) -> bool:
        """Whether the put is still valid. After its client, others may write to that memory."""
        request = self._request
        return self.region.live and self.region.ticket(request.ticket) == request.ticket_value


class SharedPuts:
    """The puts under way, copied on the loop thread: those of a region in order of arrival, the
    regions in turns.

    A thread of its own was slower. These copies never block, and between two of them the thread had
    to acquire the interpreter's lock again, in competition with a loop that prepared the next put.
    That cost more than the overlap gained: puts took 10 to 30 % longer. A lookup waits for one
    turn.
    """

    def __init__(self, arena: Arena, gate: Gate, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._arena = arena
        self._gate = gate
        self._turns: Turns[SharedPut] = Turns()
        self.num_blocks = 0
        """In the requests under way."""

    def __len__(self) -> int:
        return self._turns.num_waiting

    def bytes_of(self, region: Region) -> int:
        """The bytes that wait to be copied from `region`."""
        return self._turns.held_by(region)[1]

    def add(self, put: SharedPut) -> None:
        self._turns.add("", put.region, put, put.num_bytes)
        self.num_blocks += put.num_keys

    def copy_some(self) -> bool:
        """Give the next put its turn. True when there is more to do at once."""
        if not self._turns.num_waiting or not self._gate.is_open:
            return False
        self._turns.take_turn(self._work_some)
        return bool(self._turns.num_waiting)

    def _work_some(self, put: SharedPut) -> bool:
        try:
            if not put.copy_some(self._arena):
                return False
        except Exception:  # one put must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
            return self._end(put, partial(put.end_some, failed=True))
        return self._end(put, put.end_some)

    def end_all(self, region: Region) -> None:
        """`region` is no longer live: it is not read after this."""
        for put in self._turns.drop(region):
            self._end(put, put.end)

    def _end(self, put: SharedPut, end: Callable[[], bool]) -> bool:
        is_over = self._guard.run("the end of a put", end, True)
        if is_over:
            self.num_blocks -= put.num_keys
        return is_over


class Source(Protocol):
    """A map of a file at `address`, and the file."""

    address: int

    def has_pages(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether these parts can be read from the map without allocating a page."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Read from the file, which never allocates one."""


def copy_shared(
    namespace: str, blocks: Sequence[Block], offsets: Sequence[int], source: Source, arena: Arena
) -> list[bool]:
    """Fill each of `blocks` from its place in `source`. The result has True for each block whose
    copy has the announced checksum. Blocks without checksums are accepted unchecked. This allocates
    no page of `source`: the memory would be charged to this process."""
    lengths = [block.length for block in blocks]
    if not source.has_pages(offsets, lengths):
        return _read_shared(namespace, blocks, offsets, source, arena)
    sources = [source.address + offset for offset in offsets]
    targets = [arena.address + block.offset for block in blocks]
    step = group_blocks(max(lengths))
    groups = [slice(first, first + step) for first in range(0, len(blocks), step)]
    announced = [block.checksum for block in blocks]
    if announced[0] is None:
        for group in groups:
            copy_group(targets[group], sources[group], lengths[group])
        return [True] * len(blocks)
    seeds = protocol.identities(namespace, [block.key for block in blocks])
    landed = [arena.view[block.offset : block.offset + block.length] for block in blocks]
    computed: list[int] = []
    for group in groups:
        computed += copy_and_hash_group(targets[group], sources[group], landed[group], seeds[group])
    return [*map(eq, computed, announced)]


def _read_shared(
    namespace: str, blocks: Sequence[Block], offsets: Sequence[int], source: Source, arena: Arena
) -> list[bool]:
    """The same for blocks with pages that were never written, or that are swapped out."""
    intact = []
    for block, offset in zip(blocks, offsets, strict=True):
        landed = arena.view[block.offset : block.offset + block.length]
        source.read_into(landed, offset)
        announced = block.checksum
        good = announced is None or protocol.checksum(namespace, block.key, landed) == announced
        intact.append(good)
    return intact
