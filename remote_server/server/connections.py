"""Which connections are open, whose they are, and whether there is a place for one more.

libzmq names a connection in three ways that it never puts side by side: by its descriptor when it
is accepted and closed, by its key when it is asked for in the handshake, and by descriptor, key and
routing id beside each message. Its word that a handshake has succeeded names nothing. So the tenant
of a connection is known for certain from its first message on. Before that it is the one that was
let in last: with several tenants one handshake is answered at a time, and the kernel knows on which
descriptor the bytes of its end went out.
"""

import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

# What each tenant can always have, whatever the others take: an engine, while it starts.
RESERVED = 8

# Half as many handshakes may be under way as there may be connections, and these at least.
LEAST_HANDSHAKES = 64

# So many of the oldest ones are looked at when there are too many.
LOOKED_AT = 32

# Of `struct tcp_info`: bytes received since the start, and bytes sent, which Linux has since 4.19.
_RECEIVED, _SENT = 128, 200
_TCP_INFO_BYTES = 208

ENDED_PLAIN, ENDED_CURVE = (100, 94), (270, 450)
"""Bytes sent and received when a handshake is over, at least: ours of greeting, WELCOME and READY,
the peer's of greeting, HELLO and INITIATE, or greeting and READY."""


def most_handshakes(most: int) -> int:
    """That may be under way beside `most` connections."""
    return max(LEAST_HANDSHAKES, most // 2)


@dataclass(slots=True, eq=False)
class Connection:
    """One descriptor of libzmq's."""

    fd: int
    peer: str  # address and port, as the kernel knows them; empty when it had left already
    tenant: str | None = None  # None in its handshake
    client: bytes | None = None  # its routing id, from its first message on

    def shut(self) -> None:
        """Have libzmq find it closed. Nothing is done to a descriptor that is another's now."""
        try:
            with socket.socket(fileno=os.dup(self.fd)) as ours:
                if self.peer and _peer_of(ours) == self.peer:
                    ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has closed meanwhile

    def has_moved(self, sent: int, received: int) -> bool:
        """Whether so many bytes went either way. False where the kernel does not count them."""
        try:
            with socket.socket(fileno=os.dup(self.fd)) as ours:
                info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return False
        if len(info) < _TCP_INFO_BYTES:
            return False
        return bool(
            struct.unpack_from("Q", info, _SENT)[0] >= sent
            and struct.unpack_from("Q", info, _RECEIVED)[0] >= received
        )


class Connections:
    """Counted as libzmq's monitor reports them. One thread."""

    def __init__(
        self, most: int, tenants: Sequence[str], ended: tuple[int, int] = ENDED_PLAIN
    ) -> None:
        """At most `most` are let in, of all `tenants` together; without tenants there is one.
        `ended` is what has moved when a handshake is over."""
        self._ended = ended
        self._most = most
        self._tenants = tenants
        self._each = min(RESERVED, most // len(tenants))
        self._most_handshakes = most_handshakes(most)
        self._by_tenant: Counter[str] = Counter()
        self._handshakes: dict[int, Connection] = {}  # the oldest first
        self._open: dict[int, Connection] = {}
        self._of_client: dict[bytes, Connection] = {}
        self._let_in = tenants[0]
        self._num_to_place = 0  # handshakes that succeeded, and are not known which

    def __len__(self) -> int:
        """Those in a handshake included."""
        return len(self._open) + len(self._handshakes)

    @property
    def is_full(self) -> bool:
        """Nobody may have one more."""
        return len(self._open) >= self._most

    @property
    def by_tenant(self) -> dict[str, int]:
        """Those past their handshake."""
        return {tenant: self._by_tenant[tenant] for tenant in self._tenants}

    def has_room(self, tenant: str) -> bool:
        """Whether `tenant` may have one more, and every other one what is reserved for it."""
        num_open = len(self._open)
        if num_open >= self._most or self._by_tenant[tenant] < self._each:
            return num_open < self._most
        return num_open + self._reserved_for_others(tenant) < self._most

    def _is_beyond(self, tenant: str) -> bool:
        """Whether `tenant` has one more than it may have."""
        num_open = len(self._open)
        if num_open > self._most or self._by_tenant[tenant] <= self._each:
            return num_open > self._most
        return num_open + self._reserved_for_others(tenant) > self._most

    def _reserved_for_others(self, tenant: str) -> int:
        others = (other for other in self._tenants if other != tenant)
        return sum([max(0, self._each - self._by_tenant[other]) for other in others])

    # ── what libzmq reports ──────────────────────────────────────────────────────────────

    def accepted(self, fd: int) -> Connection | None:
        """A handshake begins. Returns the oldest one whose peer owes its part, when there are too
        many, to be shut: an honest peer sends that within milliseconds. Those that wait for our
        part are left alone, or a burst of honest ones would never get in."""
        self._handshakes[fd] = Connection(fd, _peer_of_descriptor(fd))
        for oldest in [*islice(self._handshakes.values(), LOOKED_AT)]:
            if len(self._handshakes) <= self._most_handshakes:
                break
            if oldest.has_moved(*self._ended):  # it is over, and nothing has shown it yet
                self._open_for(oldest, self._let_in)
            elif not oldest.has_moved(0, self._ended[1]):
                return self._handshakes.pop(oldest.fd)
        return None

    def let_in(self, tenant: str) -> None:
        """The answer to the handshake that was asked about: it is this tenant."""
        self._let_in = tenant

    def succeeded(self) -> None:
        """A handshake is over. `place` finds out which."""
        self._num_to_place += 1

    def place(self) -> list[Connection]:
        """Those whose handshakes have ended get their places. Returns the ones for which there is
        none, to be shut: several were let in by what was free for one."""
        if not self._num_to_place:
            return []
        ended = [one for one in self._handshakes.values() if one.has_moved(*self._ended)]
        beyond = []
        for connection in ended:
            self._open_for(connection, self._let_in)
            if self._is_beyond(self._let_in):
                beyond.append(connection)
        return beyond

    def has_to_place(self) -> bool:
        """`place` has not found all yet: libzmq tells of the end before it sends the last bytes."""
        return bool(self._num_to_place)

    def give_up_placing(self) -> None:
        """They have left, or their first messages will show who they are."""
        self._num_to_place = 0

    def _open_for(self, connection: Connection, tenant: str) -> None:
        del self._handshakes[connection.fd]
        self._num_to_place = max(0, self._num_to_place - 1)
        connection.tenant = tenant
        self._open[connection.fd] = connection
        self._by_tenant[tenant] += 1

    def closed(self, fd: int) -> bytes | None:
        """The routing id of the connection that has ended, if it had sent anything."""
        self._handshakes.pop(fd, None)
        self._num_to_place = min(self._num_to_place, len(self._handshakes))
        connection = self._open.pop(fd, None)
        if connection is None:
            return None
        assert connection.tenant is not None
        self._by_tenant[connection.tenant] -= 1
        if connection.client is not None:
            self._of_client.pop(connection.client, None)
        return connection.client

    # ── what messages show ───────────────────────────────────────────────────────────────

    def knows(self, client: bytes) -> bool:
        """Whether a message of `client` came before, and its connection is open."""
        return client in self._of_client

    def met(self, client: bytes, fd: int, tenant: str) -> bool:
        """The first message of `client` came by `fd`, and is of `tenant`. Everything that the
        monitor reports must have been noted before. False when that connection has ended."""
        if fd in self._handshakes:
            self._open_for(self._handshakes[fd], tenant)
            self._shut_if_beyond(self._open[fd])
        connection = self._open.get(fd)
        if connection is None:
            return False
        if connection.client is not None:
            self._of_client.pop(connection.client, None)
        connection.client = client
        self._of_client[client] = connection
        if connection.tenant != tenant:  # it was taken for another tenant's until now
            assert connection.tenant is not None
            self._by_tenant[connection.tenant] -= 1
            self._by_tenant[tenant] += 1
            connection.tenant = tenant
            self._shut_if_beyond(connection)
        return True

    def _shut_if_beyond(self, connection: Connection) -> None:
        assert connection.tenant is not None
        if self._is_beyond(connection.tenant):
            connection.shut()

    def clear(self) -> None:
        """All have ended with their socket."""
        self._handshakes.clear()
        self._open.clear()
        self._of_client.clear()
        self._by_tenant.clear()
        self._num_to_place = 0


def _peer_of_descriptor(fd: int) -> str:
    try:
        with socket.socket(fileno=os.dup(fd)) as ours:
            return _peer_of(ours)
    except OSError:
        return ""


def _peer_of(connection: socket.socket) -> str:
    return str(connection.getpeername())
