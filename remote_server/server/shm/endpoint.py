"""The local socket: clients on this host attach their memory, and show that they are on it."""

import hmac
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from remote_server import protocol
from remote_server.errors import RemoteProtocolError
from remote_server.plain_text import FewLines, plain
from remote_server.process_limits import may_open
from remote_server.protocol import Attach, Attached, NotAttached
from remote_server.server.loop_context import LoopContext
from remote_server.server.shm.regions import Regions
from remote_server.shm.mapping import Arena, NotAttachable, user_of
from remote_server.shm.region import Region

log = logging.getLogger(__name__)

MAX_REGIONS = 64  # engines on one host, many times over
MAX_PENDING = 32  # connections whose attach is not complete
BACKLOG = 128  # kept by the kernel meanwhile: engines that all reconnect at once
# One that sends nothing takes the loop 50 µs. A turn's requests have a millisecond too. After a
# turn in which some had to go for others it rests: a flood takes a third of the loop's time.
ACCEPTED_PER_TURN = 32
REST_S = 0.005
PATIENCE_S = 1.0  # for a complete attach
MAX_ATTACH_BYTES = 4096
FILES = 2  # the region and its tickets

_MOST_FILES = 16  # the kernel drops more; any number but two is refused


@dataclass(slots=True, eq=False)
class _Pending:
    connection: socket.socket
    uid: int
    ends_at: float
    data: bytes = b""
    files: list[int] = field(default_factory=list)
    is_polled: bool = False


class LocalSocket:
    """An abstract Unix socket: no file, and no access from another host or network namespace.

    Each connection attaches one region and keeps it attached. The kernel closes the connection when
    the client dies, by `kill -9` too. Nothing here waits for a peer.
    """

    def __init__(
        self,
        loop_context: LoopContext,
        arena: Arena,
        epoch: str,
        regions: Regions,
        *,
        needs_secret: bool = False,
    ) -> None:
        """Listen from now on, under `name`. Raises `OSError` where that is not possible.

        `regions` learns the outcome of each connection; one that is displaced is refused too. With
        `needs_secret` an attach must carry `secret`, which welcomes carry. The name alone does not
        prove that a client had a welcome: the kernel lists the names of all such sockets to every
        process.
        """
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(32) if needs_secret else b""
        self._guard = loop_context.guard
        self._poller = loop_context.poller
        self._arena = arena
        self._epoch = epoch
        self._clock = loop_context.clock
        self._lines = FewLines(log, self._clock)
        self._attached_regions = regions
        self._pending: dict[int, _Pending] = {}  # by descriptor, as events are; the oldest first
        self._num_displaced = 0
        """In this turn."""
        self._num_pending: Counter[int] = Counter()
        """Of each user."""
        self._regions: dict[int, tuple[socket.socket, Region]] = {}
        self._leaving: list[Region] = []  # of clients that are gone, until they are unmapped
        self._accept_again_at = 0.0
        os.close(arena.open_read_only())  # where this fails, no region can be attached
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
        """The time of an attach is running: call `handle` soon, even without events."""
        return bool(self._pending or self._accept_again_at)

    @property
    def is_resting(self) -> bool:
        """Connections may wait: call `handle` after `REST_S`, even without events."""
        return bool(self._num_displaced and self._accept_again_at)

    def handle(self, events: Mapping[object, int]) -> None:
        """Handle `events` of the poller, and end attaches whose time is over."""
        for number in events:
            if number in self._regions:
                self._guard.run("the end of a region", partial(self._hang_up, number), None)
            elif number in self._pending:
                self._guard.run("an attach", partial(self._read, number), None)
        if self._leaving:
            self._leaving = [one for one in self._leaving if not one.unmapped]
        if self.pending:
            self._end_overdue()
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

    def _end_overdue(self) -> None:
        now = self._clock()
        for number, pending in [*self._pending.items()]:
            if now >= pending.ends_at:
                self._refuse(number, f"no complete attach within {PATIENCE_S:g} s", again=True)
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0

    def _watch_listener(self) -> None:
        """Poll for new connections only while there are descriptors. Others wait in the kernel."""
        listening = not self._accept_again_at
        if listening and not self._listening:
            self._poller.register(self._number, zmq.POLLIN)
        elif self._listening and not listening:
            self._poller.unregister(self._number)
        self._listening = listening

    # ── one connection ───────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        """Accept those that wait in the kernel, whatever places are taken: the kernel refuses a
        client for which it has no place. A correct client has sent its attach by now, so that it
        needs no place here."""
        self._num_displaced = 0
        self._accept_some()
        if self._num_displaced and not self._accept_again_at:
            self._accept_again_at = self._clock() + REST_S
        for number, pending in self._pending.items():
            if not pending.is_polled:
                pending.is_polled = True
                self._poller.register(number, zmq.POLLIN)

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            # no descriptors: the connection stays in the backlog and would be reported again
            except OSError as error:
                self._accept_again_at = self._clock() + PATIENCE_S
                self._lines.say(logging.WARNING, "local clients wait: %s", error.strerror)
                return
            connection.setblocking(False)
            number = connection.fileno()
            uid = user_of(connection)
            self._pending[number] = _Pending(connection, uid, self._clock() + PATIENCE_S)
            self._num_pending[uid] += 1
            if uid not in (os.getuid(), 0) and os.getuid() != 0:
                self._refuse(number, f"this server belongs to user {os.getuid()}, not {uid}")
            elif len(self._regions) >= MAX_REGIONS:
                self._refuse(number, f"{MAX_REGIONS} regions are attached already", again=True)
            else:
                self._guard.run("an attach", partial(self._read, number), None)
            if len(self._pending) > MAX_PENDING:
                self._displace()

    def _displace(self) -> None:
        """End the oldest of the connections that have not sent their attach: of the user with most
        of them, so that one user takes no place of another."""
        of_each = self._num_pending
        most = max(of_each.values())
        oldest = next(n for n, one in self._pending.items() if of_each[one.uid] == most)
        self._guard.run("an attach", partial(self._read, oldest), None)
        if oldest in self._pending:
            self._num_displaced += 1
            self._attached_regions.displaced()
            self._refuse(oldest, "others needed its place before its attach came", again=True)

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
            # The kernel drops descriptors for which the receiver has no room.
            why = f"the server has its limit of {may_open()} files open"
            self._refuse(number, why, again=True)
        elif len(pending.data) > MAX_ATTACH_BYTES or flags & socket.MSG_CTRUNC:
            self._refuse(number, "too much for an attach")
        # checked before the rest arrives: each message can bring more
        elif len(pending.files) > FILES:
            self._refuse(number, f"{len(pending.files)} descriptors came with it, not {FILES}")
        elif protocol.is_complete(pending.data):
            self._attach(number, pending)

    def _attach(self, number: int, pending: _Pending) -> None:
        try:
            request = _read_attach(pending.data)
            if not hmac.compare_digest(request.secret, self.secret) and self.secret:
                raise NotAttachable("the attach does not carry the secret of the welcome")
            if len(self._regions) >= MAX_REGIONS:
                self._refuse(number, f"{MAX_REGIONS} regions are attached already", again=True)
                return
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
            self._refuse(number, f"the arena cannot be sent: {error.strerror}", again=True)
            return
        _close_files(pending)
        self._take_pending(number)
        if not pending.is_polled:
            self._poller.register(number, zmq.POLLIN)
        self._regions[number] = (pending.connection, region)
        self._attached_regions.attached(region)
        name = plain(request.client) or "a client"
        self._lines.say(logging.INFO, "%s shares %d bytes of memory", name, region.num_bytes)

    def _refuse(self, number: int, reason: str, *, again: bool = False) -> None:
        """`again`: another attempt may succeed."""
        self._lines.say(logging.INFO, "a local client stays on TCP: %s", plain(reason))
        with suppress(OSError):  # it may be gone
            reply = protocol.encode_local(NotAttached(reason=reason, again=again))
            self._pending[number].connection.send(reply)
        self._end_pending(number)
        self._attached_regions.refused()

    def _end_pending(self, number: int) -> None:
        pending = self._take_pending(number)
        _close_files(pending)
        if pending.is_polled:
            self._poller.unregister(number)
        pending.connection.close()

    def _take_pending(self, number: int) -> _Pending:
        """It is pending no more."""
        pending = self._pending.pop(number)
        self._num_pending[pending.uid] -= 1
        if not self._num_pending[pending.uid]:
            del self._num_pending[pending.uid]
        return pending

    def _hang_up(self, number: int) -> None:
        """The client has gone, or sent data after its attach."""
        connection, region = self._regions.pop(number)
        self._poller.unregister(number)
        connection.close()
        self._attached_regions.gone(region)
        self._leaving.append(region)


def _read_attach(data: bytes) -> Attach:
    request = protocol.decode_local(data)
    if not isinstance(request, Attach):
        raise RemoteProtocolError("only an attach can come here")
    if request.protocol != protocol.PROTOCOL_VERSION:
        raise RemoteProtocolError(
            protocol.other_protocol(protocol.PROTOCOL_VERSION, request.protocol)
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
