"""How a client and a server on one host find each other, and lose each other again."""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    PatientClient,
    Shared,
    block,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    turn,
    wake,
)  # fmt: skip
from descriptors import memfd, open_fds
from fake_server import ARENA_BYTES, PATIENCE_S, FakeServer, eventually
from msgspec.structs import replace
from shared_messages import SharedGet, SharedPut
from smaps import mapped

from remote_server.client import ClientConfig, GetOutcome, RemoteClient, SharedRegion
from remote_server.client.shm.attachment import (
    ANSWER_S,
    BUSY_S,
    LONGEST_FULL_S,
    LONGEST_RETRY_S,
    RETRY_S,
)
from remote_server.client.shm.link import ShmLink
from remote_server.errors import ConfigError, ServerUnavailable
from remote_server.protocol import Get, Hello, NotAttached, Put, decode_local
from remote_server.shm import mapping

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]


UNAVAILABLE = GetOutcome.UNAVAILABLE
FAILED = ("the server does not offer it", "its local socket cannot be reached", "another secret")


def works(client, near, kind):
    keys = hold_blocks(near, range(2))
    rows = empty_rows(2)
    before = len(near.all_asked(kind))
    got = client.get(NAMESPACE, keys, rows).result(PATIENCE_S)
    assert got.landed == [0, 1]
    assert [bytes(row) for row in rows] == [block(0), block(1)]
    assert len(near.all_asked(kind)) == before + 1


def reason_of(client):
    links = [one for one in client._loop.channels if isinstance(one, ShmLink)]
    return links[0]._attachment.reason if links else ""


@pytest.fixture
def auto(near, shared, make_client):
    """A client that prefers shared memory and does without."""
    client = make_client(near.endpoint, transport="auto")
    eventually(lambda: client.transport == "shm")
    return client


def test_one_region_to_a_client(local, shared):
    with pytest.raises(ConfigError, match="one already"):
        local.register(shared.region.view, shared.region.fd)


def test_a_view_and_a_file_that_do_not_belong_together_are_told_at_once(near, make_client):
    client = make_client(near.endpoint)
    region = SharedRegion(1 << 20)
    for view, fd in (
        (region.view[:4096], region.fd),
        (region.view[::2], region.fd),
        (memoryview(b""), region.fd),
        (region.view, 9999),
    ):
        with pytest.raises(ConfigError, match="region"):
            client.register(view, fd)
    region.close()


# ── refused, silent, lying ───────────────────────────────────────────────────────────────


def test_a_server_without_shared_memory_is_served_over_tcp(fake, shared, make_client, caplog):
    caplog.set_level(logging.INFO, "remote_server")
    client = make_client(fake.endpoint, transport="auto")
    eventually(lambda: "does not offer it" in caplog.text)
    works(client, fake, Get)
    only = make_client(fake.endpoint, transport="shm", wait=False)
    eventually(lambda: only.counters()["shm_refused"] == 1)
    assert not only.ready


def test_a_refusal_means_unavailable_when_nothing_else_is_allowed(
    near, shared, make_client, caplog
):
    near.refuse_attach("not sealed")
    client = make_client(near.endpoint, wait=False)
    eventually(lambda: client.counters()["shm_refused"] == 1)
    assert not client.ready
    assert client.stats().result(PATIENCE_S), "the server is there"
    got = client.get(NAMESPACE, [key(0)], empty_rows(1)).result(PATIENCE_S)
    assert got.outcomes == [UNAVAILABLE]
    assert "not sealed" in str(got.error)
    put = client.put(NAMESPACE, [key(0)], rows_of(range(1))).result(PATIENCE_S)
    assert isinstance(put.error, ServerUnavailable)
    assert client.put(NAMESPACE, [key(0)], [memoryview(block(0))]).result(PATIENCE_S).created == 1
    assert not near.all_asked(SharedPut) + near.all_asked(SharedGet)
    assert caplog.text.count("not sealed") == 1


def test_a_silent_local_socket_is_given_up_and_tried_again(near, shared, make_client, clock):
    near.local_rule = lambda connection, message, files: None
    client = make_client(near.endpoint, transport="auto", clock=clock)
    eventually(lambda: near.attaches)
    clock.advance(ANSWER_S + 0.1)
    client.check()
    works(client, near, Get)
    near.local_rule = near.attach
    clock.advance(RETRY_S + 0.1)
    eventually(lambda: client.transport == "shm")
    works(client, near, SharedGet)


def full_socket() -> tuple[socket.socket, list[socket.socket]]:
    """A local socket whose queue others fill."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(PATIENCE_S)
    listener.bind("\0kvferry-" + secrets.token_hex(16))
    listener.listen(1)
    others: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            others.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            others[-1].connect(listener.getsockname())
    others.pop().close()
    return listener, others


def test_a_full_local_socket_is_tried_again_soon(near, shared, make_client, clock):
    """EAGAIN cost five seconds on TCP, and then ten, and so on."""
    listener, others = full_socket()
    near.local_socket = listener.getsockname()[1:].decode()
    client = make_client(near.endpoint, transport="auto", clock=clock)
    eventually(lambda: client.counters()["shm_busy"])
    hellos = len(near.all_asked(Hello))
    for number in range(1, 4):
        eventually(lambda number=number: client.counters()["shm_busy"] == number)
        clock.advance(min(BUSY_S * 2 ** (number - 1), LONGEST_FULL_S) + 0.001)
    for one in others:
        listener.accept()[0].close()
        one.close()
    clock.advance(0.5)  # for an attempt that came before this
    connection, _ = listener.accept()
    data, files, _, _ = socket.recv_fds(connection, 4096, 4)
    near.attach(connection, decode_local(data), list(files))
    eventually(lambda: client.transport == "shm")
    assert len(near.all_asked(Hello)) == hellos, "no other welcome was requested"
    for fd in files:
        os.close(fd)
    client.close()
    connection.close()
    listener.close()


def test_an_attach_that_found_no_place_is_sent_again_soon(near, shared, make_client, clock):
    near.local_rule = lambda connection, message, files: near.say(
        connection, NotAttached(reason="no place", again=True), []
    )
    client = make_client(near.endpoint, transport="auto", clock=clock)
    eventually(lambda: client.counters()["shm_busy"] == 1)
    works(client, near, Get)
    near.local_rule = near.attach
    clock.advance(BUSY_S + 0.001)
    eventually(lambda: client.transport == "shm")
    assert client.counters()["shm_refused"] == 0


def _not_offered(near):
    near.near = False


def _another_name(near):
    near.local_socket += "0"


def _another_secret(near):
    near.local_secret = b"another"


@pytest.mark.parametrize("damage", [_not_offered, _another_name, _another_secret])
def test_a_welcome_that_was_damaged_on_the_way_costs_shared_memory_until_the_next_attempt(
    near, shared, make_client, clock, damage
):
    def attach(connection, message, files):
        if message.secret:
            near.say(connection, NotAttached(reason="another secret"), [])
        else:
            near.attach(connection, message, files)

    near.local_rule = attach
    right = near.near, near.local_socket, near.local_secret
    damage(near)
    client = make_client(near.endpoint, transport="shm", clock=clock, wait=False)
    eventually(lambda: reason_of(client).startswith(FAILED))
    near.near, near.local_socket, near.local_secret = right
    clock.advance(RETRY_S + 0.1)
    eventually(lambda: client.ready)
    works(client, near, SharedGet)


def test_the_namespaces_stay_welcome_while_the_welcome_is_requested_more_and_more_rarely(
    near, shared, make_client, clock
):
    near.near = False
    client = make_client(near.endpoint, transport="auto", clock=clock)
    hellos = len(near.all_asked(Hello))
    near.silence(Hello)
    pauses = [RETRY_S, 10, 20, 40, LONGEST_RETRY_S, LONGEST_RETRY_S]
    for number, pause_s in enumerate(pauses, start=1):
        clock.advance(pause_s - 0.1)
        turn(client)
        assert len(near.all_asked(Hello)) == hellos + number - 1
        clock.advance(0.2)
        eventually(lambda number=number: len(near.all_asked(Hello)) == hellos + number)
        assert client.ready
        works(client, near, Get)


def _unsealed(near):
    return memfd(ARENA_BYTES, seals=0)


def _too_small(near):
    return memfd(ARENA_BYTES // 2)


def _no_file(near):
    return os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize("make_arena", [_unsealed, _too_small, _no_file])
def test_an_arena_that_could_kill_its_reader_is_not_mapped(
    near, shared, make_client, make_arena, caplog
):
    caplog.set_level(logging.INFO, "remote_server")
    fd = make_arena(near)
    near.local_rule = lambda connection, message, files: near.say(connection, near.attached(), [fd])
    client = make_client(near.endpoint, transport="auto")
    eventually(lambda: client.counters()["shm_refused"] == 1)
    works(client, near, Get)
    assert "arena" in caplog.text
    os.close(fd)


LIES = {
    "no arena": lambda near, to: near.say(to, near.attached(), []),
    "an answer without end": lambda near, to: to.sendall(b"\xc6\xff\xff\xff\xff" + bytes(9000)),
    "two arenas": lambda near, to: near.say(to, near.attached(), [near.arena_fd] * 2),
    "another server": lambda near, to: near.say(
        to, replace(near.attached(), epoch="epoch-9"), [near.arena_fd]
    ),
    "a question": lambda near, to: near.say(to, near.attaches[0], []),
    "noise": lambda near, to: to.send(b"\xc1 noise"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_local_socket_may_say_what_it_likes(near, shared, make_client, lie):
    before = open_fds()
    near.local_rule = lambda connection, message, files: LIES[lie](near, connection)
    client = make_client(near.endpoint, transport="auto")
    eventually(lambda: client.counters()["shm_refused"] == 1)
    works(client, near, Get)
    near.hang_up()
    client.close()
    eventually(lambda: open_fds() <= before, "no descriptor is left behind")


# ── losing each other ────────────────────────────────────────────────────────────────────


def test_a_server_that_hangs_up_ends_what_relied_on_it(local, near):
    near.silence(SharedGet, SharedPut)
    keys = hold_blocks(near, range(1))
    got = local.get(NAMESPACE, keys, empty_rows(1), stall_s=60, timeout_s=60)
    put = local.put(NAMESPACE, [key(9)], rows_of(range(1)), timeout_s=60)
    near.wait_for(SharedGet)
    near.wait_for(SharedPut)
    near.hang_up()
    assert got.result(PATIENCE_S).outcomes == [UNAVAILABLE]
    assert isinstance(put.result(PATIENCE_S).error, ServerUnavailable)
    assert local.transport == "tcp"
    assert local.counters()["shm_detached"] == 1


def test_after_a_hang_up_tcp_is_used_until_it_is_attached_again(near, shared, make_client, clock):
    client = make_client(near.endpoint, transport="auto", clock=clock)
    eventually(lambda: client.transport == "shm")
    near.hang_up()
    eventually(lambda: client.transport == "tcp")
    works(client, near, Get)
    clock.advance(RETRY_S + 0.1)
    eventually(lambda: client.transport == "shm")
    works(client, near, SharedGet)


def test_a_region_that_the_server_forgot_is_offered_again(near, shared, make_client, clock):
    client = make_client(near.endpoint, transport="auto", clock=clock)
    eventually(lambda: client.transport == "shm")
    near.rules[SharedGet] = near.refuse("unknown_region")
    got = client.get(NAMESPACE, [key(0)], empty_rows(1), stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [UNAVAILABLE]
    assert client.transport == "tcp"
    near.behave()
    clock.advance(RETRY_S + 0.1)
    eventually(lambda: client.transport == "shm")


def test_a_restarted_server_is_attached_at_once(auto, near):
    works(auto, near, SharedGet)
    near.close()
    eventually(lambda: auto.transport == "tcp")
    with FakeServer(near.endpoint, epoch="epoch-2", near=True) as successor:
        eventually(lambda: auto.transport == "shm")
        works(auto, successor, SharedGet)
        put = auto.put(NAMESPACE, [key(9)], rows_of(range(1))).result(PATIENCE_S)
        assert put.created == 1
        assert not successor.all_asked(Put)


def test_a_client_is_not_ready_while_it_maps_the_blocks_of_an_earlier_epoch(
    near, shared, make_client, clock, monkeypatch
):
    client = make_client(near.endpoint, transport="shm", clock=clock)
    eventually(lambda: client.ready)
    reached, go_on = threading.Event(), threading.Event()
    poll = ShmLink._poll

    def held(link: ShmLink, *arguments: object) -> None:
        if client._loop.session.ready and client._loop.session.epoch == "epoch-2":
            reached.set()
            assert go_on.wait(PATIENCE_S)
        poll(link, *arguments)

    monkeypatch.setattr(ShmLink, "_poll", held)
    near.epoch = "epoch-2"
    client.stats(timeout_s=60)
    try:
        assert reached.wait(PATIENCE_S)
        assert not client.ready
    finally:
        go_on.set()
    eventually(lambda: client.counters()["shm_detached"] == 1)
    clock.advance(RETRY_S + 0.1)
    eventually(lambda: client.ready)
    assert client.put(NAMESPACE, [key(9)], rows_of(range(1))).result(PATIENCE_S).created == 1


def test_an_exception_inside_the_loop_begins_again(auto, near, monkeypatch, breaks_inside):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    near.silence(SharedGet)
    keys = hold_blocks(near, range(1))
    got = auto.get(NAMESPACE, keys, empty_rows(1), stall_s=60)
    near.wait_for(SharedGet)
    with monkeypatch.context() as patch:
        patch.setattr(ShmLink, "expire", fail)
        wake(auto)
        assert got.result(PATIENCE_S).outcomes == [UNAVAILABLE]
    near.behave()
    eventually(lambda: auto.ready and auto.transport == "shm")
    works(auto, near, SharedGet)


def attached_to(near: FakeServer) -> tuple[RemoteClient, Shared]:
    """A client that no fixture closes, and its memory."""
    shared = Shared(1 << 20)
    client = PatientClient(ClientConfig(near.endpoint))
    client.register(shared.region.view, shared.region.fd)
    client.declare(NAMESPACE, BLOCK_BYTES)
    eventually(lambda: client.transport == "shm")
    return client, shared


def test_close_leaves_nothing_mapped_and_no_descriptor(near):
    before = open_fds(), mapped()
    client, shared = attached_to(near)
    client.close()
    shared.region.close()
    near.hang_up()
    near.forget_region()
    eventually(lambda: open_fds() <= before[0], "no descriptor is left behind")
    eventually(lambda: mapped() <= before[1], "nothing is left mapped")


def test_close_waits_for_the_arenas_of_all_earlier_attachments(near, monkeypatch):
    """The first one's thread is the last to unmap, as that of a large arena may be."""
    closing, began, unmapped = threading.Event(), [], []

    def slowly(address, num_bytes):
        began.append(num_bytes)
        if began.count(ARENA_BYTES) == 1 == len(began):
            closing.wait(PATIENCE_S)
            time.sleep(0.05)
        unmapped.append(num_bytes)

    monkeypatch.setattr(mapping, "unmap", slowly)
    client, shared = attached_to(near)
    near.close()
    eventually(lambda: client.transport == "tcp")
    for epoch in ("epoch-2", "epoch-3"):
        with FakeServer(near.endpoint, epoch=epoch, near=True):
            eventually(lambda: client.transport == "shm")
        eventually(lambda: client.transport == "tcp")
    closing.set()
    client.close()
    shared.region.close()
    assert unmapped.count(ARENA_BYTES) == 3, "an arena of an earlier attachment was still mapped"
