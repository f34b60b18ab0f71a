"""Puts over shared memory: the server copies the rows itself, as long as their ticket stands.

A batch is one `PutShared` message for a quarter of the window, which says where the rows lie.

Nothing of ours holds a row, so a put ends at once, whatever became of it: either every batch was
answered, or the tickets of those that were not are withdrawn. The server may be reading a row
then, and even see what its next owner writes there; it throws away what it has read.
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
    """All puts of one client whose rows lie in its region, oldest first."""

    def __init__(
        self,
        tickets: Tickets,
        wiring: Wiring,
        require: Callable[[], int],
        send: Callable[[protocol.Request], bool],
    ) -> None:
        """`require` gives the server's name for our region, or raises why there is none."""
        super().__init__(wiring, wiring.config.shared_window_bytes)
        self._tickets = tickets
        self._require = require
        self._send = send
        self.gate: Pause = no_pause

    def limit(self, arena_bytes: int) -> None:
        """Into an arena this large; what is under way goes on."""
        self._most_bytes = min(self._config.shared_window_bytes, arena_bytes // SHARE_OF_ARENA)

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def _prepare(self, transfer: PutTransfer, block_bytes: int) -> None:
        batch_bytes = max(1, self._most_bytes // 4)
        # A server that has nothing to copy is given something soon.
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
        """Its rows are the caller's: the answer said so, or the ticket does from here on."""
        ticket = self._batches[request_id].ticket
        if answered:
            self._tickets.give_back(ticket)
        else:
            self._tickets.withdraw(ticket)
            self._counters["withdrawn_puts"] += 1
        super()._forget(request_id, answered=answered)

    def check(self) -> None:
        """As any puts; and each batch in flight has one ticket."""
        super().check()
        tickets = {batch.ticket for batch in self._batches.values()}
        assert len(tickets) == len(self._batches) == self._tickets.num_used, "shared tickets"
