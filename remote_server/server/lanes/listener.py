"""The listener of lanes: tokens that announce one, and TCP connections that have not sent theirs,
which are encrypted where the server has keys.

A connection that is no lane yet is not trusted: it may hold a descriptor for two seconds, and
nothing else.
"""

import hmac
import logging
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import zmq

from remote_server.errors import ConfigError, TlsFailed
from remote_server.native import TlsConnection, TlsContext
from remote_server.plain_text import FewLines
from remote_server.protocol import LANE_TOKEN_BYTES, LANE_TOKEN_S
from remote_server.server.loop_context import LoopContext
from remote_server.values import LanesAddress

log = logging.getLogger(__name__)

MAGIC = b"KVFL"
VERSION = 1
PREAMBLE = struct.Struct(f"<4sI{LANE_TOKEN_BYTES}s")
"""Magic, version and token, from the client."""
GREETING = struct.Struct("<4sI")
"""Magic and number of the lane, from the server. Number 0: the token is good no more."""

# Connections whose preamble is not complete. Beyond that the oldest is closed: a correct client
# sends its preamble at once.
MAX_PENDING = 64
PREAMBLE_S = 2.0

BACKLOG = 128
_ACCEPTED_PER_TURN = 16
# A handshake takes the loop half a millisecond.
_READ_PER_TURN = 4
_RETRY_S = 1.0  # while there are no descriptors

# A peer whose machine is silent, or that reads nothing, for this long is dropped, as by ZeroMQ.
SILENCE_MS = 30_000

COUNTERS = (
    "lanes_refused_token", "lanes_refused_preamble", "lanes_refused_unfinished",
    "lanes_refused_handshake", "lane_tokens_late", "lane_tokens_displaced",
)  # fmt: skip


class Ticket(NamedTuple):
    """One lane that a client may open."""

    tenant: str
    client: bytes
    number: int
    ends_at: float


class _Pending:
    """A connection and the part of its preamble that has come."""

    __slots__ = ("connection", "data", "ends_at", "is_secured")

    def __init__(self, connection: socket.socket | TlsConnection, ends_at: float) -> None:
        self.connection = connection
        self.ends_at = ends_at
        self.data = b""
        self.is_secured = not isinstance(connection, TlsConnection)
        """The handshake is complete, or there is none."""

    def read(self, size: int) -> bytes:
        """Bytes of the preamble, after the handshake. Raises `TlsFailed` and `OSError`."""
        if not self.is_secured:
            assert isinstance(self.connection, TlsConnection)
            self.connection.handshake()
            self.is_secured = True
        return self.connection.recv(size)


class LaneListener:
    """Accepts connections and opens those with a good token. One thread; it waits for no peer."""

    def __init__(
        self,
        loop_context: LoopContext,
        address: LanesAddress,
        opened: Callable[[Ticket, socket.socket | TlsConnection], bool],
        lapsed: Callable[[Ticket], None],
        counters: dict[str, int],
        tls: TlsContext | None = None,
    ) -> None:
        """Listen at `address` from now on. Raises `ConfigError`.

        `opened` takes over a connection with the token of a ticket, or returns False. `lapsed` is
        called with each ticket that was not used in time. What is refused is counted in `counters`.
        With `tls` all connections are encrypted, and their tokens with them.
        """
        self._tls = tls
        self._counters = counters
        self._poller = loop_context.poller
        self._clock = loop_context.clock
        self._opened, self._lapsed = opened, lapsed
        self._guard = loop_context.guard
        self._lines = FewLines(log, self._clock)
        self._tickets: dict[bytes, Ticket] = {}  # the oldest first
        self._pending: dict[int, _Pending] = {}  # by descriptor, the oldest first
        self._accept_again_at = 0.0
        self._listener = _listen(address)
        self._number = self._listener.fileno()
        self._listening = True
        self._poller.register(self._number, zmq.POLLIN)
        self.address = address._replace(port=self._listener.getsockname()[1])

    @property
    def is_waiting(self) -> bool:
        """A time runs out soon: call `handle` also without events."""
        return bool(self._pending or self._accept_again_at)

    def issue(self, tenant: str, client: bytes, number: int) -> bytes:
        """A token for the lane `number` of `client`. It is good once, for `LANE_TOKEN_S`."""
        token = secrets.token_bytes(LANE_TOKEN_BYTES)
        self._tickets[token] = Ticket(tenant, client, number, self._clock() + LANE_TOKEN_S)
        return token

    def withdraw(self, client: bytes | None) -> None:
        """The tokens of `client` are good no more, or those of all."""
        for token in [t for t, one in self._tickets.items() if client in (None, one.client)]:
            self._lapsed(self._tickets.pop(token))

    def displace(self, is_of_use: Callable[[str], bool], num_unused: int) -> bool:
        """Withdraw one token that was not used, of a tenant whose place `is_of_use`: the oldest of
        the client with most of them, which must have more than `num_unused`. So a client that asks
        again and again takes the places of none that has fewer. False when there is no such one."""
        counts = Counter(ticket.client for ticket in self._tickets.values())
        tenants = {ticket.tenant for ticket in self._tickets.values()}
        useful = {tenant for tenant in tenants if is_of_use(tenant)}
        # Of equal ones `max` returns the first, which is the oldest.
        token = max(
            (token for token, ticket in self._tickets.items() if ticket.tenant in useful),
            key=lambda token: counts[self._tickets[token].client],
            default=None,
        )
        if token is None or counts[self._tickets[token].client] <= num_unused:
            return False
        self._counters["lane_tokens_displaced"] += 1
        self._lapsed(self._tickets.pop(token))
        return True

    def handle(self, events: Mapping[object, int]) -> None:
        """Handle `events` of the poller, and end what is overdue."""
        readable = [number for number in self._pending if number in events]
        for number in readable[: _READ_PER_TURN if self._tls else None]:
            self._guard.run("the beginning of a lane", partial(self._read, number), None)
        if self._tickets or self.is_waiting:
            self._end_overdue()
        if self._number in events and not self._accept_again_at:
            self._accept()  # last: a new connection may get a number that was closed above
        self._watch()

    def close(self) -> None:
        if self._listening:
            self._poller.unregister(self._number)
        self._listening = False
        self._listener.close()
        for number in [*self._pending]:
            self._end(number)
        self.withdraw(None)

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _end_overdue(self) -> None:
        now = self._clock()
        while self._tickets:
            token, ticket = next(iter(self._tickets.items()))
            if now < ticket.ends_at:
                break
            del self._tickets[token]
            self._counters["lane_tokens_late"] += 1
            self._lapsed(ticket)
        while self._pending:
            number, pending = next(iter(self._pending.items()))
            if now < pending.ends_at:
                break
            self._refuse(number, "unfinished", f"no whole preamble within {PREAMBLE_S:g} s")
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0

    def _watch(self) -> None:
        """Poll for connections only while there are descriptors for them."""
        listening = not self._accept_again_at
        if listening and not self._listening:
            self._poller.register(self._number, zmq.POLLIN)
        elif self._listening and not listening:
            self._poller.unregister(self._number)
        self._listening = listening

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                connection, _peer = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self._accept_again_at = self._clock() + _RETRY_S
                self._lines.say(logging.WARNING, "lanes wait: %s", error.strerror)
                return
            try:
                end = self._prepared(connection)
            except OSError as error:
                kind = "preamble" if self._tls is None else "handshake"
                self._counters[f"lanes_refused_{kind}"] += 1
                self._lines.say(logging.INFO, "a lane ended as it began: %s", error)
                continue
            if len(self._pending) >= MAX_PENDING:
                oldest = next(iter(self._pending))
                self._refuse(oldest, "unfinished", "its preamble was the oldest of too many")
            number = end.fileno()
            self._pending[number] = _Pending(end, self._clock() + PREAMBLE_S)
            self._poller.register(number, zmq.POLLIN)

    def _prepared(self, connection: socket.socket) -> socket.socket | TlsConnection:
        """Raises `OSError`, and the connection is closed then."""
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that vanished, or that reads nothing, ends as that of a ZeroMQ connection does.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
            return connection if self._tls is None else self._tls.wrap(connection)
        except OSError:
            connection.close()
            raise

    def _read(self, number: int) -> None:
        pending = self._pending[number]
        try:
            data = pending.read(PREAMBLE.size - len(pending.data))
        except BlockingIOError:
            return
        except (TlsFailed, OSError):
            data = b""
        pending.data += data
        if not pending.is_secured:
            self._refuse(number, "handshake", "it is no TLS, or the client has ended it")
        elif not data:
            self._refuse(number, "preamble", "it ended before its preamble was whole")
        elif not _may_become_preamble(pending.data):
            self._refuse(number, "preamble", "it began with other bytes than a lane")
        elif len(pending.data) == PREAMBLE.size:
            self._begin(number, pending)

    def _begin(self, number: int, pending: _Pending) -> None:
        ticket = self._take_ticket(PREAMBLE.unpack(pending.data)[2])
        if ticket is None:
            with suppress(OSError):  # it may be gone
                pending.connection.send(GREETING.pack(MAGIC, 0))
            self._refuse(number, "token", "its token is unknown, used, late or displaced")
            return
        del self._pending[number]
        self._poller.unregister(number)
        connection = pending.connection
        try:
            # The connection is new, so its buffer has room for the greeting.
            connection.send(GREETING.pack(MAGIC, ticket.number))
            is_open = self._opened(ticket, connection)
        except OSError as error:
            self._lines.say(logging.INFO, "a lane ended as it began: %s", error)
            is_open = False
        if not is_open:
            connection.close()
            self._lapsed(ticket)

    def _take_ticket(self, token: bytes) -> Ticket | None:
        # Each comparison takes the same time, whatever part of a token matches.
        found = [known for known in self._tickets if hmac.compare_digest(known, token)]
        ticket = self._tickets.pop(found[0]) if found else None
        if ticket is not None and self._clock() >= ticket.ends_at:
            self._counters["lane_tokens_late"] += 1
            self._lapsed(ticket)
            return None
        return ticket

    def _refuse(self, number: int, kind: str, reason: str) -> None:
        self._counters[f"lanes_refused_{kind}"] += 1
        self._lines.say(logging.INFO, "refused a lane: %s (all are counted)", reason)
        self._end(number)

    def _end(self, number: int) -> None:
        pending = self._pending.pop(number)
        self._poller.unregister(number)
        pending.connection.close()


def _may_become_preamble(data: bytes) -> bool:
    """Whether a right preamble can begin with `data`."""
    right = PREAMBLE.pack(MAGIC, VERSION, b"")[:-LANE_TOKEN_BYTES]
    return data[: len(right)] == right[: len(data)]


def _listen(address: LanesAddress) -> socket.socket:
    """Raises `ConfigError` when the address is not available."""
    is_v6 = ":" in address.host or (not address.host and socket.has_dualstack_ipv6())
    listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_v6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        with suppress(OSError):
            listener.close()
        why = error.strerror or error
        raise ConfigError(f"lanes: {address}: {why}; choose another address, or off") from error
    return listener
