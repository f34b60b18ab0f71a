"""Puts of one transport: their queue, and the steps that all transports share."""

from abc import abstractmethod
from collections.abc import Sequence
from math import inf

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.connection import Connection
from remote_server.client.results import Op
from remote_server.client.transfer.put import PutBatch, PutState, PutTransfer
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    RemoteProtocolError,
    RequestRefused,
)


class PutChannel(Channel):
    """All puts of one client over one transport, oldest first."""

    wake_at = inf
    queued_bytes = 0

    def __init__(
        self, client_context: ClientContext, connection: Connection | None, most_bytes: int
    ) -> None:
        """`most_bytes` is the window."""
        super().__init__(client_context, connection)
        self._transfers: dict[PutTransfer, None] = {}
        self._releasing: dict[PutTransfer, None] = {}
        self._batches: dict[int, PutBatch] = {}
        self._window_bytes = 0
        self._most_bytes = most_bytes
        self._has_sent = False
        """The last `pump` sent a message."""

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _batch_bytes(self, rows: list[memoryview]) -> int:
        """Bytes of a batch of a put of `rows`, about."""

    @abstractmethod
    def _send_batch(self, batch: PutBatch) -> int:
        """Send it and return the request's id; 0 when that must wait: nothing was sent then."""

    def _returned(self, batch: PutBatch, *, answered: bool) -> None:
        """A batch was `answered`, or given up: release what it holds."""

    def _has_room(self, batch: PutBatch) -> bool:
        """The window has space for it beside others."""
        return self._window_bytes + batch.num_bytes <= self._most_bytes

    def _reaches(self, transfer: PutTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a put whose rows this transport reaches."""
        if not isinstance(request, PutTransfer) or not self._reaches(request):
            return False
        try:
            rows = self._checked_rows(request, writable=False)
        except KVFerryError as error:
            self._turn_away(request, error)
            return True
        request.prepare(rows, self._batch_bytes(rows), self._session.limits)
        if request.settled:  # without a key
            request.resolve()
            return True
        self._transfers[request] = None
        self.queued_bytes += request.total_bytes
        self.wake_at = min(self.wake_at, request.deadline)
        return True

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first.

        One a turn: hashing a window's worth of small blocks would delay lookups.
        """
        self._has_sent = self.blocked = False
        transfer = next((one for one in self._transfers if one.to_send), None)
        if transfer is None:
            return
        part = transfer.to_send[0]
        lengths = [row.nbytes for row in transfer.rows[part.start : part.stop]]
        num_bytes = sum(lengths)
        batch = PutBatch(transfer, part, lengths, num_bytes)
        if self._batches and not self._has_room(batch):
            return
        request_id = self._send_batch(batch)
        if not request_id:
            return
        transfer.sent(batch)
        self._batches[request_id] = batch
        self._window_bytes += num_bytes
        self._counters["bytes_out"] += num_bytes
        self._counters["blocks_out"] += len(part)
        self._has_sent = True

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""
        return request_id in self._batches

    def answered(self, reply: protocol.Reply) -> None:
        """Process the reply to a batch. Raises `RemoteProtocolError` for a wrong kind."""
        batch = self._batches.get(reply.request_id)
        if batch is None:
            self._counters["late_replies"] += 1
            return
        transfer = batch.transfer
        if isinstance(reply, protocol.Stored):
            transfer.stored(batch.part, reply)
        elif isinstance(reply, protocol.Error):
            self._counters["refused"] += 1
            if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
                self._session.forgotten(transfer.namespace)
            transfer.refused(RequestRefused(reply.code, reply.message))
        else:
            raise RemoteProtocolError(f"a put was answered with {type(reply).__name__}")
        self._session.breaker.answered()
        self._forget(reply.request_id, answered=True)
        if transfer.settled:
            self._retire(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _forget(self, request_id: int, *, answered: bool = False) -> None:
        """Remove a batch: no further reply is expected."""
        batch = self._batches.pop(request_id)
        batch.transfer.num_in_flight -= 1
        self._window_bytes -= batch.num_bytes
        self._returned(batch, answered=answered)

    def _retire(self, transfer: PutTransfer) -> None:
        """End a settled put now, or as soon as libzmq has released its rows."""
        del self._transfers[transfer]
        if transfer.is_released():
            self._finish(transfer)
        else:
            transfer.enter(PutState.RELEASING)
            self._releasing[transfer] = None

    def _finish(self, transfer: PutTransfer) -> None:
        self.queued_bytes -= transfer.total_bytes
        transfer.resolve()

    def _give_up(self, transfers: list[PutTransfer], error: KVFerryError) -> None:
        given_up = set(transfers)
        for request_id, batch in list(self._batches.items()):
            if batch.transfer in given_up:
                self._forget(request_id)
        for transfer in transfers:
            transfer.give_up(error)
            self._retire(transfer)

    def expire(self, now: float) -> None:
        """End the puts whose rows libzmq has released, and give up those that are late."""
        for transfer in [transfer for transfer in self._releasing if transfer.is_released()]:
            del self._releasing[transfer]
            self._finish(transfer)
        if now < self.wake_at:
            return
        late = [transfer for transfer in self._transfers if transfer.deadline <= now]
        for transfer in late:
            self._counters[Op.PUT.timeouts] += 1
            if transfer.num_in_flight:
                self._session.timed_out(now, transfer.timeout_s)
        self._give_up(late, DeadlineExceeded("no answer to put in time"))
        deadlines = (transfer.deadline for transfer in self._waiting)
        self.wake_at = min((deadline for deadline in deadlines if deadline > now), default=inf)

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put."""
        self._give_up(list(self._transfers), error)

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def has_more(self) -> bool:
        """The window may have room for another message."""
        return self._has_sent and any(transfer.to_send for transfer in self._transfers)

    @property
    def _waiting(self) -> list[PutTransfer]:
        """The puts that have not ended."""
        return [*self._transfers, *self._releasing]

    @property
    def releasing(self) -> Sequence[PutTransfer]:
        return [*self._releasing]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def needs_connection(self) -> bool:
        return bool(self._transfers or self._releasing)

    def check(self) -> None:
        """Assert that window and sums equal the batches, and that each put is where it belongs."""
        assert self._window_bytes == sum(batch.num_bytes for batch in self._batches.values())
        assert self.queued_bytes == sum(transfer.total_bytes for transfer in self._waiting)
        assert sum(transfer.num_in_flight for transfer in self._waiting) == len(self._batches)
        assert not any(transfer.settled for transfer in self._transfers), "a settled put is listed"
        assert all(transfer.settled for transfer in self._releasing), "it is not settled"
        assert {one.state for one in self._transfers} <= {PutState.PREPARED, PutState.SENT}
        assert {one.state for one in self._releasing} <= {PutState.RELEASING}
