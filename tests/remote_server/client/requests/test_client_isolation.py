"""What goes wrong with one request, or in its caller, ends no other and leaves none open."""

import errno
import logging
import math
from concurrent.futures import Future

import pytest
import zmq
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_works,
    block,
    empty_rows,
    hold_blocks,
    io_thread_held,
    key,
    rows_of,
)
from fake_server import PATIENCE_S, eventually

from remote_server import protocol
from remote_server.client import GetOutcome, IoThread
from remote_server.client.requests import requests
from remote_server.client.requests.mailbox import Call, Mailbox
from remote_server.client.shm.get import ShmGets
from remote_server.client.shm.link import ShmLink
from remote_server.errors import (
    ConfigError,
    LocalProtocolError,
    MoverClosed,
    ServerUnavailable,
)
from remote_server.protocol import Get, Stats

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]


@pytest.fixture
def io_thread(any_connections: IoThread | None) -> IoThread | None:
    return any_connections


NO_NAMESPACES = ["\ud800", "", "x" * 129, 7, ["a list"]]


@pytest.fixture
def bystander(client, fake):
    """A request under way, which must not be ended by what happens to others."""
    fake.silence(Stats)
    future = client.stats(timeout_s=60)
    (asked,) = fake.wait_for(Stats)
    yield future
    assert not future.done(), "it was ended by somebody else's mistake"
    fake.do(lambda: fake.answer(asked))
    assert future.exception(PATIENCE_S) is None
    assert client.counters()["internal_errors"] == 0


@pytest.mark.parametrize("namespace", NO_NAMESPACES, ids=repr)
def test_what_cannot_be_a_namespace_is_refused_and_ends_that_request_alone(
    namespace, client, fake, bystander
):
    for future in (
        client.lookup(namespace, [key(1)]),
        client.touch(namespace, [key(1)]),
        client.clear(namespace),
        client.keep(namespace),
        client.keep(namespace, [key(1)]),
    ):
        assert isinstance(future.exception(PATIENCE_S), LocalProtocolError)
    got = client.get(namespace, [key(1)], empty_rows(1)).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.REFUSED]
    put = client.put(namespace, [key(1)], rows_of(range(1))).result(PATIENCE_S)
    assert isinstance(put.error, LocalProtocolError)


@pytest.mark.parametrize(
    ("namespace", "fingerprint"),
    [
        ("\ud800", {}),
        ("another", {"model": "\ud800"}),
        ("another", {"model": object()}),
        ("another", {"model": "x" * protocol.MAX_FINGERPRINT_BYTES}),
    ],
    ids=["namespace", "text", "object", "size"],
)
def test_a_declaration_that_cannot_be_said_fails_at_the_door(
    namespace, fingerprint, client, fake, bystander
):
    """Sent again after each failure, it would end every other request for ever."""
    with pytest.raises(ConfigError):
        client.declare(namespace, 4096, fingerprint)
    assert client.ready


@pytest.mark.parametrize("method", ["lookup", "touch", "put", "get", "stats", "clear", "keep"])
def test_a_deadline_that_never_comes_is_refused_where_it_is_made(method, client):
    about = {
        "lookup": (NAMESPACE, [key(1)]),
        "touch": (NAMESPACE, [key(1)]),
        "keep": (NAMESPACE,),
        "put": (NAMESPACE, [key(1)], rows_of(range(1))),
        "get": (NAMESPACE, [key(1)], empty_rows(1)),
    }.get(method, ())
    with pytest.raises(ValueError, match="nan"):
        getattr(client, method)(*about, timeout_s=math.nan)
    if method == "get":
        with pytest.raises(ValueError, match="nan"):
            client.get(*about, stall_s=math.nan)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_a_callback_that_raises_ends_neither_the_thread_nor_another_request(
    error, client, fake, bystander
):
    def callback(_):
        raise error

    keys = hold_blocks(fake, range(1))
    with io_thread_held(client, fake):
        futures = [
            client.lookup(NAMESPACE, keys, timeout_s=60),
            client.get(NAMESPACE, keys, empty_rows(1), stall_s=60),
            client.put(NAMESPACE, keys, rows_of(range(1)), timeout_s=60),
            client.lookup("undeclared", keys),
        ]
        for future in futures:
            future.add_done_callback(callback)
    for future in futures:
        future.exception(PATIENCE_S)
    assert_works(client, fake)


def test_a_caller_that_releases_its_row_in_the_middle_of_a_get_loses_nothing_of_others(
    client, fake, bystander
):
    fake.silence(Get)
    hold_blocks(fake, range(1))
    memory = bytearray(BLOCK_BYTES)
    row = memoryview(memory)
    future = client.get(NAMESPACE, [key(0)], [row], stall_s=60, timeout_s=60)
    (asked,) = fake.wait_for(Get)
    row.release()
    fake.do(lambda: fake.answer(asked))
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.HIT]
    assert memory == block(0)
    fake.rules.pop(Get)


def test_where_no_socket_can_be_made_rows_travel_over_tcp_and_no_request_ends(
    near, shared, make_client, monkeypatch, caplog
):
    """For the attachment. It is tried again later."""
    tried = []

    def none_left(*_):
        tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("remote_server.client.shm.attachment.socket.socket", none_left)
    with caplog.at_level(logging.INFO):
        client = make_client(near.endpoint, transport="auto")
        eventually(lambda: "cannot create a socket" in caplog.text)
    monkeypatch.undo()
    assert client.transport == "tcp"
    assert_works(client, near)
    assert len(tried) == 1, "it waits before it tries again"


def test_where_no_socket_can_be_made_for_a_region_the_client_becomes_ready_over_tcp(
    fake, shared, make_client, monkeypatch
):
    open_socket, refused = zmq.Context.socket, []
    left = iter(range(3))  # enough for a client without a region

    def open_while_some_are_left(context, kind):
        if kind == zmq.DEALER and next(left, None) is None:
            refused.append(kind)
            raise zmq.ZMQError(errno.EMFILE)
        return open_socket(context, kind)

    monkeypatch.setattr(zmq.Context, "socket", open_while_some_are_left)
    client = make_client(fake.endpoint, transport="auto", idle_close_s=None)
    assert refused
    assert client.transport == "tcp"
    assert_works(client, fake)


def test_a_call_that_fails_while_the_client_closes_keeps_no_request_open():
    def fail():
        raise ZeroDivisionError

    mailbox, future = Mailbox(), Future()
    mailbox.submit(Call(fail))
    mailbox.submit(requests.touch(future, NAMESPACE, [key(1)], timeout_s=1))
    assert not future.done()
    mailbox.close()
    assert isinstance(future.exception(0), ServerUnavailable)


def test_where_no_descriptor_is_left_for_copies_from_the_arena_no_shared_memory_is_used(
    near, shared, make_client, monkeypatch
):
    moves = []

    def none_left(_self, _context, _link, its_moves):
        moves.append(its_moves)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ShmGets, "__init__", none_left)
    client = make_client(near.endpoint, transport="auto")
    assert not any(isinstance(one, ShmLink) for one in client._loop.channels), "it would attach"
    assert_works(client, near)
    assert client.transport == "tcp"
    with pytest.raises(MoverClosed):
        moves[0].fileno()
