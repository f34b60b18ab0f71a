"""A server that goes on, and finds peers gone whose messages it has not read yet."""

import socket
import struct

import pytest
from chaos_server import eventually
from zmtp import command_of, connected

PING = b"\x04PING" + bytes(2)
MESSAGE = bytes([0, 100]) + bytes(100)

NUM_PEERS = 20
ROUNDS, ROUNDS_WHOLE = 2, 8  # in one of them or another a peer is met in the wrong moment
NUM_MESSAGES = (40, 4_000)
"""Of one peer: fewer, and far more, than libzmq reads at once (8 KiB)."""


@pytest.mark.parametrize("num_messages", NUM_MESSAGES)
def test_peers_that_leave_a_stopped_server_with_messages_unread_do_not_end_it(
    renewed_server, num_messages, whole
):
    """A ping follows what is unread: its answer has nowhere to go."""
    server = renewed_server
    for _ in range(ROUNDS_WHOLE if whole else ROUNDS):
        peers = [connected_peer(server.endpoint) for _ in range(NUM_PEERS)]
        server.freeze()
        for peer in peers:
            peer.sendall(MESSAGE * num_messages + command_of(PING))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        server.thaw()
        eventually(lambda: server.stats().server, "it answers")
        server.assert_not_ended()


def connected_peer(endpoint):
    peer = connected(endpoint)
    received = b""
    while b"READY" not in received:
        received += peer.recv(1000)
    return peer
