"""Put channel: the steps of a put that all transports share.

A put is sent in batches. The window bounds the bytes sent and not acknowledged, over all puts. A
put is settled when every batch has its reply, or when it is given up.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import inf

from remote_server import protocol
from remote_server.client.channel import Channel, ClientContext, Request
from remote_server.client.connection import Connection
from remote_server.client.put import PutBatch, PutState, PutTransfer
from remote_server.client.results import Op
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRefused,
)


class PutChannel(Channel):
    """All puts of one client over one transport, oldest first."""

    wake_at = inf
    has_more = False
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

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _prepare(self, transfer: PutTransfer, block_bytes: int) -> None:
        """Cut it into batches. Raises `LocalProtocolError`."""

    @abstractmethod
    def _send_batch(self, batch: PutBatch) -> int:
        """Send it and return the request's id; 0 when that must wait: nothing was sent then."""

    def _returned(self, batch: PutBatch, *, answered: bool) -> None:
        """A batch was `answered`, or given up: release what it holds."""

    def _reaches(self, transfer: PutTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a put whose rows this transport reaches."""
        if not isinstance(request, PutTransfer) or not self._reaches(request):
            return False
        self.accept(request)
        return True

    def accept(self, transfer: PutTransfer) -> None:
        """Take over `transfer`. It ends at once when it cannot be sent."""
        try:
            declaration = self._session.declarations[transfer.namespace]
            self._prepare(transfer, declaration.block_bytes)
            self._session.require(transfer.namespace)
            self._require_way()
        except KVFerryError as error:
            local = isinstance(error, LocalProtocolError)
            self._counters["local_errors" if local else "unavailable"] += 1
            transfer.abandon(error)
            return
        if not transfer.keys:
            transfer.resolve()
            return
        self._transfers[transfer] = None
        self.queued_bytes += transfer.total_bytes
        self.wake_at = min(self.wake_at, transfer.deadline)

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first.

        One a turn: hashing a window's worth of small blocks would delay lookups.
        """
        self.has_more = False
        for transfer in self._transfers:
            if transfer.to_send:
                self._send_next(transfer)
                return

    def _send_next(self, transfer: PutTransfer) -> None:
        part = transfer.to_send[0]
        lengths = [row.nbytes for row in transfer.rows[part.start : part.stop]]
        batch = PutBatch(transfer, part, lengths, sum(lengths))
        if self._batches and self._window_bytes + batch.num_bytes > self._most_bytes:
            return
        request_id = self._send_batch(batch)
        if not request_id:
            return
        transfer.sent(batch)
        self._batches[request_id] = batch
        self._window_bytes += batch.num_bytes
        self._counters["bytes_out"] += batch.num_bytes
        self._counters["blocks_out"] += len(part)
        self.has_more = True

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""
        return request_id in self._batches

    def answered(self, reply: protocol.Reply) -> None:
        """Process the reply to an awaited batch. Raises `RemoteProtocolError` for a wrong kind."""
        batch = self._batches[reply.request_id]
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
            transfer.wait_for_release()
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
    def _waiting(self) -> list[PutTransfer]:
        """The puts that have not ended."""
        return [*self._transfers, *self._releasing]

    @property
    def releasing(self) -> Sequence[PutTransfer]:
        return [*self._releasing]

    @property
    def num_waiting(self) -> int:
        """Puts that callers wait for."""
        return len(self._waiting)

    def check(self) -> None:
        """Assert that window and sums equal the batches, and that each put is where it belongs."""
        in_flight = [batch.num_bytes for batch in self._batches.values()]
        assert self._window_bytes == sum(in_flight), (self._window_bytes, in_flight)
        assert self.queued_bytes == sum(transfer.total_bytes for transfer in self._waiting)
        assert sum(transfer.num_in_flight for transfer in self._waiting) == len(self._batches)
        assert not any(transfer.settled for transfer in self._transfers), "a settled put is listed"
        assert all(transfer.settled for transfer in self._releasing), "it is not settled"
        assert {one.state for one in self._transfers} <= {PutState.PREPARED, PutState.SENT}
        assert {one.state for one in self._releasing} <= {PutState.RELEASING}
