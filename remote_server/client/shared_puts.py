"""Puts over shared memory: the server copies the rows itself while their ticket is valid.

A batch is one `PutShared` message for a quarter of the window, with the offsets of the rows.

Nothing in this process holds a row, so a put ends at once: every batch has its reply, or the
tickets of the others are withdrawn. The server may be reading a row then, and may read what its
next owner writes there; it discards what it has read.
"""

from collections.abc import Callable

from remote_server import protocol
from remote_server.client.lease import SHARE_OF_ARENA
from remote_server.client.put_lane import PutBatch, PutLane
from remote_server.client.put_transfer import PutTransfer
from remote_server.client.shm_views import Tickets
from remote_server.client.wiring import Wiring
from remote_server.fault_points import Pause, Point, no_pause
from remote_server.protocol import PutShared


class SharedPuts(PutLane):
    """All puts of one client whose rows are in its region, oldest first."""

    def __init__(
        self,
        tickets: Tickets,
        wiring: Wiring,
        require: Callable[[], int],
        send: Callable[[protocol.Request], bool],
    ) -> None:
        """`require` returns the server's number for our region, or raises why there is none."""
        super().__init__(wiring, wiring.config.shared_window_bytes)
        self._tickets = tickets
        self._require = require
        self._send = send
        self.gate: Pause = no_pause

    def limit(self, arena_bytes: int) -> None:
        """Bound the window by the size of the arena. Batches in flight are not affected."""
        self._most_bytes = min(self._config.shared_window_bytes, arena_bytes // SHARE_OF_ARENA)

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def _prepare(self, transfer: PutTransfer, block_bytes: int) -> None:
        batch_bytes = max(1, self._most_bytes // 4)
        # An idle server receives its first batch soon.
        first_bytes = None if self._batches else batch_bytes // 8
        transfer.prepare(block_bytes, batch_bytes, self._session.limits, first_bytes)

    def _require_way(self) -> None:
        self._require()

    def _send_batch(self, batch: PutBatch) -> int:
        if self._tickets.num_used == protocol.MAX_TICKETS:
            return 0
        transfer, part = batch.transfer, batch.part
        self.gate(Point.BEFORE_HASH)
        checksums = transfer.checksums(part) if self._config.integrity else []
        batch.ticket, ticket_value = self._tickets.take()
        self.gate(Point.TICKET_SET)
        message = PutShared(
            request_id=self._next_request_id(),
            namespace=transfer.namespace,
            keys=transfer.keys[part.start : part.stop],
            region=self._require(),
            offsets=transfer.offsets[part.start : part.stop],
            lengths=batch.lengths,
            checksums=checksums,
            ticket=batch.ticket,
            ticket_value=ticket_value,
            deferred=transfer.deferred,
            force=transfer.force,
        )
        if not self._send(message):
            self._tickets.withdraw(batch.ticket)
            return 0
        self.gate(Point.SENT)
        self._counters["shm_bytes_out"] += batch.num_bytes
        return message.request_id

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _forget(self, request_id: int, *, answered: bool = False) -> None:
        """Give the rows back: the reply frees them, or else the withdrawal of their ticket."""
        ticket = self._batches[request_id].ticket
        if answered:
            self._tickets.give_back(ticket)
        else:
            self._tickets.withdraw(ticket)
            self._counters["withdrawn_puts"] += 1
        super()._forget(request_id, answered=answered)

    def check(self) -> None:
        """Also assert that each batch in flight has one ticket."""
        super().check()
        tickets = {batch.ticket for batch in self._batches.values()}
        assert len(tickets) == len(self._batches) == self._tickets.num_used, "shared tickets"
