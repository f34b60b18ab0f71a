"""Places among the connections: their owners, and that no tenant takes all of them."""

import socket
import time

import pytest
import zmq
from lent import lent
from memory_server import memory_server
from tenancy import tenancy
from wire_peer import Peer

from remote_server import protocol
from remote_server.server.entrance import auth, connections
from remote_server.server.entrance.connections import Connection, Connections

pytestmark = pytest.mark.real_time

assert tenancy

PATIENCE_S = 30.0


class Sockets:
    """Pairs of connected sockets; the descriptors of one side stand for libzmq's."""

    def __init__(self) -> None:
        self._listener = lent(socket.create_server(("127.0.0.1", 0)))
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}

    def connect(self) -> int:
        peer = lent(socket.create_connection(self._listener.getsockname()))
        ours = lent(self._listener.accept()[0])
        self._pairs[ours.fileno()] = ours, peer
        return ours.fileno()

    def finish(self, fd: int) -> None:
        """As many bytes as a handshake takes."""
        ours, peer = self._pairs[fd]
        ours.sendall(bytes(300))
        peer.recv(300, socket.MSG_WAITALL)
        self.peer_sends(fd, 10)

    def peer_sends(self, fd: int, num_bytes: int) -> None:
        ours, peer = self._pairs[fd]
        peer.sendall(bytes(num_bytes))
        assert len(ours.recv(num_bytes, socket.MSG_PEEK | socket.MSG_WAITALL)) == num_bytes

    def is_shut(self, fd: int) -> bool:
        """The end of a shutdown comes at once over the loopback."""
        _, peer = self._pairs[fd]
        try:
            return peer.recv(1000, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for pair in self._pairs.values():
            for one in pair:
                one.close()
        self._listener.close()


@pytest.fixture
def sockets():
    made = Sockets()
    yield made
    made.close()


def opened(places: Connections, sockets: Sockets, tenant: str, number: int = 1) -> list[int]:
    fds = [sockets.connect() for _ in range(number)]
    for fd in fds:
        assert places.has_room(tenant)
        places.accepted(fd)
        places.let_in(tenant)
        sockets.finish(fd)
        places.succeeded()
        assert places.place() == []
    return fds


def make(most: int, *tenants: str) -> Connections:
    return Connections(most, tenants, (270, 10))


def test_a_tenant_may_have_all_but_what_is_kept_for_the_others(sockets, monkeypatch):
    monkeypatch.setattr(connections, "RESERVED", 2)
    places = make(10, "a", "b", "c")
    opened(places, sockets, "a", 6)
    assert not places.has_room("a")
    opened(places, sockets, "b", 2)
    assert not places.has_room("b"), "the last two are kept for c"
    opened(places, sockets, "c", 2)
    assert not any(map(places.has_room, "abc"))


def test_a_place_that_gets_free_is_anybodys(sockets, monkeypatch):
    monkeypatch.setattr(connections, "RESERVED", 2)
    places = make(6, "a", "b")
    fds = opened(places, sockets, "a", 4)
    assert not places.has_room("a")
    places.closed(fds[0])
    assert places.has_room("a")
    assert (len(places), places.by_tenant) == (3, {"a": 3, "b": 0})
    without_tenants = make(3, "")
    opened(without_tenants, sockets, "", 3)
    assert not without_tenants.has_room("")


def test_handshakes_have_a_share_of_their_own_and_the_oldest_gives_way(sockets, monkeypatch):
    """Those past their handshake are not among them, even when nothing has shown it yet."""
    monkeypatch.setattr(connections, "LEAST_HANDSHAKES", 3)
    places = make(4, "a")
    first = sockets.connect()
    places.accepted(first)
    sockets.finish(first)
    unfinished = [sockets.connect() for _ in range(3)]
    for fd in unfinished:
        assert places.accepted(fd) is None
    assert places.has_room("a"), "a handshake takes no place of those that are open"
    oldest = places.accepted(sockets.connect())
    assert oldest is not None and oldest.fd == unfinished[0]
    oldest.shut()
    assert sockets.is_shut(unfinished[0])
    assert not sockets.is_shut(unfinished[1])
    assert places.by_tenant == {"a": 1}


def test_handshakes_that_wait_for_the_server_are_left_alone(sockets, monkeypatch):
    """A burst of honest ones would be closed one after the other, and come again for ever."""
    monkeypatch.setattr(connections, "LEAST_HANDSHAKES", 3)
    places = Connections(4, ["a"], (270, 100))
    for _ in range(10):
        fd = sockets.connect()
        sockets.peer_sends(fd, 100)
        assert places.accepted(fd) is None


def test_the_handshake_that_ended_is_the_one_whose_bytes_went_out(sockets):
    """Not the oldest, which stands still: it would be taken for the tenant's that was let in."""
    places = make(8, "a", "b")
    slow = sockets.connect()
    places.accepted(slow)
    (quick,) = opened(places, sockets, "b")
    assert places.by_tenant == {"a": 0, "b": 1}
    places.closed(slow)
    assert places.by_tenant == {"a": 0, "b": 1}
    places.closed(quick)
    assert places.by_tenant == {"a": 0, "b": 0}


def test_an_end_that_libzmq_tells_of_before_its_bytes_are_sent_is_found_afterwards(sockets):
    places = make(8, "a", "b")
    fd = sockets.connect()
    places.accepted(fd)
    places.let_in("b")
    places.succeeded()
    assert places.place() == []
    assert places.has_to_place()
    sockets.finish(fd)
    places.place()
    assert not places.has_to_place()
    assert places.by_tenant == {"a": 0, "b": 1}


def test_a_message_shows_whose_a_connection_is(sockets):
    """Whatever it was taken for until then."""
    places = make(8, "a", "b")
    (fd,) = opened(places, sockets, "a")
    assert not places.knows(b"one")
    assert places.met(b"one", fd, "b")
    assert places.knows(b"one")
    assert places.by_tenant == {"a": 0, "b": 1}
    assert places.closed(fd) == b"one"
    assert not places.knows(b"one")
    assert places.by_tenant == {"a": 0, "b": 0}


def test_a_connection_that_shows_to_be_one_too_many_is_shut(sockets, monkeypatch):
    monkeypatch.setattr(connections, "RESERVED", 1)
    places = make(4, "a", "b")
    opened(places, sockets, "a", 3)
    (disguised,) = opened(places, sockets, "b")
    assert places.met(b"one", disguised, "a")
    assert sockets.is_shut(disguised)


def test_a_descriptor_that_is_anothers_now_is_left_alone(sockets):
    places = make(8, "a")
    fd = sockets.connect()
    connection = connections.Connection(fd, "('127.0.0.1', 1)")
    connection.shut()
    assert not sockets.is_shut(fd)
    assert len(places) == 0


# ── with a server ────────────────────────────────────────────────────────────────────────────


def test_a_tenant_that_takes_every_place_it_can_leaves_the_others_theirs(tenancy):
    """It took all of them before, and no other tenant could connect. By a clock that stands still
    no handshake is late: it would be counted as the next tenant's."""
    tenancy.write(a="", b="")
    server = tenancy.start(lambda: 1000.0, max_connections=24)
    greedy = [tenancy.peer("a", immediate=True) for _ in range(24)]
    deadline = time.monotonic() + PATIENCE_S
    while server._auth.counters["peers_refused_share"] < 8:
        assert time.monotonic() < deadline, server._auth.counters
        time.sleep(0.01)
    others = [tenancy.peer("b") for _ in range(8)]
    for peer in others:
        peer.hello()
    assert others[0].stats().counters["connections_refused"] == 0
    assert server._auth.of_tenant["a"]["connections_refused"] >= 8
    assert server._auth.connections.by_tenant == {"a": 16, "b": 8}
    for peer in greedy:
        peer.socket.close()
    while server._auth.connections.by_tenant["a"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_first_message_ends_the_wait_for_the_end_of_its_handshake(tenancy, monkeypatch):
    """It may come before the kernel's counts show that end, or without them. Here no clock ends the
    wait: the next tenant's handshake is answered for that message alone."""
    monkeypatch.setattr(Connection, "has_moved", lambda *_: False)
    tenancy.start(lambda: 1000.0)
    for peer in [tenancy.peer("a"), tenancy.peer("b")]:
        assert isinstance(peer.hello(), protocol.Welcome)


@pytest.mark.parametrize("greeting", [b"", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL"])
def test_peers_that_never_finish_their_handshake_keep_nobody_out(
    context: zmq.Context, greeting: bytes, monkeypatch: pytest.MonkeyPatch
):
    """A connection that sends nothing counted against the limit for five seconds."""
    monkeypatch.setattr(auth, "HANDSHAKE_MS", 600_000)  # libzmq ends none of them meanwhile
    monkeypatch.setattr(connections, "LEAST_HANDSHAKES", 10)
    with memory_server(max_connections=8) as server:
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        silent = []
        for _ in range(40):
            peer = lent(socket.create_connection((host, int(port)), timeout=60))
            peer.sendall(greeting)
            silent.append(peer)
        honest = [Peer(context, server.endpoint) for _ in range(8)]
        for one in honest:
            one.hello()
        stats = honest[0].stats()
        assert stats.counters["peers_refused_connections"] == 0
        assert stats.counters["peers_refused_unfinished"] >= 40 - 10
        assert server._auth.num_connections <= 8 + 10
        for peer in silent:
            peer.close()


def test_connections_of_one_moment_are_no_more_than_may_be(context: zmq.Context):
    """Each was let in while there was room for one; those beyond are closed, and refused when
    they come again."""
    with memory_server(max_connections=4) as server:
        own = zmq.Context()
        peers = [Peer(own, server.endpoint) for _ in range(12)]
        for peer in peers:
            peer.send(protocol.Stats(request_id=1))
        deadline = time.monotonic() + PATIENCE_S
        while server._auth.counters["peers_refused_connections"] < 8:
            assert time.monotonic() < deadline, server._auth.counters
            time.sleep(0.01)
        while sum(server._auth.connections.by_tenant.values()) != 4:
            assert time.monotonic() < deadline, server._auth.connections.by_tenant
            time.sleep(0.01)
        own.destroy(linger=0)
