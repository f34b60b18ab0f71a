"""Puts over tcp: rows sent from where they are, and held until libzmq has released them."""

from collections.abc import Container, Sequence

from remote_server import protocol
from remote_server.client.channel import ClientContext
from remote_server.client.put import PutBatch, PutTransfer
from remote_server.client.put_channel import PutChannel
from remote_server.errors import KVFerryError


class TcpPuts(PutChannel):
    """All puts of one client over tcp, oldest first: rows are sent without a copy.

    A batch is one `Put` message of about `batch_bytes`. libzmq sends large rows from where they
    are, so a row is busy until libzmq releases its frame, even after the server's reply. A put
    therefore ends in two steps: it is settled (every batch has its reply, or the put is given up),
    and its future resolves when none of its rows is lent any more.

    A put given up while libzmq holds its rows costs the connection: only closing it makes libzmq
    release them. Other puts on it lose only time: their batches in flight are sent again, within
    their own deadlines. A block that had arrived the first time then exists already.
    """

    name = "puts"

    def __init__(self, client_context: ClientContext) -> None:
        """Raises as `Connection` does."""
        self._connection = client_context.connect()
        super().__init__(client_context, self._connection, client_context.config.put_window_bytes)
        self._settling: dict[PutTransfer, None] = {}
        """Settled, and waiting for libzmq to release their rows."""

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def _prepare(self, transfer: PutTransfer, block_bytes: int) -> None:
        transfer.prepare(block_bytes, self._config.batch_bytes, self._session.limits)

    def _require_way(self) -> None:
        self._require_connection()

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first."""
        self.blocked = False
        super().pump(now)

    def _send_batch(self, batch: PutBatch) -> int:
        if not self._connection.connected:
            return 0
        transfer, limits = batch.transfer, self._session.limits
        request_id, checked = self._next_request_id(), self._config.integrity
        message = transfer.message(batch.part, request_id, limits, checked=checked)
        frames = transfer.frames(batch.part, message.blocks_per_frame)
        if not self._connection.send(protocol.encode(message), frames):
            self.blocked = True
            return 0
        return request_id

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come."""
        if not self._batches and not self._connection.readable:
            return
        self._read_replies(self._take)

    def _take(self, reply: protocol.Reply) -> None:
        if self.awaits(reply.request_id):
            self.answered(reply)
        else:
            self._counters["late_replies"] += 1

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _retire(self, transfer: PutTransfer, error: KVFerryError | None = None) -> None:
        """End it now, or as soon as libzmq has released its rows."""
        del self._transfers[transfer]
        transfer.error = transfer.error or error
        if transfer.is_released():
            self._finish(transfer)
        else:
            self._settling[transfer] = None

    @property
    def releasing(self) -> Sequence[PutTransfer]:
        return [*self._settling]

    def expire(self, now: float) -> None:
        """End the puts whose rows libzmq has released, and give up those whose deadline has passed,
        including those that only wait for libzmq."""
        for transfer in [transfer for transfer in self._settling if transfer.is_released()]:
            del self._settling[transfer]
            self._finish(transfer)
        super().expire(now)
        if any(put.deadline <= now and not put.cut_off for put in self._settling):
            self.reset()

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put, including those that only wait for libzmq."""
        super().end_all(error)
        if any(not put.cut_off for put in self._settling):
            self.reset()

    def reset(self) -> None:
        """Open a new connection. Puts that wait are sent again."""
        self._counters["put_resets"] += 1
        self._connection.reopen()
        for request_id, batch in reversed(list(self._batches.items())):
            self._counters["batches_resent"] += 1
            batch.transfer.to_send.appendleft(batch.part)
            self._forget(request_id)
        for transfer in self._waiting:
            transfer.cut_off = True

    @property
    def _waiting(self) -> list[PutTransfer]:
        return [*self._transfers, *self._settling]

    def check(self) -> None:
        """Also assert that puts that only wait for libzmq have no other work."""
        super().check()
        assert all(transfer.settled for transfer in self._settling), "it is not settled"
