"""Where clients on this host offer their memory, and show that they are on this host."""

import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from remote_server import protocol
from remote_server.errors import RemoteProtocolError
from remote_server.guard import Guard
from remote_server.plain_text import FewLines, plain
from remote_server.process_limits import may_open
from remote_server.protocol import Attach, Attached, NotAttached
from remote_server.shm.arena import Arena
from remote_server.shm.region import NotAttachable, Region

log = logging.getLogger(__name__)

MAX_REGIONS = 64  # engines on one host, many times over
MAX_PENDING = 8  # connections that have not said yet what they offer
BACKLOG = 128  # those that the kernel keeps meanwhile: engines that all come back at once
PATIENCE_S = 1.0  # for their saying it
MAX_ATTACH_BYTES = 4096
FILES = 2  # the region and its tickets

_MOST_FILES = 16  # what a peer may send before the kernel drops the rest; any but two are refused
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(slots=True, eq=False)
class _Pending:
    connection: socket.socket
    uid: int
    ends_at: float
    data: bytes = b""
    files: list[int] = field(default_factory=list)


class LocalSocket:
    """An abstract Unix socket: no file, nobody on another host or in another network namespace.

    Each connection attaches one region, and lives as long as the client wants it: the kernel
    closes it when the client dies, however it does. Nothing here waits for a peer.
    """

    def __init__(
        self,
        poller: zmq.Poller,
        arena: Arena,
        epoch: str,
        clock: Callable[[], float],
        attached: Callable[[Region], None],
        gone: Callable[[Region], None],
        refused: Callable[[], None],
        *,
        needs_secret: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """Listen from now on, under `name`. Raises `OSError` where that is not possible.

        The three callbacks hear what becomes of each connection. With `needs_secret` only who
        says `secret` attaches: it is told in welcomes, and the name alone is no proof of having
        had one, because the kernel lists the names of all such sockets to everybody.
        """
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(32) if needs_secret else b""
        self._guard = guard or Guard()
        self._poller = poller
        self._arena = arena
        self._epoch = epoch
        self._clock = clock
        self._lines = FewLines(log, clock)
        self._on_attached, self._on_gone, self._on_refused = attached, gone, refused
        self._pending: dict[int, _Pending] = {}  # by descriptor, as events are
        self._regions: dict[int, tuple[socket.socket, Region]] = {}
        self._leaving: list[Region] = []  # of clients that are gone, and perhaps still mapped
        self._accept_again_at = 0.0
        os.close(arena.open_read_only())  # where this fails, nothing can be offered
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._number = self._listener.fileno()
        self._listening = False
        self._watch_listener()

    @property
    def pending(self) -> bool:
        """Somebody's time to attach is running: call `handle` soon, whatever happens."""
        return bool(self._pending or self._accept_again_at)

    def handle(self, events: Mapping[object, int]) -> None:
        """Do what `events` of the poller call for, and end what has taken too long."""
        for number in events:
            if number in self._regions:
                self._guard.run("the end of a region", partial(self._hang_up, number), None)
            elif number in self._pending:
                self._guard.run("an attach", partial(self._read, number), None)
        if self.pending:
            self._look_at_the_clock()
        if self._number in events and not self._accept_again_at:
            self._accept()  # last: a new connection may get a number that was closed above
        self._watch_listener()

    def close(self) -> None:
        """End every connection and region. No copy may be under way."""
        if self._listening:
            self._poller.unregister(self._number)
        self._listener.close()
        for number in [*self._pending]:
            self._end_pending(number)
        for number in [*self._regions]:
            self._hang_up(number)
        for region in self._leaving:
            region.close()

    def _look_at_the_clock(self) -> None:
        now = self._clock()
        for number, pending in [*self._pending.items()]:
            if now >= pending.ends_at:
                self._refuse(number, f"nothing complete came within {PATIENCE_S:g} s")
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0

    def _watch_listener(self) -> None:
        """Look for new connections, unless there is no room: then they wait in the kernel."""
        room = len(self._pending) < MAX_PENDING and not self._accept_again_at
        if room and not self._listening:
            self._poller.register(self._number, zmq.POLLIN)
        elif self._listening and not room:
            self._poller.unregister(self._number)
        self._listening = room

    # ── one connection ───────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        while len(self._pending) < MAX_PENDING:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, and the one who knocks goes on knocking
                self._accept_again_at = self._clock() + PATIENCE_S
                self._lines.say(logging.WARNING, "local clients wait: %s", error.strerror)
                return
            connection.setblocking(False)
            number = connection.fileno()
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            self._pending[number] = _Pending(connection, uid, self._clock() + PATIENCE_S)
            self._poller.register(number, zmq.POLLIN)
            if uid not in (os.getuid(), 0) and os.getuid() != 0:
                self._refuse(number, f"this server belongs to user {os.getuid()}, not {uid}")
            elif len(self._regions) >= MAX_REGIONS:
                self._refuse(number, f"{MAX_REGIONS} regions are attached already")

    def _read(self, number: int) -> None:
        pending = self._pending[number]
        try:
            data, files, flags, _ = socket.recv_fds(
                pending.connection, MAX_ATTACH_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._refuse(number, "the connection broke")
            return
        pending.data += data
        pending.files += files
        if not data:
            self._refuse(number, "the connection ended before its attach was complete")
        elif len(pending.files) < FILES and flags & socket.MSG_CTRUNC:
            # The kernel leaves out descriptors for which the receiver has no room.
            self._refuse(number, f"the server has the {may_open()} files open that it may")
        elif len(pending.data) > MAX_ATTACH_BYTES or flags & socket.MSG_CTRUNC:
            self._refuse(number, "too much for an attach")
        elif len(pending.files) > FILES:  # before the rest has come: it could bring more and more
            self._refuse(number, f"{len(pending.files)} descriptors came with it, not {FILES}")
        elif protocol.is_complete(pending.data):
            self._attach(number, pending)

    def _attach(self, number: int, pending: _Pending) -> None:
        try:
            request = _read_attach(pending.data)
            if not hmac.compare_digest(request.secret, self.secret) and self.secret:
                raise NotAttachable("the secret of the welcome was not said")
            region = _map_region(request, pending)
        except (RemoteProtocolError, NotAttachable) as error:
            self._refuse(number, str(error))
            return
        except Exception as error:  # one connection must never end the server for all others
            log.exception("an attach failed inside the server")
            self._refuse(number, f"{type(error).__name__}: {error}")
            return
        reply = Attached(epoch=self._epoch, region=region.token, arena_bytes=self._arena.file_bytes)
        try:
            arena = self._arena.open_read_only()
            try:
                socket.send_fds(pending.connection, [protocol.encode_local(reply)], [arena])
            finally:
                os.close(arena)
        except OSError as error:
            region.close()
            self._refuse(number, f"the arena cannot be handed over: {error.strerror}")
            return
        _close_files(pending)
        del self._pending[number]
        self._regions[number] = (pending.connection, region)
        self._on_attached(region)
        name = plain(request.client) or "a client"
        self._lines.say(logging.INFO, "%s shares %d bytes of memory", name, region.num_bytes)

    def _refuse(self, number: int, reason: str) -> None:
        self._lines.say(logging.INFO, "a local client stays on TCP: %s", plain(reason))
        with suppress(OSError):  # it may be gone; then it knows
            self._pending[number].connection.send(protocol.encode_local(NotAttached(reason=reason)))
        self._end_pending(number)
        self._on_refused()

    def _end_pending(self, number: int) -> None:
        pending = self._pending.pop(number)
        _close_files(pending)
        self._poller.unregister(number)
        pending.connection.close()

    def _hang_up(self, number: int) -> None:
        """The client has gone, or said something although nothing is left to say."""
        connection, region = self._regions.pop(number)
        self._poller.unregister(number)
        connection.close()
        self._on_gone(region)
        self._leaving = [one for one in self._leaving if not one.unmapped]
        self._leaving.append(region)


def _read_attach(data: bytes) -> Attach:
    request = protocol.decode_local(data)
    if not isinstance(request, Attach):
        raise RemoteProtocolError("only an attach can come here")
    if request.protocol != protocol.PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {request.protocol}"
        )
    protocol.check_name("client", request.client)
    return request


def _map_region(request: Attach, pending: _Pending) -> Region:
    files = pending.files
    if len(files) != FILES:
        raise RemoteProtocolError(f"{len(files)} descriptors came with it, not {FILES}")
    return Region(files[0], request.region_bytes, files[1], pending.uid)


def _close_files(pending: _Pending) -> None:
    for file in pending.files:
        os.close(file)
    pending.files.clear()
