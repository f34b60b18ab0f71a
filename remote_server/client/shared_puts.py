"""Puts over shared memory: the server copies the rows itself, as long as their ticket stands.

A put is sent in batches, each one `PutShared` message for a quarter of the window, which says
where the rows lie. The window bounds what was sent and not answered, over all puts.

Nothing of ours holds a row, so a put ends at once, whatever became of it: either every batch was
answered, or the tickets of those that were not are withdrawn. The server may be reading a row
then, and even see what its next owner writes there; it throws away what it has read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from remote_server import protocol
from remote_server.client.gates import Gate, Point, open_gate
from remote_server.client.lease_window import SHARE_OF_ARENA
from remote_server.client.put_transfer import PutTransfer
from remote_server.client.results import ClientConfig, Counters
from remote_server.client.session import Session
from remote_server.client.tickets import Tickets
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRefused,
)
from remote_server.protocol import PutShared


@dataclass(slots=True, eq=False)
class _Batch:
    """One PutShared message on its way."""

    transfer: PutTransfer
    part: range
    num_bytes: int
    ticket: int


class SharedPuts:
    """All puts of one client whose rows lie in its region, oldest first."""

    def __init__(
        self,
        tickets: Tickets,
        session: Session,
        config: ClientConfig,
        counters: Counters,
        next_request_id: Callable[[], int],
        require: Callable[[], int],
        send: Callable[[protocol.Request], bool],
    ) -> None:
        """`require` gives the server's name for our region, or raises why there is none."""
        self._tickets = tickets
        self._session = session
        self._config = config
        self._counters = counters
        self._next_request_id = next_request_id
        self._require = require
        self._send = send
        self._transfers: dict[PutTransfer, None] = {}
        self._batches: dict[int, _Batch] = {}
        self._window_bytes = 0
        self._most_bytes = config.shared_window_bytes
        self.gate: Gate = open_gate
        self.wake_at = inf
        self.has_more = False
        """The next turn may have something to send."""
        self.queued_bytes = 0

    def limit(self, arena_bytes: int) -> None:
        """Into an arena this large; what is under way goes on."""
        self._most_bytes = min(self._config.shared_window_bytes, arena_bytes // SHARE_OF_ARENA)

    def accept(self, transfer: PutTransfer) -> None:
        """Take over `transfer`; it ends at once when it cannot be sent."""
        try:
            declaration = self._session.declaration(transfer.namespace)
            batch_bytes = max(1, self._most_bytes // 4)
            # A server that has nothing to copy is given something soon.
            first_bytes = None if self._batches else batch_bytes // 8
            transfer.prepare(
                declaration.block_bytes, batch_bytes, self._session.limits, first_bytes
            )
            self._session.require(transfer.namespace)
            self._require()
        except KVFerryError as error:
            local = isinstance(error, LocalProtocolError)
            self._counters["local_errors" if local else "unavailable"] += 1
            transfer.abandon(error)
            return
        self._transfers[transfer] = None
        self.queued_bytes += transfer.total_bytes
        self.wake_at = min(self.wake_at, transfer.deadline)

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Send the next message if the window allows it, oldest put first.

        One a turn: hashing a window's worth of small blocks would keep lookups waiting.
        """
        self.has_more = False
        for transfer in self._transfers:
            if transfer.to_send:
                self._send_next(transfer)
                return

    def _send_next(self, transfer: PutTransfer) -> None:
        part = transfer.to_send[0]
        lengths = [row.nbytes for row in transfer.rows[part.start : part.stop]]
        num_bytes = sum(lengths)
        if self._window_bytes + num_bytes > self._most_bytes and self._batches:
            return
        if self._tickets.num_used == protocol.MAX_TICKETS:
            return
        self.gate(Point.BEFORE_HASH)
        checksums = self._checksums(transfer, part) if self._config.integrity else []
        ticket, ticket_value = self._tickets.take()
        self.gate(Point.TICKET_SET)
        message = PutShared(
            request_id=self._next_request_id(),
            namespace=transfer.namespace,
            keys=transfer.keys[part.start : part.stop],
            region=self._require(),
            offsets=transfer.offsets[part.start : part.stop],
            lengths=lengths,
            checksums=checksums,
            ticket=ticket,
            ticket_value=ticket_value,
            deferred=transfer.deferred,
            force=transfer.force,
        )
        if not self._send(message):
            self._tickets.withdraw(ticket)
            return
        self.gate(Point.SENT)
        transfer.to_send.popleft()
        transfer.num_in_flight += 1
        transfer.bytes_sent += num_bytes
        self._batches[message.request_id] = _Batch(transfer, part, num_bytes, ticket)
        self._window_bytes += num_bytes
        self._counters["bytes_out"] += num_bytes
        self._counters["shm_bytes_out"] += num_bytes
        self._counters["blocks_out"] += len(part)
        self.has_more = True

    def _checksums(self, transfer: PutTransfer, part: range) -> list[int]:
        keys = transfer.keys[part.start : part.stop]
        rows = transfer.rows[part.start : part.stop]
        return protocol.checksums(transfer.namespace, keys, rows)

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """Whether a reply to this request would be in time."""
        return request_id in self._batches

    def take(self, reply: protocol.Reply) -> None:
        """The answer to a batch that is awaited. Raises `RemoteProtocolError` for no answer."""
        batch = self._batches[reply.request_id]
        transfer = batch.transfer
        if isinstance(reply, protocol.Stored):
            transfer.add(batch.part, reply)
        elif isinstance(reply, protocol.Error):
            self._counters["refused"] += 1
            if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
                self._session.forgotten(transfer.namespace)
            transfer.error = RequestRefused(reply.code, reply.message)
            transfer.to_send.clear()
        else:
            raise RemoteProtocolError(f"a put was answered with {type(reply).__name__}")
        self._session.answered()
        self._forget(reply.request_id)
        self._tickets.give_back(batch.ticket)
        if transfer.settled:
            self._finish(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _forget(self, request_id: int) -> None:
        batch = self._batches.pop(request_id)
        batch.transfer.num_in_flight -= 1
        self._window_bytes -= batch.num_bytes

    def _finish(self, transfer: PutTransfer) -> None:
        del self._transfers[transfer]
        self.queued_bytes -= transfer.total_bytes
        transfer.resolve()

    def expire(self, now: float) -> None:
        """Give up the puts whose deadline has passed."""
        if now < self.wake_at:
            return
        late = [transfer for transfer in self._transfers if transfer.deadline <= now]
        for transfer in late:
            self._counters["timeouts_put"] += 1
            if transfer.num_in_flight:
                self._session.timed_out(now)
        self._give_up(late, DeadlineExceeded("no answer to put in time"))
        self.wake_at = min((transfer.deadline for transfer in self._transfers), default=inf)

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put."""
        self._give_up(list(self._transfers), error)

    def _give_up(self, transfers: list[PutTransfer], error: KVFerryError) -> None:
        given_up = set(transfers)
        for request_id, batch in list(self._batches.items()):
            if batch.transfer in given_up:
                self._tickets.withdraw(batch.ticket)
                self._counters["withdrawn_puts"] += 1
                self._forget(request_id)
        for transfer in transfers:
            transfer.error = transfer.error or error
            transfer.to_send.clear()
            self._finish(transfer)

    @property
    def num_waiting(self) -> int:
        """Puts that callers wait for."""
        return len(self._transfers)

    def check(self) -> None:
        """The window is what the batches in flight carry, and each of them has one ticket."""
        in_flight = [batch.num_bytes for batch in self._batches.values()]
        assert self._window_bytes == sum(in_flight), (self._window_bytes, in_flight)
        tickets = {batch.ticket for batch in self._batches.values()}
        assert len(tickets) == len(self._batches) == self._tickets.num_used, "shared tickets"
        assert self.queued_bytes == sum(transfer.total_bytes for transfer in self._transfers)
        assert sum(transfer.num_in_flight for transfer in self._transfers) == len(self._batches)
        assert not any(transfer.settled for transfer in self._transfers), "settled and kept"
