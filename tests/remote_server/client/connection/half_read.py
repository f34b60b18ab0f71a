"""A client that is in the middle of a message when its server leaves: reads the rest of it.

    python half_read.py    prints the number of frames that came after the server had left

libzmq handles what its other thread reports in every hundredth receive, also between two frames of
a message. A socket that gives up its queue there ends the process.
"""

import time

import zmq

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.connection import Connection

FRAMES = 400
"""Of the message: the hundredth receive is inside it."""

PATIENCE_S = 60.0


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    poller = zmq.Poller()
    config = ClientConfig(f"tcp://127.0.0.1:{port}")
    connection = Connection(context, poller, config, time.monotonic, brings_blocks=True)
    _until(connection, poller, True)
    assert connection.send([protocol.MAGIC, b"hello"])
    name, *_ = server.recv_multipart()
    reply = protocol.encode(protocol.Touched(request_id=1, epoch="", touched=1))
    server.send_multipart([name, *reply, *[b"payload"] * FRAMES])
    while connection.receive() is None:
        poller.poll(100)
    server.close(0)
    _until_gone(connection)
    num_frames = 0
    while connection.more:
        connection.discard_frame()
        num_frames += 1
    print(num_frames)
    connection.close()
    context.destroy(0)


def _until(connection: Connection, poller: zmq.Poller, state: bool) -> None:
    """Take turns until the connection reports `state`."""
    deadline = time.monotonic() + PATIENCE_S
    while state not in _changes(connection, poller):
        assert time.monotonic() < deadline


def _until_gone(connection: Connection) -> None:
    """Wait for the report that the server has left, and do not read it: the message comes first."""
    deadline = time.monotonic() + PATIENCE_S
    while not connection._monitor.poll(100):
        assert time.monotonic() < deadline
    time.sleep(0.05)  # the session that ends reports to the socket a moment later


def _changes(connection: Connection, poller: zmq.Poller) -> list[bool]:
    connection.note_poll(dict(poller.poll(100)))
    return connection.changes(time.monotonic())


if __name__ == "__main__":
    main()
