"""A process that follows a server's events and does nothing with them.

    python -m benchmarks.remote_kv_cache.baseline.server.event_follower tcp://127.0.0.1:5759

It prints `ready`, and runs until it is ended.
"""

import sys

import msgpack
import zmq

from examples.processes import LoggedProcess


class EventFollower(LoggedProcess):
    """A subscriber of the server whose events are at `endpoint`."""

    name = "event-follower"

    def __init__(self, endpoint: str) -> None:
        super().__init__([sys.executable, "-m", __spec__.name, endpoint])

    def is_ready(self) -> bool:
        return "ready" in self.printed()


def main(endpoint: str) -> None:
    """Decode every batch, as a router would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    print("ready", flush=True)
    while True:
        msgpack.unpackb(socket.recv_multipart()[-1])


if __name__ == "__main__":
    main(sys.argv[1])
