"""Puts over tcp: rows go out without a copy, and come back when libzmq has let go of them.

A put is sent in batches, each one `Put` message of about `batch_bytes`; the window bounds what
was sent and not answered, over all puts. Large rows are handed to libzmq as they lie, so a row
is busy until libzmq has let go of its frame, whatever the server says. A put therefore ends in
two steps: its fate is settled (every batch answered, or given up), and then, when none of its
rows is lent any more, its future resolves.

A put given up while libzmq still holds its rows costs the connection: closing it is the only
way to make libzmq let go. Other puts on it lose nothing but time: what they had in flight is
sent again, at the latest until their own deadlines. A block that had arrived after all then
simply exists.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from remote_server import protocol
from remote_server.client.connection import Connection
from remote_server.client.put_transfer import PutTransfer
from remote_server.client.results import ClientConfig, Counters
from remote_server.client.session import Session
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRefused,
    ServerUnavailable,
)

logger = logging.getLogger(__name__)

_TURN_MESSAGES = 64


@dataclass(slots=True, eq=False)
class _Batch:
    """One Put message on its way."""

    transfer: PutTransfer
    part: range
    num_bytes: int


class PutLane:
    """All puts of one client, oldest first."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        config: ClientConfig,
        counters: Counters,
        heard: Callable[[protocol.Reply], bool],
        next_request_id: Callable[[], int],
    ) -> None:
        self._connection = connection
        self._session = session
        self._config = config
        self._counters = counters
        self._heard = heard
        self._next_request_id = next_request_id
        self._transfers: dict[PutTransfer, None] = {}
        self._leaving: dict[PutTransfer, None] = {}
        """Settled, and waiting for libzmq to let go of their rows."""
        self._batches: dict[int, _Batch] = {}
        self._window_bytes = 0
        self.wake_at = inf
        self.blocked = False
        """The connection would not take a message; try again shortly."""
        self.has_more = False
        """The next turn may have something to send."""
        self.queued_bytes = 0

    # ── taking over ──────────────────────────────────────────────────────────────────────

    def accept(self, transfer: PutTransfer) -> None:
        """Take over `transfer`; it ends at once when it cannot be sent."""
        try:
            declaration = self._session.declaration(transfer.namespace)
            limits, batch_bytes = self._session.limits, self._config.batch_bytes
            transfer.prepare(declaration.block_bytes, batch_bytes, limits)
            self._session.require(transfer.namespace)
            if not (self._connection.connected or self._connection.reopening):
                raise ServerUnavailable("the connection for puts is down")
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

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Send the next message if the window allows it, oldest put first.

        One a turn: hashing a window's worth of small blocks would keep lookups waiting.
        """
        self.blocked = self.has_more = False
        for transfer in self._transfers:
            if transfer.to_send:
                self._send_next(transfer)
                return

    def _send_next(self, transfer: PutTransfer) -> None:
        part = transfer.to_send[0]
        num_bytes = sum(transfer.rows[index].nbytes for index in part)
        full = self._window_bytes + num_bytes > self._config.put_window_bytes
        if (full and self._batches) or not self._connection.connected:
            return
        message = transfer.message(
            part,
            self._next_request_id(),
            self._session.limits,
            checked=self._config.integrity,
        )
        frames = transfer.frames(part, message.blocks_per_frame)
        if not self._connection.send(protocol.encode(message), frames):
            self.blocked = True
            return
        transfer.to_send.popleft()
        transfer.num_in_flight += 1
        transfer.bytes_sent += num_bytes
        self._batches[message.request_id] = _Batch(transfer, part, num_bytes)
        self._window_bytes += num_bytes
        self._counters["bytes_out"] += num_bytes
        self._counters["blocks_out"] += len(part)
        self.has_more = True

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def receive(self) -> None:
        """Take the replies that are here."""
        if not self._batches and not self._connection.readable:
            return
        for _ in range(_TURN_MESSAGES):
            try:
                reply = self._connection.receive()
                if reply is None:
                    return
                if self._connection.discard_rest():
                    raise RemoteProtocolError("a put was answered with a payload")
                if self._heard(reply):
                    self._take(reply)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("puts: %s", error)

    def _take(self, reply: protocol.Reply) -> None:
        batch = self._batches.get(reply.request_id)
        if batch is None:
            self._counters["late_replies"] += 1
            return
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
        if transfer.settled:
            self._leave(transfer)

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────

    def _forget(self, request_id: int) -> None:
        batch = self._batches.pop(request_id)
        batch.transfer.num_in_flight -= 1
        self._window_bytes -= batch.num_bytes

    def _leave(self, transfer: PutTransfer) -> None:
        """Its fate is settled; it ends now, or as soon as libzmq has let go of its rows."""
        del self._transfers[transfer]
        if transfer.let_go():
            self._finish(transfer)
        else:
            self._leaving[transfer] = None

    def _finish(self, transfer: PutTransfer) -> None:
        self.queued_bytes -= transfer.total_bytes
        transfer.resolve()

    @property
    def is_settling(self) -> bool:
        """Whether to look again soon: nobody tells us when libzmq lets go of a row."""
        return bool(self._leaving)

    def settle(self) -> None:
        """End the puts whose rows libzmq has let go of since."""
        for transfer in [transfer for transfer in self._leaving if transfer.let_go()]:
            del self._leaving[transfer]
            self._finish(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

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
        if any(put.deadline <= now and not put.cut_off for put in self._leaving):
            self.reset()
        deadlines = (transfer.deadline for transfer in (*self._transfers, *self._leaving))
        self.wake_at = min((deadline for deadline in deadlines if deadline > now), default=inf)

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put, also those that only wait for libzmq."""
        self._give_up(list(self._transfers), error)
        if any(not put.cut_off for put in self._leaving):
            self.reset()

    def lost(self) -> None:
        """The connection broke: nothing that was sent on it will be answered."""
        self.end_all(ServerUnavailable("the connection for puts broke"))

    def reset(self) -> None:
        """A new connection. Puts that wait are sent again."""
        self._counters["put_resets"] += 1
        self._connection.reopen()
        for request_id, batch in reversed(list(self._batches.items())):
            self._counters["batches_resent"] += 1
            batch.transfer.to_send.appendleft(batch.part)
            self._forget(request_id)
        for transfer in (*self._transfers, *self._leaving):
            transfer.cut_off = True

    def _give_up(self, transfers: list[PutTransfer], error: KVFerryError) -> None:
        given_up = set(transfers)
        for request_id, batch in list(self._batches.items()):
            if batch.transfer in given_up:
                self._forget(request_id)
        for transfer in transfers:
            transfer.error = error
            transfer.to_send.clear()
            self._leave(transfer)

    def leaving(self) -> list[PutTransfer]:
        """The puts that are over but for libzmq."""
        return list(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Puts that callers wait for."""
        return len(self._transfers) + len(self._leaving)

    def check(self) -> None:
        """The window is exactly what the batches in flight carry, and so on down."""
        in_flight = [batch.num_bytes for batch in self._batches.values()]
        assert self._window_bytes == sum(in_flight), (self._window_bytes, in_flight)
        everyone = [*self._transfers, *self._leaving]
        assert self.queued_bytes == sum(transfer.total_bytes for transfer in everyone)
        assert sum(transfer.num_in_flight for transfer in everyone) == len(self._batches)
        assert all(transfer.settled for transfer in self._leaving), "left with work to do"
        assert not any(transfer.settled for transfer in self._transfers), "settled and kept"
