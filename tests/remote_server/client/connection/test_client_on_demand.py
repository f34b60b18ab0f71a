"""Connections on demand: opened by the first transfer, closed when idle, and never waited for."""

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from client_helpers import (
    NAMESPACE,
    Clock,
    assert_unavailable,
    assert_works,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    turn,
)
from fake_server import PATIENCE_S, FakeServer, eventually
from shared_messages import SharedGet

from remote_server.client import GetOutcome, RemoteClient
from remote_server.client.connection.connection import Connection
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Get, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]

IDLE_S = 30.0


@pytest.fixture
def more_settings() -> dict[str, object]:
    return {"idle_close_s": IDLE_S}


class Sockets:
    """The connections of all clients, by whether they carry blocks to the client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._all: list[Any] = []
        make = zmq.Context.socket

        def make_and_note(context: Any, kind: int) -> Any:
            socket = make(context, kind)
            if kind == zmq.DEALER:
                self._all.append(socket)
            return socket

        monkeypatch.setattr(zmq.Context, "socket", make_and_note)

    @property
    def num_made(self) -> int:
        return len(self._all)

    @property
    def num_open(self) -> int:
        return sum(not socket.closed for socket in self._all)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Sockets:
    return Sockets(monkeypatch)


def a_put(client: RemoteClient, **times: float) -> Any:
    return client.put(NAMESPACE, [key(7)], rows_of(range(1)), **times)


def a_get(client: RemoteClient, **times: float) -> Any:
    return client.get(NAMESPACE, [key(0)], empty_rows(1), **times)


# ── opened and closed ────────────────────────────────────────────────────────────────────


def test_a_connection_is_opened_by_the_first_transfer_of_its_kind_and_kept_while_used(
    sockets: Sockets, timed: RemoteClient, fake: FakeServer, clock: Clock
):
    timed.lookup(NAMESPACE, [key(1)]).result(PATIENCE_S)
    assert sockets.num_made == 1
    assert a_put(timed).result(PATIENCE_S).created == 1
    assert sockets.num_made == 2
    hold_blocks(fake, range(1))
    for _ in range(5):
        assert a_get(timed).result(PATIENCE_S).landed == [0]
        turn(timed)
        clock.advance(IDLE_S - 1)
        turn(timed)
    assert (sockets.num_made, sockets.num_open) == (3, 2), "that for puts was idle"


def test_idle_connections_are_closed_and_opened_again(
    sockets: Sockets, timed: RemoteClient, fake: FakeServer, clock: Clock
):
    for number in range(1, 4):
        assert_works(timed, fake)
        assert a_put(timed).result(PATIENCE_S).error is None
        turn(timed)
        assert sockets.num_open == 3
        clock.advance(IDLE_S + 1)
        eventually(lambda: sockets.num_open == 1, "only small requests have a connection")
        assert sockets.num_made == 1 + 2 * number
        assert timed.ready
    assert timed.counters()["disconnects"] == 0
    assert timed.counters()["get_resets"] == timed.counters()["put_resets"] == 0


@pytest.mark.parametrize(("kind", "begin"), [(Get, a_get), (Put, a_put)])
def test_a_connection_is_not_idle_while_a_reply_is_due(
    sockets: Sockets, timed: RemoteClient, fake: FakeServer, clock: Clock, kind: type,
    begin: Callable[..., Any],
):  # fmt: skip
    fake.silence(kind)
    hold_blocks(fake, range(1))
    times = {"stall_s": 1e6} if kind is Get else {}
    future = begin(timed, timeout_s=1e6, **times)
    (asked,) = fake.wait_for(kind)
    for _ in range(3):
        clock.advance(IDLE_S + 1)
        turn(timed)
    assert not future.done()
    fake.do(lambda: fake.answer(asked))
    assert future.result(PATIENCE_S).error is None
    assert sockets.num_made == 2


def test_a_connection_whose_get_is_late_is_closed_too(
    sockets: Sockets, timed: RemoteClient, fake: FakeServer, clock: Clock
):
    """Its reply may still come; then nothing else would give the loop a turn."""
    fake.silence(Get)
    future = a_get(timed)
    fake.wait_for(Get)
    turn(timed)
    clock.advance(0.06)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.LATE]
    clock.advance(1.1)
    eventually(lambda: sockets.num_open == 1)
    fake.behave()
    assert_works(timed, fake)


def test_messages_of_shared_memory_have_a_connection_on_demand_and_the_region_is_attached_at_once(
    sockets: Sockets, local_timed: RemoteClient, near: FakeServer, clock: Clock
):
    eventually(lambda: local_timed.transport == "shm")
    assert (sockets.num_made, local_timed.ready) == (1, True)
    for number in range(1, 3):
        assert_works(local_timed, near)
        assert a_put(local_timed).result(PATIENCE_S).error is None
        eventually(lambda n=number: local_timed.counters()["released_leases"] == n)
        turn(local_timed)
        clock.advance(IDLE_S + 1)
        eventually(lambda: sockets.num_open == 1)
        assert sockets.num_made == 1 + number
        assert local_timed.transport == "shm"
    heap = [memoryview(bytearray(4096))]
    for begin in (local_timed.put, local_timed.get, local_timed.put):
        assert begin(NAMESPACE, [key(7)], heap).result(PATIENCE_S).error is None
    assert_works(local_timed, near)
    assert sockets.num_open == 4, "the most that one client has"
    assert len(near.attaches) == 1
    assert len(near.all_asked(SharedGet)) == 3


# ── the time to connect ──────────────────────────────────────────────────────────────────


class Handshakes:
    """Connections on demand that do not learn that they are connected while `held`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = True
        note_poll = Connection.note_poll

        def note_unless_held(connection: Connection, events: Any) -> None:
            withheld = self.held and connection.on_demand
            note_poll(connection, {} if withheld else events)

        monkeypatch.setattr(Connection, "note_poll", note_unless_held)


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handshakes]:
    handshakes = Handshakes(monkeypatch)
    yield handshakes
    handshakes.held = False


def test_a_stall_begins_when_the_connection_is_there(
    timed: RemoteClient, fake: FakeServer, clock: Clock, handshakes: Handshakes
):
    fake.silence(Get)
    future = a_get(timed, stall_s=0.05)
    turn(timed)
    for _ in range(9):
        clock.advance(0.1)
        turn(timed)
    handshakes.held = False
    fake.wait_for(Get)
    turn(timed)
    clock.advance(0.04)
    turn(timed)
    assert not future.done()
    clock.advance(0.02)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.LATE]


def test_a_put_that_waits_for_its_connection_ends_at_its_deadline_and_accuses_no_server(
    timed: RemoteClient, fake: FakeServer, clock: Clock, handshakes: Handshakes
):
    futures = [a_put(timed, timeout_s=0.1) for _ in range(4)]
    turn(timed)
    clock.advance(0.11)
    for future in futures:
        put = future.result(PATIENCE_S)
        assert isinstance(put.error, DeadlineExceeded)
        assert put.bytes_sent == 0
    clock.advance(0.3)
    turn(timed)
    assert timed.ready, "the breaker did not open"
    assert timed.counters()["put_resets"] == 0
    handshakes.held = False
    assert a_put(timed).result(PATIENCE_S).created == 1


def test_a_connection_that_cannot_be_opened_ends_what_waits_for_it_as_unavailable(
    timed: RemoteClient, fake: FakeServer, clock: Clock, handshakes: Handshakes
):
    futures = [a_get(timed, stall_s=0.05), a_put(timed)]
    turn(timed)
    clock.advance(1.1)
    for future in futures:
        assert isinstance(future.result(PATIENCE_S).error, ServerUnavailable)
    assert timed.ready
    assert isinstance(a_put(timed).result(PATIENCE_S).error, ServerUnavailable), "for a moment"
    clock.advance(0.03)
    handshakes.held = False
    assert_works(timed, fake)
    assert a_put(timed).result(PATIENCE_S).error is None


def test_where_no_file_can_be_opened_a_transfer_is_unavailable_and_a_later_one_is_not(
    timed: RemoteClient, fake: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    def no_files(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", no_files)
        for future in (a_get(timed), a_put(timed)):
            assert isinstance(future.result(PATIENCE_S).error, ServerUnavailable)
    assert timed.ready
    clock.advance(0.03)
    assert_works(timed, fake)


# ── the server ───────────────────────────────────────────────────────────────────────────


def test_a_server_that_leaves_while_only_small_requests_have_a_connection_is_unavailable_at_once(
    sockets: Sockets, make_client, fake: FakeServer
):
    client = make_client(fake.endpoint)
    fake.close()
    eventually(lambda: not client.ready)
    assert_unavailable(client)
    assert sockets.num_open <= 1, "nothing is opened to a server that is not there"
    with FakeServer(fake.endpoint, epoch="epoch-2") as again:
        eventually(lambda: client.ready)
        assert_works(client, again)


def test_a_transfer_that_waits_for_its_connection_ends_when_the_server_leaves(
    make_client, fake: FakeServer, handshakes: Handshakes
):
    client = make_client(fake.endpoint)
    future = a_get(client, stall_s=60, timeout_s=60)
    turn(client)
    fake.close()
    eventually(lambda: not client.ready)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.UNAVAILABLE]
