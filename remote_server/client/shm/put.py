"""Puts over shared memory, whose rows the server copies."""

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.shm.lease import SHARE_OF_ARENA
from remote_server.client.shm.link import ShmLink
from remote_server.client.transfer.put import PutBatch, PutTransfer
from remote_server.client.transfer.put_channel import PutChannel
from remote_server.errors import KVFerryError
from remote_server.protocol import Put, SharedRows


class ShmPuts(PutChannel):
    """All puts of one client whose rows are in its region, oldest first.

    The server copies the rows itself while their ticket is valid. A batch is one `Put`
    message for half of the window, with the offsets of the rows: one is copied while the next one
    waits.

    Nothing in this process holds a row, so a put ends at once: every batch has its reply, or the
    tickets of the others are withdrawn. The server may be reading a row then, and may read what its
    next owner writes there; it discards what it has read.
    """

    name = "shared memory"
    copying = False

    def __init__(self, client_context: ClientContext, link: ShmLink) -> None:
        super().__init__(client_context, None, client_context.config.shared_window_bytes)
        self._link = link
        link.users.append(self)

    def _reaches(self, transfer: PutTransfer) -> bool:
        return self._link.reaches(transfer)

    def limit(self, arena_bytes: int) -> None:
        """Bound the window by the size of the arena. Batches in flight are not affected."""
        self._most_bytes = min(self._config.shared_window_bytes, arena_bytes // SHARE_OF_ARENA)

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def _batch_bytes(self, rows: list[memoryview]) -> int:
        return max(1, self._most_bytes // 2)

    def _require_way(self) -> None:
        self._link.require()

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first."""
        self._has_sent = False
        if self._link.in_use:
            super().pump(now)

    def _send_batch(self, batch: PutBatch) -> int:
        if self._link.opening or self._link.tickets.num_used == protocol.MAX_TICKETS:
            return 0
        transfer, part = batch.transfer, batch.part
        # The server hashes the blocks while it copies them. Hashing them here as well would take
        # a third of the time of a put, and the fence of the ticket protects them meanwhile.
        pages = transfer.pages(part) if self._config.integrity else []
        batch.ticket, ticket_value = self._link.tickets.take()
        rows = SharedRows(
            region=self._link.require(), offsets=transfer.offsets[part.start : part.stop],
            ticket=batch.ticket, ticket_value=ticket_value, pages=pages,
        )  # fmt: skip
        message = Put(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=transfer.keys[part.start : part.stop], lengths=batch.lengths,
            checksums=[], deferred=transfer.deferred, force=transfer.force, shared=rows,
            chain=protocol.select(transfer.chain, part), fleet=self._config.in_fleet,
        )  # fmt: skip
        if not self._link.send(message):
            self._link.tickets.withdraw(batch.ticket)
            return 0
        self._counters["shm_bytes_out"] += batch.num_bytes
        return message.request_id

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process the reply to an awaited batch."""
        self.answered(reply)

    def take_late(self, reply: protocol.Reply) -> None:
        """A put holds nothing at the server."""

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def stop_copying(self) -> None:
        """The server copies."""

    def detached(self, error: KVFerryError) -> None:
        """End every put: the server has no region to read."""
        self.end_all(error)

    def _returned(self, batch: PutBatch, *, answered: bool) -> None:
        """Give the rows back. The server keeps nothing that it reads there from now on."""
        self._link.tickets.withdraw(batch.ticket)
        self._counters["withdrawn_puts"] += not answered

    def check(self) -> None:
        """Also assert that each batch in flight has one ticket."""
        super().check()
        tickets = {batch.ticket for batch in self._batches.values()}
        assert len(tickets) == len(self._batches) == self._link.tickets.num_used, "shared tickets"
