"""Attachment of a client's region to a server on the same host, over the server's local socket.

    NONE ──welcome names a socket──▶ REQUESTED ──attached──▶ HELD
     ▲                                 │ refused, silent     │ connection ended
     └─────────────────────────────────┴─────────────────────┘

A welcome starts an attempt, so a restarted server is attached anew. A client that cannot reach the
socket is on another host: that is no error, and all transfers use tcp.
"""

import array
import logging
import os
import socket
import struct
from collections.abc import Container
from functools import partial
from math import inf

import zmq

from remote_server import protocol
from remote_server.client.channel import ClientContext, ReplyReader
from remote_server.client.connection import Connection
from remote_server.client.get import GetTransfer
from remote_server.client.put import PutTransfer
from remote_server.client.region import ArenaView, RegisteredRegion, Tickets
from remote_server.client.results import ClientConfig, Counters, GetOutcome
from remote_server.client.shm_channels import ShmGets, ShmPuts
from remote_server.errors import KVFerryError, RemoteProtocolError, ServerUnavailable
from remote_server.plain_text import plain
from remote_server.protocol import Attach, Attached, ErrorCode, Leased, NotAttached, Release
from remote_server.shm.region import NotAttachable

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Wait for a reply to `attach` before the attempt fails."""

RETRY_S = 5.0
"""Pause before the same socket is tried again. A different socket is tried at once."""

_MOST_BYTES = 4096


class Attachment:
    """Offers a region to the session's current server. Used by the I/O thread only."""

    def __init__(
        self,
        region: RegisteredRegion,
        tickets: Tickets,
        poller: zmq.Poller,
        config: ClientConfig,
        counters: Counters,
    ) -> None:
        self._region = region
        self._tickets = tickets
        self._poller = poller
        self._config = config
        self._counters = counters
        self._socket: socket.socket | None = None
        self._data = b""
        self._tried: str | None = None
        self._refused = False
        self._logged: set[str] = set()
        self._unmapping: list[ArenaView] = []
        self.arena: ArenaView | None = None
        """The server's blocks, while attached."""
        self.token = 0
        """The server's number for our region, while attached."""
        self.reason = "no server has offered it yet"
        """Reason why nothing is attached."""
        self._epoch: str | None = None
        self._secret = b""
        self._due = 0.0

    @property
    def wake_at(self) -> float:
        """Time at which `poll` may have work that no socket announces."""
        idle = self._socket is None and (self._refused or not self._tried)
        return inf if idle or self.arena is not None else self._due

    def poll(
        self,
        now: float,
        local_socket: str | None,
        epoch: str | None,
        readable: Container[object],
        secret: bytes = b"",
    ) -> None:
        """Do what is due, given the session's last welcome and the sockets that are `readable`."""
        self._secret = secret
        if self._socket is not None and self._socket.fileno() in readable:
            self._read(epoch, now)
        if self._socket is not None and self.arena is None and now >= self._due:
            self.fail("its local socket does not answer", now)
        if self.arena is not None and epoch != self._epoch:
            self.fail("the server restarted", now)
        if local_socket != self._tried:
            self._tried, self._refused, self._due = local_socket, False, now
            if self._socket is not None and self.arena is None:
                self.hang_up("the server restarted")
            if local_socket == "":
                self._refuse("the server does not offer it")
        if self._socket is None and local_socket and not self._refused and now >= self._due:
            self._connect(local_socket, now)

    def hang_up(self, reason: str) -> None:
        """Close the connection and unmap the arena. No copy may be under way."""
        if self._socket is not None:
            self._poller.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self.arena is not None:
            self.arena.close()
            self._unmapping = [arena for arena in self._unmapping if not arena.unmapped]
            self._unmapping.append(self.arena)
            self.arena = None
            self._counters["shm_detached"] += 1
        self.reason = reason
        self._data = b""

    def close(self) -> None:
        """Hang up, and return when nothing of the server is mapped any more."""
        self.hang_up("the client was closed")
        for arena in self._unmapping:
            arena.join()

    # ── one attempt ──────────────────────────────────────────────────────────────────────

    def _connect(self, name: str, now: float) -> None:
        message = Attach(
            protocol=protocol.PROTOCOL_VERSION,
            client=self._config.client_name,
            region_bytes=self._region.num_bytes,
            secret=self._secret,
        )
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self.fail(f"cannot create a socket: {error.strerror}", now)
            return
        connection.setblocking(False)
        try:
            # A connect on a Unix socket completes or fails at once.
            connection.connect(f"\0{name}")
            _check_server_user(connection)  # before it receives our memory
            socket.send_fds(
                connection, [protocol.encode_local(message)], [self._region.fd, self._tickets.fd]
            )
        except OSError as error:
            connection.close()
            self.fail(f"its local socket cannot be reached: {error.strerror}", now)
            return
        except NotAttachable as error:
            connection.close()
            self._refuse(str(error))
            return
        self._socket = connection
        self._poller.register(connection.fileno(), zmq.POLLIN)
        self._due = now + ANSWER_S

    def _read(self, epoch: str | None, now: float) -> None:
        assert self._socket is not None
        files: list[int] = []
        try:
            data, files = _receive(self._socket)
            if not data or self.arena is not None:
                # The server sends nothing after `attached`: this is the end of the connection.
                self.fail("the server ended the connection", now)
            else:
                self._data += data
                if len(self._data) > _MOST_BYTES:
                    raise RemoteProtocolError("the reply to attach is too long")
                if files or protocol.is_complete(self._data):
                    self._take(protocol.decode_local(self._data), files, epoch)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError, NotAttachable) as error:
            self._refuse(str(error))
        finally:
            for file in files:
                os.close(file)

    def _take(self, reply: protocol.LocalMessage, files: list[int], epoch: str | None) -> None:
        assert self._socket is not None
        match reply:
            case Attached():
                if len(files) != 1 or reply.epoch != epoch:
                    raise RemoteProtocolError("the attached reply is not from this server")
                self.arena = ArenaView(files[0], reply.arena_bytes, _user_of(self._socket))
                self.token, self._epoch = reply.region, reply.epoch
                self._counters["shm_attached"] += 1
                logger.info("%s: shared memory in use", self._config.endpoint)
            case NotAttached():
                self._refuse(reply.reason)
            case _:
                raise RemoteProtocolError("not a reply to attach")

    def _refuse(self, reason: str) -> None:
        """Give up on this server: a second attempt would be refused as well."""
        self._counters["shm_refused"] += 1
        self._refused = True
        self.hang_up(reason)
        self._log_once(reason)

    def fail(self, reason: str, now: float) -> None:
        """Hang up, and try again after `RETRY_S`."""
        self.hang_up(reason)
        self._due = now + RETRY_S
        self._log_once(reason)

    def _log_once(self, reason: str) -> None:
        if reason in self._logged:
            return
        self._logged.add(reason)
        needed = self._config.transport == "shm"
        logger.log(
            logging.WARNING if needed else logging.INFO,
            "%s: no shared memory, %s: %s",
            self._config.endpoint,
            "so its rows are not transferred" if needed else "tcp is used",
            plain(reason),
        )


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
        self.gets = ShmGets(region, client_context, self._require, self._send)
        self.puts = ShmPuts(self._tickets, client_context, self._require, self._send)
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


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    _, uid, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return int(uid)


def _check_server_user(connection: socket.socket) -> None:
    """Raise `NotAttachable` unless the listener's user is ours or root; root accepts any.

    After a server has ended, any process may take the name of its socket. A client that has not
    noticed the end yet would hand its memory to that process.
    """
    uid = _user_of(connection)
    if uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise NotAttachable(f"its local socket belongs to user {uid}")


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The bytes that can be read, and the files that came with them, which the caller owns."""
    files = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(
        _MOST_BYTES, socket.CMSG_SPACE(4 * files.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return data, list(files)
