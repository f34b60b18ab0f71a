"""Attachment of a client's region to a server on the same host, over the server's local socket.

    NONE ──welcome names a socket──▶ REQUESTED ──attached──▶ HELD
     ▲                                 │ refused, silent     │ connection ended
     └─────────────────────────────────┴─────────────────────┘

A welcome starts an attempt, so a restarted server is attached anew. A client that cannot reach the
socket is on another host: that is no error, and all transfers use tcp. A welcome has no checksum:
another one is requested after `RETRY_S`, and less and less often until an attempt succeeds.

With `ClientConfig.idle_close_s` the region is attached at the welcome all the same. The map of an
arena is made and faulted in on another thread, which takes seconds for a large one: too long for
the first transfer. One client of many is on the server's host, and the others cost an attempt a
minute. Only the connection for messages opens on demand.
"""

import logging
import os
import socket
from collections.abc import Callable, Container
from math import inf

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.connection.session import Session
from remote_server.errors import RemoteProtocolError
from remote_server.plain_text import plain
from remote_server.protocol import Attach, Attached, NotAttached
from remote_server.shm.mapping import ArenaView, NotAttachable, user_of
from remote_server.shm.region import RegisteredRegion, Tickets

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Wait for a reply to `attach` before the attempt fails."""

RETRY_S = 5.0
"""Pause before another welcome is requested and the same socket is tried again. It doubles while
attempts fail. A welcome with another socket or secret is tried at once."""

BUSY_S = 0.05
"""The same when the server had no place for the attempt. It doubles up to `RETRY_S`, and up to
`LONGEST_FULL_S` where the kernel has refused the attempt, which costs the server nothing."""

LONGEST_FULL_S = 0.1

LONGEST_RETRY_S = 60.0
"""The pause of a client on another host, whose attempts all fail."""

_MOST_BYTES = 4096
_MOST_FILES = 4


class Attachment:
    """Offers a region to the session's current server. Used by the I/O thread only."""

    def __init__(
        self,
        region: RegisteredRegion,
        tickets: Tickets,
        client_context: ClientContext,
        stop_copying: Callable[[], None],
    ) -> None:
        """`stop_copying` is called before the arena is unmapped. When it returns, no thread reads
        the arena."""
        self._stop_copying = stop_copying
        self._region = region
        self._tickets = tickets
        self._poll_set = client_context.poll_set
        self._config = client_context.config
        self._counters = client_context.counters
        self._socket: socket.socket | None = None
        self._data = b""
        self._tried: tuple[str | None, bytes] = None, b""
        """The socket and the secret of the last attempt."""
        self._refused = False
        self._logged: set[str] = set()
        self._unmapping: list[ArenaView] = []
        self.arena: ArenaView | None = None
        """The server's blocks, while attached."""
        self.token = 0
        """The server's number for our region, while attached."""
        self.reason = "no server has offered it yet"
        """Reason why nothing is attached."""
        self.epoch: str | None = None
        """The server's boot to which we are, or were last, attached."""
        self._due = 0.0
        self._pause_s = RETRY_S
        self._busy_s = BUSY_S
        self._was_busy = False

    @property
    def wake_at(self) -> float:
        """Time at which `poll` may have work that no socket announces."""
        idle = self._socket is None and self._tried[0] is None
        return inf if idle or self.arena is not None else self._due

    def wakes(self, now: float, session: Session, readable: Container[object]) -> bool:
        """Whether `poll` has something to do."""
        if self._socket is not None and self._socket.fileno() in readable:
            return True
        if (session.local_socket, session.local_secret) != self._tried:
            return True
        return self.wake_at <= now or (self.arena is not None and session.epoch != self.epoch)

    def poll(self, now: float, session: Session, readable: Container[object]) -> None:
        """Do what is due, given the session's last welcome and the sockets that are `readable`."""
        local_socket, secret, epoch = session.local_socket, session.local_secret, session.epoch
        if self._socket is not None and self._socket.fileno() in readable:
            self._read(epoch, now)
        if self._socket is not None and self.arena is None and now >= self._due:
            self.fail("its local socket does not answer", now)
        if self.arena is not None and epoch != self.epoch:
            self.fail("the server restarted", now)
        is_new = (local_socket, secret) != self._tried
        if is_new:
            self._tried, self._refused, self._due = (local_socket, secret), False, now
            self._pause_s, self._busy_s, self._was_busy = RETRY_S, BUSY_S, False
            if self._socket is not None and self.arena is None:
                self.hang_up("the server restarted")
            if local_socket == "":
                self._refuse("the server does not offer it")
        if self._socket is None and local_socket is not None and now >= self._due:
            if not is_new and not self._was_busy:
                session.renew_welcome()
                self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)
            self._was_busy = False
            self._due = now + self._pause_s
            if local_socket and not self._refused:
                self._connect(local_socket, secret, now)

    def hang_up(self, reason: str) -> None:
        """Close the connection, end all copies, and unmap the arena."""
        if self._socket is not None:
            self._poll_set.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self.arena is not None:
            self._stop_copying()
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

    def _connect(self, name: str, secret: bytes, now: float) -> None:
        message = Attach(
            protocol=protocol.PROTOCOL_VERSION, client=self._config.client_name,
            region_bytes=self._region.num_bytes, secret=secret,
        )  # fmt: skip
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self.fail(f"cannot create a socket: {error.strerror}", now)
            return
        connection.setblocking(False)
        try:
            # A connect on a Unix socket completes or fails at once: by EAGAIN when as many wait to
            # be accepted as may.
            connection.connect(f"\0{name}")
            _check_server_user(connection)  # before it receives our memory
            socket.send_fds(
                connection, [protocol.encode_local(message)], [self._region.fd, self._tickets.fd]
            )
        except BlockingIOError:
            connection.close()
            self._busy("others fill its local socket", now, LONGEST_FULL_S)
            return
        except OSError as error:
            connection.close()
            self.fail(f"its local socket cannot be reached: {error.strerror}", now)
            return
        except NotAttachable as error:
            connection.close()
            self._refuse(str(error))
            return
        self._socket = connection
        self._poll_set.register(connection.fileno())
        self._due = now + ANSWER_S

    def _read(self, epoch: str | None, now: float) -> None:
        assert self._socket is not None
        files: list[int] = []
        try:
            data, files, _, _ = socket.recv_fds(
                self._socket, _MOST_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC
            )
            if not data or self.arena is not None:
                # The server sends nothing after `attached`: this is the end of the connection.
                self.fail("the server ended the connection", now)
            else:
                self._data += data
                if len(self._data) > _MOST_BYTES:
                    raise RemoteProtocolError("the reply to attach is too long")
                if files or protocol.is_complete(self._data):
                    self._take(protocol.decode_local(self._data), files, epoch, now)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError, NotAttachable) as error:
            self._refuse(str(error))
        finally:
            for file in files:
                os.close(file)

    def _take(
        self, reply: protocol.LocalMessage, files: list[int], epoch: str | None, now: float
    ) -> None:
        assert self._socket is not None
        match reply:
            case Attached():
                if len(files) != 1 or reply.epoch != epoch:
                    raise RemoteProtocolError("the attached reply is not from this server")
                self.arena = ArenaView(files[0], reply.arena_bytes, user_of(self._socket))
                self.token, self.epoch = reply.region, reply.epoch
                self._pause_s, self._busy_s = RETRY_S, BUSY_S
                self._counters["shm_attached"] += 1
                logger.info("%s: shared memory in use", self._config.endpoint)
            case NotAttached(again=True):
                self._busy(reply.reason, now)
            case NotAttached():
                self._refuse(reply.reason)
            case _:
                raise RemoteProtocolError("not a reply to attach")

    def _refuse(self, reason: str) -> None:
        """Give up on this socket and secret: a second attempt would be refused as well."""
        self._counters["shm_refused"] += 1
        self._refused = True
        self.hang_up(reason)
        self._log_once(reason)

    def _busy(self, reason: str, now: float, longest_s: float = RETRY_S) -> None:
        """The server had no place for this attempt: try again soon."""
        self._counters["shm_busy"] += 1
        self.fail(reason, now)
        self._due, self._was_busy = now + self._busy_s, True
        self._busy_s = min(2 * self._busy_s, longest_s)

    def fail(self, reason: str, now: float) -> None:
        """Hang up, and try again after the pause."""
        self.hang_up(reason)
        self._due = now + self._pause_s
        self._log_once(reason)

    def _log_once(self, reason: str) -> None:
        if reason in self._logged:
            return
        self._logged.add(reason)
        needed = self._config.transport == "shm"
        level = logging.WARNING if needed else logging.INFO
        effect = "so its rows are not transferred" if needed else "tcp is used"
        endpoint = self._config.endpoint
        logger.log(level, "%s: no shared memory, %s: %s", endpoint, effect, plain(reason))


def _check_server_user(connection: socket.socket) -> None:
    """Raise `NotAttachable` unless the listener's user is ours or root; root accepts any.

    After a server has ended, any process may take the name of its socket. A client that has not
    noticed the end yet would hand its memory to that process.
    """
    uid = user_of(connection)
    if uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise NotAttachable(f"its local socket belongs to user {uid}")
