"""Put channel: the steps of a put that all transports share, and puts over tcp.

A put is sent in batches. The window bounds the bytes sent and not acknowledged, over all puts. A
put is settled when every batch has its reply, or when it is given up. Over tcp rows are sent from
where they are, and held until libzmq has released them.
"""

from abc import abstractmethod
from collections.abc import Container, Sequence
from math import inf

import zmq

from remote_server import protocol
from remote_server.client.channel import Channel, ClientContext, Request
from remote_server.client.connection import Connection
from remote_server.client.put import PutBatch, PutState, PutTransfer
from remote_server.client.results import Op
from remote_server.client.session import Limits
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


# Smaller rows are packed, several to a frame: a frame of its own costs tens of microseconds on both
# sides, which is more than copying the row.
_PACK_BELOW_BYTES = 256 << 10
_PACKED_FRAME_BYTES = 1 << 20


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

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def _prepare(self, transfer: PutTransfer, block_bytes: int) -> None:
        transfer.prepare(block_bytes, self._config.batch_bytes, self._session.limits)

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first."""
        self.blocked = False
        super().pump(now)

    def _send_batch(self, batch: PutBatch) -> int:
        if not self._connection.connected:
            return 0
        transfer, part = batch.transfer, batch.part
        rows = transfer.rows[part.start : part.stop]
        message = protocol.Put(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=transfer.keys[part.start : part.stop], lengths=batch.lengths,
            checksums=transfer.checksums(part) if self._config.integrity else [],
            blocks_per_frame=_blocks_per_frame(batch.lengths, self._session.limits),
            deferred=transfer.deferred, force=transfer.force,
            chain=protocol.select(transfer.chain, part),
        )  # fmt: skip
        if message.blocks_per_frame > 1:
            frames = _packed(rows, message.blocks_per_frame)
        else:
            frames = [zmq.Frame(view, copy=False) for view in transfer.lend(part)]
        if not self._connection.send(protocol.encode(message), frames):
            self.blocked = True
            return 0
        return message.request_id

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

    def expire(self, now: float) -> None:
        """Also cut off the puts that wait for libzmq beyond their deadline."""
        super().expire(now)
        if any(put.deadline <= now and not put.cut_off for put in self._releasing):
            self.reset()

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put, including those that only wait for libzmq."""
        super().end_all(error)
        if any(not put.cut_off for put in self._releasing):
            self.reset()

    def reset(self) -> None:
        """Open a new connection. Puts that wait are sent again."""
        self._counters["put_resets"] += 1
        super().reset()
        for request_id, batch in reversed(list(self._batches.items())):
            self._counters["batches_resent"] += 1
            batch.transfer.send_again(batch)
            self._forget(request_id)
        for transfer in self._waiting:
            transfer.cut_off = True


def _blocks_per_frame(lengths: list[int], limits: Limits) -> int:
    largest = max(lengths)
    if largest >= _PACK_BELOW_BYTES:
        return 1
    return max(1, min(_PACKED_FRAME_BYTES, limits.max_frame_bytes) // largest)


def _packed(rows: list[memoryview], per_frame: int) -> list[zmq.Frame]:
    return [
        zmq.Frame(b"".join(rows[first : first + per_frame]), copy=False)
        for first in range(0, len(rows), per_frame)
    ]
