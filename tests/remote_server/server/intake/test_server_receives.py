"""What a server takes of what is sent to it: frames, and what libzmq holds."""

import os
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from functools import partialmethod
from typing import Any

import pytest
import zmq
from client_helpers import Clock
from fake_server import eventually
from tenancy import tenancy
from wire_peer import HandPeer, Peer, key

from remote_server import protocol
from remote_server.cli.__main__ import main
from remote_server.errors import ConfigError, ServerFailed
from remote_server.protocol import Error, Lookup
from remote_server.server.config import ServerConfig
from remote_server.server.entrance import penalties
from remote_server.server.intake import intake
from remote_server.server.server import Server
from remote_server.server.upkeep import private_memory
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

assert tenancy

EMPTY_AND_MORE, EMPTY_AND_LAST = b"\x01\x00", b"\x00\x00"

READABLE = bytes([2])


def header(number: int) -> list[bytes]:
    message = Lookup(request_id=number, namespace="ns", keys=[key(1)])
    return protocol.encode(message)


# ── frames ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("frames", [intake.MAX_FRAMES - 1, intake.MAX_FRAMES + 5_000])
def test_a_message_of_too_many_frames_is_refused_and_the_connection_goes_on(
    server: Server, context: zmq.Context, frames: int
):
    peer, other = Peer(context, server.endpoint), Peer(context, server.endpoint)
    peer.hello()
    other.put([1])
    peer.socket.send_multipart([*header(7), *[b""] * (frames - 2)])
    reply, _ = peer.receive()
    assert isinstance(reply, Error) and reply.request_id == 7
    assert reply.code == ("bad_request" if frames < intake.MAX_FRAMES else "bad_message")
    assert peer.lookup([1]).states == other.lookup([1]).states == READABLE


def flood(endpoint: str, frames: int = intake.MAX_FRAMES + 2 * intake.DISCARDED_FRAMES) -> None:
    """By one message of empty frames. Returns when the connection has ended."""
    with closing(HandPeer(endpoint).socket) as peer, suppress(ConnectionError):
        peer.sendall(EMPTY_AND_MORE * frames + EMPTY_AND_LAST)
        while peer.recv(1000):
            pass


def test_a_flood_of_frames_costs_its_sender_the_connection_and_a_wait_that_doubles(
    context: zmq.Context,
):
    """Others stay connected. Without keys all of the sender's address have to wait."""
    clock = Clock()
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=MiB, populate=False, admin="off")
    with Server(config, clock) as server, closing(Peer(context, server.endpoint)) as other:
        other.hello()
        other.put([1])
        for number, wait_s in enumerate((1.0, 2.0, 4.0), 1):
            flood(server.endpoint)
            counters = other.stats().counters
            assert (counters["peers_ended"], counters["sockets_replaced"]) == (number, 0)
            clock.now += 0.9 * wait_s
            refused = counters["peers_refused_waiting"]
            with closing(Peer(context, server.endpoint)):
                other.stats_once(lambda s: s.counters["peers_refused_waiting"] > refused)  # noqa: B023
            clock.now += 0.1 * wait_s
            with closing(Peer(context, server.endpoint)) as newcomer:
                assert newcomer.lookup([1]).states == READABLE
            assert other.lookup([1]).states == READABLE


def test_with_keys_a_flood_of_frames_is_that_of_a_key(tenancy):
    tenancy.write(a='memory = "1MiB"', b='memory = "1MiB"')
    clock = Clock()
    tenancy.start(clock)
    one, others = tenancy.peer("a"), tenancy.peer("b")
    others.hello()
    one.socket.send_multipart([b""] * (intake.MAX_FRAMES + 2 * intake.DISCARDED_FRAMES))
    others.stats_once(lambda s: s.counters["peers_ended"] == 1)
    tenancy.peer("a")
    others.stats_once(lambda s: s.counters["peers_refused_waiting"] > 0)
    tenancy.peer("b").stats()
    clock.now += 1.0
    tenancy.peer("a").stats()


def test_a_message_of_a_million_frames_costs_all_connections_and_no_block(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    """Others connect again by themselves, to the same address."""
    monkeypatch.setattr(intake, "MOST_DISCARDED", 2 * intake.DISCARDED_FRAMES)
    monkeypatch.setattr(penalties, "FIRST_WAIT_S", 0.0)
    other = Peer(context, server.endpoint)
    other.hello()
    other.put([1])
    flood(server.endpoint, intake.MAX_FRAMES + 3 * intake.DISCARDED_FRAMES)
    eventually(lambda: server.snapshot().counters["sockets_replaced"] == 1)
    newcomer = Peer(context, server.endpoint)
    assert newcomer.lookup([1]).states == other.lookup([1]).states == READABLE
    listener = server._auth.listener()
    assert not os.get_blocking(listener), "an accept that came too late stops libzmq's thread"
    os.close(listener)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "lo", "*"])
def test_no_other_process_can_take_the_port_while_connections_are_closed(
    host: str, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    config = ServerConfig(
        bind=f"tcp://{host}:*", memory=MiB, populate=False, admin="off", insecure=host == "*"
    )
    try:
        server = Server(config)
        server.start()
    except ConfigError:
        pytest.skip(f"{host} cannot be bound here")
    port = int(server.endpoint.rpartition(":")[2])
    taken, make_router = [], intake.make_router

    def make_router_late(*of: Any) -> Any:
        """Another asks for the port, for as long as libzmq's thread needs to close its sockets."""
        for _ in range(100):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    other.bind(("127.0.0.1", port))
                    other.listen()
                    taken.append(port)
            time.sleep(0.001)
        return make_router(*of)

    monkeypatch.setattr(intake, "make_router", make_router_late)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        address = server.endpoint.replace("0.0.0.0", "127.0.0.1")
        context.ipv6 = ":" in host
        with closing(Peer(context, address)) as peer:
            peer.hello()
            peer.put([1])
        for _ in range(3):
            server.loop_calls.call(lambda: server._start_over("a test")).result(30)
            with closing(Peer(context, address)) as peer:
                peer.hello()
                assert peer.lookup([1]).states == READABLE
        assert not taken or ":" in host, "IPv6 has ports of its own"
    finally:
        server.leave()
        thread.join()
        server.stop()


def test_a_server_that_cannot_go_on_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def start_over(_: Any) -> None:
        raise ServerFailed("it cannot listen again")

    monkeypatch.setattr(intake.Intake, "start_over", start_over)
    monkeypatch.setattr(Server, "serve", partialmethod(_fails_once, Server.serve))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = main(
            ["serve", "--bind", "tcp://127.0.0.1:*", "--memory", "1MiB", "--admin", "off"]
        )
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert status == 1
    assert "it cannot listen again" in capsys.readouterr().err


def _fails_once(server: Server, serve: Any) -> None:
    server._start_over("a test")
    serve(server)


def test_a_message_without_an_end_costs_the_connections_when_it_has_grown_too_large(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    """Nothing of it has come to the server: libzmq hands over whole messages."""
    monkeypatch.setattr(private_memory, "SPARE_BYTES", 64 * MiB)
    monkeypatch.setattr(private_memory, "BYTES_PER_CONNECTION", 0)
    other = Peer(context, server.endpoint)
    other.hello()
    other.put([1])
    peer = HandPeer(server.endpoint).socket
    piece = bytes([3]) + (1 * MiB).to_bytes(8, "big") + bytes(1 * MiB)
    assert taken(peer, piece, at_most=4096) < 1024, "a gigabyte was taken"
    newcomer = Peer(context, server.endpoint)
    assert newcomer.lookup([1]).states == other.lookup([1]).states == READABLE
    assert newcomer.stats().counters["sockets_replaced"] == 1


def taken(peer: socket.socket, piece: bytes, *, at_most: int) -> int:
    """How many pieces could be sent before the connection ended."""
    for number in range(at_most):
        try:
            peer.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            return number
    return at_most
