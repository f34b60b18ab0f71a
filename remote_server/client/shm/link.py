"""The link of shared memory: the connection for its messages, and the attachment of the region."""

from collections.abc import Container
from functools import partial

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request, Transfer
from remote_server.client.shm.attachment import Attachment
from remote_server.client.shm.user import LinkUser
from remote_server.errors import KVFerryError, ServerUnavailable
from remote_server.protocol import ErrorCode, Release
from remote_server.shm.mapping import ArenaView
from remote_server.shm.region import RegisteredRegion, Tickets


class ShmLink(Channel):
    """The connection for messages of shared memory, and the attachment. It has no requests of its
    own: `users` have, and come after it in the list of channels."""

    name = "shared memory"

    def __init__(
        self, client_context: ClientContext, region: RegisteredRegion, tickets: Tickets
    ) -> None:
        """Raises as `Connection` does."""
        self._connection = client_context.connect()
        super().__init__(client_context, self._connection)
        self.region = region
        self.tickets = tickets
        self.users: list[LinkUser] = []
        self._attachment = Attachment(region, tickets, client_context, self._stop_copying)
        self._attached = False

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def in_use(self) -> bool:
        """Rows in the region travel through shared memory now. Any thread may read it, so it is
        false from the moment that the session knows another epoch, before the next `_poll`."""
        current = self._attachment.epoch == self._session.epoch
        return self._attached and current and self._connection.available

    @property
    def region_transport(self) -> str:
        return "shm" if self.in_use else ""

    @property
    def ready(self) -> bool:
        """Its rows travel through shared memory, or tcp is allowed."""
        return self.in_use or self._config.transport != "shm"

    @property
    def opening(self) -> bool:
        """Its connection is being opened on demand."""
        return self._connection.on_demand and self._connection.opening

    @property
    def needs_connection(self) -> bool:
        return any(user.needs_connection for user in self.users)

    @property
    def wake_at(self) -> float:
        return self._attachment.wake_at

    @property
    def arena(self) -> ArenaView | None:
        """The server's blocks, while attached."""
        return self._attachment.arena

    # ── for its users ────────────────────────────────────────────────────────────────────

    def reaches(self, transfer: Transfer) -> bool:
        """Whether `transfer` belongs to shared memory; sets its offsets then."""
        if not self.in_use and self._config.transport != "shm":
            return False
        offsets = self.region.offsets_of(transfer.rows)
        if offsets is None:
            return False
        transfer.offsets = offsets
        return True

    def require(self) -> int:
        """The server's number for our region. Raises `ServerUnavailable` when there is none."""
        if not self._attached:
            raise ServerUnavailable(f"no shared memory: {self._attachment.reason}")
        self._require_way()
        return self._attachment.token

    def send(self, message: protocol.Request) -> bool:
        """Send `message`. False: nothing was sent; try again later."""
        if not self._connection.connected:
            return False
        num_replies = 0 if isinstance(message, Release) else 1
        sent = self._connection.send(protocol.encode(message), num_replies=num_replies)
        self.blocked = self.blocked or not sent
        return sent

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def wakes(self, now: float, readable: Container[object]) -> bool:
        attachment_wakes = self._attachment.wakes(now, self._session, readable)
        return attachment_wakes or super().wakes(now, readable)

    def offer(self, request: Request, now: float) -> bool:
        return False

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come, and poll the attachment. Only then may users copy: a
        lease of a server that has disconnected must not be read."""
        if self._connection.readable or not any(user.copying for user in self.users):
            self._read_replies(partial(self._take, now=now))
        self._poll(now, readable)

    def _take(self, reply: protocol.Reply, now: float) -> None:
        if isinstance(reply, protocol.Error) and reply.code == ErrorCode.UNKNOWN_REGION:
            # The local connection has ended, whether or not this side has noticed.
            self._attachment.fail("the server does not know the region any more", now)
            return
        for user in self.users:
            if user.awaits(reply.request_id):
                user.take(reply, now)
                return
        self._counters["late_replies"] += 1
        for user in self.users:
            user.take_late(reply)

    def _poll(self, now: float, readable: Container[object] = ()) -> None:
        """Poll the attachment; when it has ended, end all transfers that relied on it."""
        attachment = self._attachment
        attachment.poll(now, self._session, readable)
        arena, was_attached = attachment.arena, self._attached
        for user in self.users:
            if arena is not None and not was_attached:
                user.limit(arena.num_bytes)
            elif arena is None and was_attached:
                user.detached(ServerUnavailable(f"shared memory ended: {attachment.reason}"))
        self._attached = arena is not None

    def pump(self, now: float) -> None:
        self.blocked = False

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _stop_copying(self) -> None:
        for user in self.users:
            user.stop_copying()

    def end_all(self, error: KVFerryError) -> None:
        """It has no requests."""

    def lost(self) -> None:
        for user in self.users:
            user.lost()

    def restarted(self, now: float) -> None:
        self._poll(now)

    def reset(self) -> None:
        """Open a new connection, with nothing attached."""
        super().reset()
        self._attachment.hang_up("internal error")
        self._attached = False

    def close(self) -> None:
        """Release the region and all memory of the server."""
        super().close()
        self._attachment.close()
        self.tickets.close()
        self.region.close()
