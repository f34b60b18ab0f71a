"""A server that goes on and finds peers gone whose messages it has not read yet."""

import socket
import struct
import time

import pytest
from chaos_server import ChaosServer

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x06DEALER" + b"\x08Identity" + bytes(4)
PING = b"\x04PING" + bytes(2)
MESSAGE = bytes([0, 100]) + bytes(100)

NUM_ROUNDS, NUM_PEERS = 30, 20
SETTLE_S = 0.1
NUM_MESSAGES = 40
"""Of one peer: more than libzmq takes before it stops reading from a connection, and fewer than
it reads at once."""


def command(body):
    return bytes([4, len(body)]) + body


@pytest.mark.whole
@pytest.mark.xfail(reason="libzmq 4.3.5 aborts: !_io_error in stream_engine_base.cpp")
def test_peers_that_leave_a_stopped_server_with_messages_unread_do_not_end_it():
    """A ping lies behind what is unread: its answer has nowhere to go."""
    with ChaosServer() as server:
        for _ in range(NUM_ROUNDS):
            peers = [connect(server.endpoint) for _ in range(NUM_PEERS)]
            with server.frozen():
                for peer in peers:
                    peer.sendall(MESSAGE * NUM_MESSAGES + command(PING))
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    peer.close()
            time.sleep(SETTLE_S)
            server.assert_not_ended()


def connect(endpoint):
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=5)
    peer.sendall(GREETING + command(READY))
    received = b""
    while b"READY" not in received:
        received += peer.recv(1000)
    return peer
