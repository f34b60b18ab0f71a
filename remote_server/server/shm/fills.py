"""Puts that the threads of a mover fill: their turns, and their ends in order of arrival."""

import logging
from collections import deque
from collections.abc import Hashable
from functools import partial

from remote_server.guard import Guard
from remote_server.native.moves import Moves
from remote_server.server.transfer.put import Put
from remote_server.turns import Turns

log = logging.getLogger(__name__)

# Of one tenant, for each thread: one slice is moved while the next one waits.
AHEAD_BYTES = 32 << 20


class Fills:
    """The puts of one tenant that `Moves` fills, in turns of connections, which count in bytes.

    Puts of one connection end in the order in which they were submitted, so that forced puts take
    effect in order of arrival.
    """

    def __init__(self, moves: Moves, guard: Guard | None = None) -> None:
        self.moves = moves
        self.num_waiting = 0
        """Puts that were submitted and have not ended."""
        self._guard = guard or Guard()
        self._puts: dict[Hashable, deque[Put]] = {}
        """The same by connection, oldest first."""
        self._failed: set[Put] = set()
        self._begun_bytes = 0
        self._turns: Turns[Put] = Turns(lambda: self._begun_bytes / 1e9)
        """Of the puts with slices that have not been begun."""

    @property
    def busy(self) -> bool:
        return bool(self.num_waiting)

    def bytes_of(self, client: Hashable) -> int:
        """The bytes of the puts of `client` that have not ended."""
        return sum(put.num_bytes for put in self._puts.get(client, ()))

    def submit(self, put: Put, client: Hashable) -> None:
        """Queue `put` of the connection `client`, which owns its jobs."""
        self._puts.setdefault(client, deque()).append(put)
        self.num_waiting += 1
        self._turns.add("", client, put)

    def fill_some(self) -> bool:
        """Have the threads fill more slices, and publish a part of each connection's oldest put if
        that is full. True when there is more to do at once."""
        more = False
        while self._turns.num_waiting and self._ahead() < AHEAD_BYTES * self.moves.threads:
            ahead = self._ahead()
            self._turns.take_turn(self._begin)
            if self._ahead() == ahead:  # it was filled here: other parts of the loop have a turn
                more = True
                break
        for client in [client for client, puts in self._puts.items() if puts[0].is_full]:
            more |= self._publish_some(client)
        return more

    def drop(self, client: Hashable) -> None:
        """`client` has left, and what its puts copy from is gone: end them."""
        self._turns.drop(client)
        self.moves.end_all(client)
        for put in self._puts.pop(client, ()):
            self._end(put)

    def stop(self) -> None:
        """End all puts. Their blocks stay unpublished."""
        for client, puts in [*self._puts.items()]:
            self._failed.update(puts)
            self.drop(client)

    # ── private ──────────────────────────────────────────────────────────────────────────

    def _ahead(self) -> int:
        return sum(self.moves.num_bytes[client] for client in self._puts)

    def _begin(self, put: Put) -> bool:
        try:
            self._begun_bytes += put.fill_some()
        except Exception:  # one put must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
            self._failed.add(put)
        return put in self._failed or not put.has_turns

    def _publish_some(self, client: Hashable) -> bool:
        """True when the next put, or a part of this one, can be published at once."""
        puts = self._puts[client]
        put = puts[0]
        try:
            if put not in self._failed and not put.publish_some():
                return True
        except Exception:
            log.exception("a copy failed; its blocks are dropped")
            self._failed.add(put)
        puts.popleft()
        if not puts:
            del self._puts[client]
        self._end(put)
        return bool(puts) and puts[0].is_full

    def _end(self, put: Put) -> None:
        self.num_waiting -= 1
        failed = put in self._failed
        self._failed.discard(put)
        self._guard.run("the end of a copy", partial(put.end, failed), None)
