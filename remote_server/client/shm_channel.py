"""Shared-memory channel: a connection for its small messages, the attachment, its puts and gets.

Rows outside the registered region never come here. Rows inside it do when the server has attached
the region, or when no other transport is allowed (`ClientConfig.transport`).
"""

from collections.abc import Callable, Container
from functools import partial

import zmq

from remote_server import protocol
from remote_server.client.attachment import Attachment
from remote_server.client.client_context import ClientContext, ReplyReader
from remote_server.client.connection import Connection
from remote_server.client.get_window import GetTransfer
from remote_server.client.lease import SHARE_OF_ARENA
from remote_server.client.put_channel import PutChannel
from remote_server.client.put_transfer import PutBatch, PutTransfer
from remote_server.client.region import RegisteredRegion, Tickets
from remote_server.client.results import GetOutcome
from remote_server.client.shared_gets import SharedGets
from remote_server.errors import KVFerryError, ServerUnavailable
from remote_server.fault_points import Pause, Point, no_pause
from remote_server.protocol import ErrorCode, Leased, PutShared, Release


class SharedPuts(PutChannel):
    """All puts of one client whose rows are in its region, oldest first.

    The server copies the rows itself while their ticket is valid. A batch is one `PutShared`
    message for a quarter of the window, with the offsets of the rows.

    Nothing in this process holds a row, so a put ends at once: every batch has its reply, or the
    tickets of the others are withdrawn. The server may be reading a row then, and may read what its
    next owner writes there; it discards what it has read.
    """

    def __init__(
        self,
        tickets: Tickets,
        client_context: ClientContext,
        require: Callable[[], int],
        send: Callable[[protocol.Request], bool],
    ) -> None:
        """`require` returns the server's number for our region, or raises why there is none."""
        super().__init__(client_context, client_context.config.shared_window_bytes)
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


class ShmChannel:
    """The transfers of one registered region. Used by the I/O thread only."""

    def __init__(
        self,
        region: RegisteredRegion,
        connection: Connection,
        poller: zmq.Poller,
        client_context: ClientContext,
    ) -> None:
        """Raises `OSError` when the kernel has no memory for tickets."""
        self._region = region
        self._connection = connection
        self._session = client_context.session
        self._config = client_context.config
        self._counters = client_context.counters
        self._reply_reader = ReplyReader(connection, client_context, "shared memory")
        self._tickets = Tickets()
        self._attachment = Attachment(
            region, self._tickets, poller, client_context.config, client_context.counters
        )
        self._attached = False
        self.gets = SharedGets(region, client_context, self._require, self._send)
        self.puts = SharedPuts(self._tickets, client_context, self._require, self._send)
        self.blocked = False
        """The connection refused a message; try again shortly."""

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def in_use(self) -> bool:
        """Rows in the region travel through shared memory now. Any thread may read it."""
        return self._attached and self._connection.connected

    def takes(self, transfer: PutTransfer | GetTransfer) -> bool:
        """Whether `transfer` belongs to this channel; sets its offsets then."""
        if not self.in_use and self._config.transport != "shm":
            return False
        offsets = self._region.offsets_of(transfer.rows)
        if offsets is None:
            return False
        transfer.offsets = offsets
        return True

    @property
    def wake_at(self) -> float:
        """Time at which something of it may be late or due."""
        return min(self.gets.wake_at, self.puts.wake_at, self._attachment.wake_at)

    @property
    def has_more(self) -> bool:
        """The next turn has work."""
        return self.gets.has_more or (self.in_use and self.puts.has_more)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all its transfers that have not ended."""
        return self.gets.queued_bytes + self.puts.queued_bytes

    @property
    def num_waiting(self) -> int:
        """Transfers that callers wait for."""
        return self.gets.num_waiting + self.puts.num_waiting

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come, poll the attachment, and copy one turn's worth.

        In this order: a lease of a server that has disconnected must not be read.
        """
        # While blocks remain to be copied, an extra poll is not worth its cost.
        if self._connection.readable or not self.gets.has_more:
            self._reply_reader.empty_into(partial(self._take, now=now))
        self.poll(now, readable)
        self.gets.copy()

    def _take(self, reply: protocol.Reply, now: float) -> None:
        arena = self._attachment.arena
        if isinstance(reply, protocol.Error) and reply.code == ErrorCode.UNKNOWN_REGION:
            # The local connection has ended, whether or not this side has noticed.
            self._attachment.fail("the server does not know the region any more", now)
        elif self.puts.awaits(reply.request_id):
            self.puts.take(reply)
        elif self.gets.awaits(reply.request_id) and arena is not None:
            self.gets.take(reply, arena, now)
        else:
            self._counters["late_replies"] += 1
            if isinstance(reply, Leased):
                self.gets.release(reply)

    def poll(self, now: float, readable: Container[object] = ()) -> None:
        """Poll the attachment; when it has ended, end all transfers that relied on it."""
        session = self._session
        self._attachment.poll(
            now, session.local_socket, session.epoch, readable, session.local_secret
        )
        arena = self._attachment.arena
        attached = arena is not None
        if arena is not None and not self._attached:
            self.gets.limit(arena.num_bytes)
            self.puts.limit(arena.num_bytes)
        if self._attached and not attached:
            error = ServerUnavailable(f"shared memory ended: {self._attachment.reason}")
            self.gets.lost(error, detached=True)
            self.puts.end_all(error)
        self._attached = attached

    def expire(self, now: float) -> None:
        """Give up what is late."""
        self.gets.expire(now)
        self.puts.expire(now)

    def pump(self, now: float) -> None:
        """Send what the connection and the windows allow."""
        self.blocked = False
        if self.in_use:
            self.gets.pump(now)
            self.puts.pump()

    def _send(self, message: protocol.Request) -> bool:
        if not self._connection.connected:
            return False
        num_replies = 0 if isinstance(message, Release) else 1
        sent = self._connection.send(protocol.encode(message), num_replies=num_replies)
        self.blocked = self.blocked or not sent
        return sent

    def _require(self) -> int:
        if not self._attached:
            raise ServerUnavailable(f"no shared memory: {self._attachment.reason}")
        if not (self._connection.connected or self._connection.reopening):
            raise ServerUnavailable("the connection for shared memory is down")
        return self._attachment.token

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def end_all(self, error: KVFerryError, outcome: GetOutcome) -> None:
        """End every transfer."""
        self.gets.end_all(error, outcome)
        self.puts.end_all(error)

    def lost(self) -> None:
        """End every transfer: the connection broke, and no reply will come."""
        error = ServerUnavailable("the connection for shared memory broke")
        self.gets.lost(error, detached=False)
        self.puts.end_all(error)

    def reset(self) -> None:
        """Open a new connection, with nothing attached. Everything has ended."""
        self.gets.reset()
        self._connection.reopen()
        self._attachment.hang_up("internal error")
        self._attached = False

    def close(self) -> None:
        """Release the region and all memory of the server. Everything has ended."""
        self._attachment.close()
        self._tickets.close()
        self._region.close()

    def check(self) -> None:
        """Assert that the books balance."""
        self.gets.check()
        self.puts.check()
