"""The open connections: the tenant of each, and whether there is room for one more.

libzmq identifies a connection in three ways that it never combines: by descriptor when it is
accepted and closed, by key in its handshake, and by descriptor, key and routing id beside each
message. The event of a successful handshake carries none of these. The tenant of a connection is
therefore certain only from its first message on. Until then it is the tenant that was admitted
last: with several tenants one handshake is answered at a time, and the kernel's byte counts show on
which descriptor it ended.
"""

import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

# Connections reserved for each tenant: those of an engine while it starts.
RESERVED = 8

# The limit of concurrent handshakes is half of that of connections, and at least this.
LEAST_HANDSHAKES = 64

# The number of the oldest handshakes to examine when there are too many.
EXAMINED = 32

# Offsets in `struct tcp_info` of the bytes received and sent since the start (Linux 4.19).
_RECEIVED, _SENT = 128, 200
_TCP_INFO_BYTES = 208

ENDED_PLAIN, ENDED_CURVE = (100, 94), (270, 450)
"""The least bytes sent and received when a handshake is over: our greeting, WELCOME and READY; the
peer's greeting, HELLO and INITIATE, or greeting and READY."""


def most_handshakes(most: int) -> int:
    """The most handshakes under way beside `most` connections."""
    return max(LEAST_HANDSHAKES, most // 2)


@dataclass(slots=True, eq=False)
class Connection:
    """One of libzmq's descriptors."""

    fd: int
    peer: str  # address and port by the kernel; empty when it had left already
    tenant: str | None = None  # None in its handshake
    client: bytes | None = None  # its routing id, from its first message on

    def shut(self) -> None:
        """Shut it down, so that libzmq closes it. No effect on a descriptor that was reused."""
        try:
            with socket.socket(fileno=os.dup(self.fd)) as ours:
                if self.peer and _peer_of(ours) == self.peer:
                    ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has closed meanwhile

    def has_moved(self, sent: int, received: int) -> bool:
        """Whether at least so many bytes went each way. False where the kernel has no counts."""
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
    """Connections as libzmq's monitor reports them. One thread."""

    def __init__(
        self, most: int, tenants: Sequence[str], ended: tuple[int, int] = ENDED_PLAIN
    ) -> None:
        """At most `most` are admitted, of all `tenants` together; without tenants there is one.
        `ended` is the least bytes, sent and received, of a handshake that is over."""
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
        self._num_to_place = 0  # handshakes that succeeded and have no descriptor yet
        self._num_lanes = 0
        self.displace: Callable[[Callable[[str], bool], int], bool] = lambda *_: False
        """`LaneListener.displace`, once there is one."""

    def __len__(self) -> int:
        """The number of ZeroMQ's connections, those in a handshake included."""
        return len(self._open) + len(self._handshakes)

    @property
    def _num_places(self) -> int:
        """Places that are taken, by lanes too."""
        return len(self._open) + self._num_lanes

    @property
    def is_full(self) -> bool:
        """No tenant may have one more."""
        return self._num_places >= self._most

    @property
    def by_tenant(self) -> dict[str, int]:
        """The number of connections past their handshake, and of lanes."""
        return {tenant: self._by_tenant[tenant] for tenant in self._tenants}

    def make_room(self, tenant: str, num_unused: int = 0) -> bool:
        """Whether `tenant` may have one more, perhaps in the place of a token for a lane that was
        not used. One that asks for a lane and has `num_unused` tokens itself gets no place of a
        connection that has no more of them."""
        return self.has_room(tenant) or self._displaces(lambda: self.has_room(tenant), num_unused)

    def _displaces(self, is_enough: Callable[[], bool], num_unused: int) -> bool:
        """Whether a token for a lane has ended, so that `is_enough`."""

        def is_of_use(of: str) -> bool:
            self.lane_removed(of)
            try:
                return is_enough()
            finally:
                self.lane_added(of)

        return self.displace(is_of_use, num_unused)

    def has_room(self, tenant: str) -> bool:
        """Whether `tenant` may have one more, with the reserve of every other tenant left free."""
        num_open = self._num_places
        if num_open >= self._most or self._by_tenant[tenant] < self._each:
            return num_open < self._most
        return num_open + self._reserved_for_others(tenant) < self._most

    def _stays_beyond(self, tenant: str) -> bool:
        """Whether `tenant` has more than it may have, and no token for a lane ends for that."""
        return self._is_beyond(tenant) and not self._displaces(
            lambda: not self._is_beyond(tenant), 0
        )

    def _is_beyond(self, tenant: str) -> bool:
        """Whether `tenant` has more than it may have."""
        num_open = self._num_places
        if num_open > self._most or self._by_tenant[tenant] <= self._each:
            return num_open > self._most
        return num_open + self._reserved_for_others(tenant) > self._most

    def lane_added(self, tenant: str) -> None:
        """A lane of `tenant` takes a place, from the moment in which it is announced."""
        self._num_lanes += 1
        self._by_tenant[tenant] += 1

    def lane_removed(self, tenant: str) -> None:
        """It has ended, or has not begun in time."""
        self._num_lanes -= 1
        self._by_tenant[tenant] -= 1

    def _reserved_for_others(self, tenant: str) -> int:
        others = (other for other in self._tenants if other != tenant)
        return sum([max(0, self._each - self._by_tenant[other]) for other in others])

    # ── events of libzmq's monitor ───────────────────────────────────────────────────────

    def accepted(self, fd: int) -> Connection | None:
        """A handshake begins. When there are too many, returns the oldest one whose peer owes its
        part, to be shut: a correct peer sends that within milliseconds. Those that wait for our
        part stay, or none of many simultaneous correct peers would connect."""
        self._handshakes[fd] = Connection(fd, _peer_of_descriptor(fd))
        for oldest in [*islice(self._handshakes.values(), EXAMINED)]:
            if len(self._handshakes) <= self._most_handshakes:
                break
            if oldest.has_moved(*self._ended):  # it is over, and no event has shown it yet
                self._open_for(oldest, self._let_in)
            elif not oldest.has_moved(0, self._ended[1]):
                return self._handshakes.pop(oldest.fd)
        return None

    def let_in(self, tenant: str) -> None:
        """The handshake that is being answered is one of `tenant`."""
        self._let_in = tenant

    def succeeded(self) -> None:
        """A handshake is over. `place` finds its descriptor."""
        self._num_to_place += 1

    def place(self) -> list[Connection]:
        """Count the connections whose handshakes have ended as their tenant's. Returns those beyond
        its limit, to be shut: several were admitted into one free place."""
        if not self._num_to_place:
            return []
        ended = [one for one in self._handshakes.values() if one.has_moved(*self._ended)]
        beyond = []
        for connection in ended:
            self._open_for(connection, self._let_in)
            if self._stays_beyond(self._let_in):
                beyond.append(connection)
        return beyond

    def has_to_place(self) -> bool:
        """`place` has not found all yet: libzmq reports the end before it sends the last bytes."""
        return bool(self._num_to_place)

    def give_up_placing(self) -> None:
        """They have closed, or their first messages will name their tenant."""
        self._num_to_place = 0

    def _open_for(self, connection: Connection, tenant: str) -> None:
        del self._handshakes[connection.fd]
        self._num_to_place = max(0, self._num_to_place - 1)
        connection.tenant = tenant
        self._open[connection.fd] = connection
        self._by_tenant[tenant] += 1

    def closed(self, fd: int) -> bytes | None:
        """The routing id of the connection that has ended; None when it had sent no message."""
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

    # ── messages ─────────────────────────────────────────────────────────────────────────

    def knows(self, client: bytes) -> bool:
        """Whether a message of `client` came before, and its connection is open."""
        return client in self._of_client

    def met(self, client: bytes, fd: int, tenant: str) -> bool:
        """The first message of `client` came by `fd`, and is of `tenant`. All events of the monitor
        must have been read before. False when that connection has ended."""
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
        if connection.tenant != tenant:  # it was counted as another tenant's
            assert connection.tenant is not None
            self._by_tenant[connection.tenant] -= 1
            self._by_tenant[tenant] += 1
            connection.tenant = tenant
            self._shut_if_beyond(connection)
        return True

    def shut(self, client: bytes) -> None:
        """End the connection of `client`, if it is open."""
        if client in self._of_client:
            self._of_client[client].shut()

    def _shut_if_beyond(self, connection: Connection) -> None:
        assert connection.tenant is not None
        if self._stays_beyond(connection.tenant):
            connection.shut()

    def clear(self) -> None:
        """All have ended with their socket, and before them their lanes."""
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
