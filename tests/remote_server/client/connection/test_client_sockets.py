"""The client's sockets: what may be queued on them, and what becomes of one that cannot be made."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from client_helpers import (
    NAMESPACE,
    assert_unavailable,
    assert_works,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
)
from fake_server import PATIENCE_S, eventually
from half_read import FRAMES

from remote_server import protocol
from remote_server.protocol import Found, Get, Lookup, Put, Touch

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]

ROOT = Path(__file__).resolve().parents[4]

CONNECTIONS = ("control", "gets", "puts")

ASK = {
    "control": (Lookup, lambda client: client.lookup(NAMESPACE, [key(1)], timeout_s=60)),
    "gets": (Get, lambda client: client.get(NAMESPACE, [key(1)], empty_rows(1), stall_s=60)),
    "puts": (Put, lambda client: client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=60)),
}
"""Brings a server in touch with one connection, whose id it learns from the request."""


def _flood(fake, asked):
    """More replies than were asked for, on the connection of `asked`: the client ends it."""
    for _ in range(2000):
        fake.send(asked, _unasked(fake))


def _unasked(fake):
    return Found(request_id=10**9, epoch=fake.epoch, prefix=0, states=b"")


def _many_frames(fake, asked):
    """Not received to their end, while every caller of this client waits."""
    frames = [b""] * (4 * protocol.MAX_KEYS_PER_MESSAGE)
    fake.send_raw(asked, *protocol.encode(_unasked(fake)), *frames)


def _many_frames_of_nothing(fake, asked):
    fake.send_raw(asked, b"nonsense", *[b""] * (4 * protocol.MAX_KEYS_PER_MESSAGE))


def _a_large_header(fake, asked):
    """Where no blocks come."""
    fake.send_raw(asked, protocol.MAGIC, bytes(protocol.MAX_HEADER_BYTES + 1))


def test_no_socket_has_a_receive_mark_and_only_the_one_for_blocks_has_no_heartbeats(
    monkeypatch, near, shared, make_client
):
    """A mark and a heartbeat together end the process when the connection is reset."""
    open_socket, sockets = zmq.Context.socket, []

    def open_and_note(context, kind):
        socket = open_socket(context, kind)
        if kind == zmq.DEALER:
            sockets.append(socket)
        return socket

    monkeypatch.setattr(zmq.Context, "socket", open_and_note)
    make_client(near.endpoint)
    assert [socket.rcvhwm for socket in sockets] == [0] * 4
    assert sorted(socket.heartbeat_ivl for socket in sockets) == [0, 2000, 2000, 2000]
    (for_blocks,) = [socket for socket in sockets if not socket.heartbeat_ivl]
    assert for_blocks.maxmsgsize == protocol.MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("connection", "sends"),
    [
        *((connection, _flood) for connection in CONNECTIONS),
        ("control", _many_frames_of_nothing), ("gets", _many_frames),
        ("gets", _many_frames_of_nothing), ("puts", _many_frames),
        ("control", _a_large_header), ("puts", _a_large_header),
    ],
)  # fmt: skip
def test_a_server_that_sends_too_much_loses_that_connection(connection, sends, client, fake):
    kind, ask = ASK[connection]
    fake.silence(kind)
    future = ask(client)
    (asked,) = fake.wait_for(kind)
    fake.do(lambda: sends(fake, asked))
    eventually(lambda: client.counters()["disconnects"] == 1, "it has hung up")
    eventually(future.done, "what waited on it has ended")
    counters = client.counters()
    assert counters["late_replies"] < 1010, "what was queued with them is gone"
    if sends is not _a_large_header:
        assert counters["protocol_errors"] + counters["late_replies"] >= 1
    fake.behave()
    eventually(lambda: client.ready)
    assert_works(client, fake)


def test_a_reply_twice_and_a_few_frames_too_many_cost_nothing(client, fake):
    fake.rules[Lookup] = lambda asked: (
        fake.send_raw(asked, *protocol.encode(_unasked(fake)), *[b"x"] * 16),
        fake.answer(asked),
    )
    client.lookup(NAMESPACE, [key(1)]).result(PATIENCE_S)
    assert client.counters()["protocol_errors"] == 1
    fake.rules[Touch] = lambda asked: [fake.answer(asked) for _ in range(3)]
    for _ in range(100):
        assert client.touch(NAMESPACE, [key(1)]).result(PATIENCE_S) == 1
    assert client.counters()["disconnects"] == 0
    assert client.counters()["late_replies"] >= 190


def _no_files(context, kind):
    """In place of `Context.socket`: the process may not open another file."""
    raise zmq.ZMQError(errno.EMFILE)


def _no_monitors(open_socket):
    """In place of `Context.socket`: the process may open a socket, and no monitor of it."""

    def fail(*_):
        raise zmq.ZMQError(errno.EMFILE)

    def open_without_monitor(context, kind):
        socket = open_socket(context, kind)
        socket.get_monitor_socket = fail
        return socket

    return open_without_monitor


@pytest.mark.parametrize(
    ("connection", "what"),
    [("control", "socket"), ("control", "monitor"), ("gets", "socket"), ("puts", "monitor")],
)
def test_where_no_file_can_be_opened_a_connection_is_made_again_later(
    connection, what, client, fake, monkeypatch, caplog
):
    """Its connections are lost meanwhile; with them all requests, and the client for a while."""
    keys = hold_blocks(fake, range(2))
    kind, ask = ASK[connection]
    fake.silence(kind)
    ask(client)
    (asked,) = fake.wait_for(kind)
    opens = _no_files if what == "socket" else _no_monitors(zmq.Context.socket)
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", opens)
        fake.do(lambda: _flood(fake, asked))
        eventually(lambda: "cannot open a connection" in caplog.text)
        eventually(lambda: client.counters()["disconnects"] == 1)
        assert not client.ready
        if connection == "control":
            assert_unavailable(client)
        client.get(NAMESPACE, keys, empty_rows(2)).result(PATIENCE_S)
        client.put(NAMESPACE, keys, rows_of(range(2))).result(PATIENCE_S)
    fake.behave()
    eventually(lambda: client.ready, "it has found a file")
    assert_works(client, fake)


def test_a_connection_that_is_lost_in_the_middle_of_a_message_does_not_end_the_process():
    """It is an engine's process: libzmq would abort it."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("half_read.py"))],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == FRAMES, "the rest of the message"
