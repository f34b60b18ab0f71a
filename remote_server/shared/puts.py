"""Puts that are copied from clients' memory: those under way, and how they end."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from remote_server.copier import Gate
from remote_server.guard import Guard
from remote_server.payload import stored_reply
from remote_server.protocol import Declined, PutShared, Stored
from remote_server.shared.copying import copy_shared
from remote_server.shared.region import Region
from remote_server.store.answers import Reserved
from remote_server.store.arena import Arena
from remote_server.store.store import Store

log = logging.getLogger(__name__)

# What is copied before requests get their turn again: half a millisecond, more with hashing.
TURN_BYTES = 8 << 20


class SharedPut:
    """One put whose slots are reserved. Ends once, by `finish`, and is answered then."""

    def __init__(
        self,
        request: PutShared,
        region: Region,
        reserved: Reserved,
        store: Store,
        answer: Callable[[Stored], None],
    ) -> None:
        self.region = region
        self.num_bytes = sum(request.lengths)
        self.num_keys = len(request.keys)
        self._request = request
        self._reserved = reserved
        self._store = store
        self._answer = answer
        self._intact: list[bool] = []  # of the blocks copied so far
        self._offsets = [request.offsets[index] for index in reserved.indices]
        self._blocks_per_turn = max(1, TURN_BYTES // max(request.lengths, default=1))

    def copy_some(self, arena: Arena) -> bool:
        """Copy what fits into one turn. True when there is nothing left to copy."""
        blocks, start = self._reserved.blocks, len(self._intact)
        if start == len(blocks) or not self._stands:
            return True
        end = start + self._blocks_per_turn
        self._intact += copy_shared(
            self._request.namespace, blocks[start:end], self._offsets[start:end], self.region, arena
        )
        return end >= len(blocks)

    def finish(self, *, failed: bool = False) -> None:
        """Keep what landed well, if the client still stands by it, and answer.

        The ticket is read after the last byte, and the client changes it before it changes a
        row: what is kept was read before that.
        """
        if failed:
            self._store.end_put(self._reserved, None)
        elif not self._stands:
            self._store.end_put(self._reserved, None, Declined.WITHDRAWN)
        else:
            self._store.end_put(self._reserved, self._intact)
        self._answer(stored_reply(self._request.request_id, self._store.epoch, self._reserved))

    @property
    def _stands(self) -> bool:
        """A client that is gone stands by nothing: others may still write to its memory."""
        request = self._request
        return self.region.live and self.region.ticket(request.ticket) == request.ticket_value


class SharedPuts:
    """The puts under way, copied in the order they came, on the loop thread.

    Not on a thread of their own: these copies wait for nobody, and between two of them that
    thread had to get hold of the interpreter again, against a loop that was preparing the next
    put. That cost more than the overlap gained: puts took 10 to 30 % longer. A lookup meanwhile
    waits for one turn at most.
    """

    def __init__(self, arena: Arena, gate: Gate, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._arena = arena
        self._gate = gate
        self._puts: deque[SharedPut] = deque()
        self.num_blocks = 0
        """That requests under way name."""

    def __len__(self) -> int:
        return len(self._puts)

    def bytes_of(self, region: Region) -> int:
        """What waits to be copied from `region`."""
        return sum(put.num_bytes for put in self._puts if put.region is region)

    def add(self, put: SharedPut) -> None:
        self._puts.append(put)
        self.num_blocks += put.num_keys

    def copy_some(self) -> bool:
        """Give the oldest put a turn. True when there is more to do at once."""
        if not self._puts or not self._gate.is_open:
            return False
        put = self._puts[0]
        try:
            done = put.copy_some(self._arena)
        except Exception:  # one put must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
            self._take_first()
            self._finish(partial(put.finish, failed=True))
        else:
            if done:
                self._take_first()
                self._finish(put.finish)
        return bool(self._puts)

    def end_all(self, region: Region) -> None:
        """`region` is no longer live: nothing reads it after this."""
        theirs = [put for put in self._puts if put.region is region]
        self._puts = deque(put for put in self._puts if put.region is not region)
        self.num_blocks -= sum(put.num_keys for put in theirs)
        for put in theirs:
            self._finish(put.finish)

    def _take_first(self) -> None:
        self.num_blocks -= self._puts.popleft().num_keys

    def _finish(self, end: Callable[[], None]) -> None:
        self._guard.run("the end of a put", end, None)
