"""What a server takes of what is sent to it: frames, bytes that wait, and what libzmq holds."""

import socket

import pytest
import zmq
from gates import copies_held
from wire_peer import BLOCK_BYTES, HandPeer, Peer, key

from remote_server import protocol
from remote_server.protocol import Error, Lookup
from remote_server.server import copier, intake
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

EMPTY_AND_MORE, EMPTY_AND_LAST = b"\x01\x00", b"\x00\x00"

READABLE = bytes([2])


@pytest.fixture
def server():
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)
    with Server(config) as server:
        yield server
        server.store.tier_stack.check()


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


def test_a_message_whose_rest_takes_too_long_costs_the_connections_and_no_block(
    server: Server, context: zmq.Context
):
    """Others connect again by themselves, to the same address."""
    other = Peer(context, server.endpoint)
    other.hello()
    other.put([1])
    peer = HandPeer(server.endpoint).socket
    frames = intake.MAX_FRAMES + 2 * intake.DISCARDED_FRAMES
    peer.sendall(EMPTY_AND_MORE * frames + EMPTY_AND_LAST)
    while peer.recv(1000):
        pass
    newcomer = Peer(context, server.endpoint)
    assert newcomer.lookup([1]).states == other.lookup([1]).states == READABLE
    assert newcomer.stats().counters["sockets_replaced"] == 1
    peer.close()


def test_a_message_without_an_end_costs_the_connections_when_it_has_grown_too_large(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    """Nothing of it has come to the server: libzmq hands over whole messages."""
    monkeypatch.setattr(intake, "SPARE_BYTES", 64 * MiB)
    monkeypatch.setattr(intake, "BYTES_PER_CONNECTION", 0)
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


# ── bytes that wait to be copied ─────────────────────────────────────────────────────────────


def test_puts_beyond_what_a_connection_may_have_waiting_are_refused_and_others_are_taken(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    four = copier.waiting_bytes(4, 4 * BLOCK_BYTES)
    monkeypatch.setattr(copier, "MAX_UNCOPIED_BYTES", four)
    greedy, other = Peer(context, server.endpoint), Peer(context, server.endpoint)
    greedy.hello()
    with copies_held(server):
        message, blocks = greedy.put_message(range(4))
        greedy.send(message, *blocks)
        refused, blocks = greedy.put_message([4])
        assert greedy.ask(refused, *blocks).code == "too_much_in_flight"
        other.send(*other_put(other))
        other.stats_once(lambda stats: stats.tiers["memory"].pending == 5)
        assert greedy.lookup([4]).states == bytes([0])
    assert greedy.receive()[0].created == 4
    assert other.receive()[0].created == 1
    assert greedy.put([4]).created == 1


def other_put(peer: Peer):
    message, blocks = peer.put_message([9])
    return message, *blocks


def test_puts_of_all_connections_beyond_what_may_wait_are_refused(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    two = copier.waiting_bytes(2, 2 * BLOCK_BYTES)
    monkeypatch.setattr(server.tenants[""].handlers.uncopied, "_most", two)
    peers = [Peer(context, server.endpoint) for _ in range(3)]
    peers[0].hello()
    with copies_held(server):
        for number, peer in enumerate(peers[:2]):
            message, blocks = peer.put_message([number])
            peer.send(message, *blocks)
        peers[0].stats_once(lambda stats: stats.tiers["memory"].pending == 2)
        message, blocks = peers[2].put_message([2])
        assert peers[2].ask(message, *blocks).code == "too_much_in_flight"
