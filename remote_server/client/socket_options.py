"""Options of the client's sockets, all of which are set here.

There is no receive mark (ZMQ_RCVHWM 0). At its mark libzmq stops reading a connection. When the
peer resets a connection in that state, libzmq ends the process: its next heartbeat, or one of the
peer's that is queued, fails the assertion `!_io_error`. The process is an engine, and the state is
reached whenever its interpreter is held while blocks come.

What is queued instead of the mark's messages is bounded by what was asked for:

- Blocks come on one connection, and its window (`get_window.py`) bounds the bytes that were asked
  for and have not come, those of ended gets included.
- Every other reply is one header of at most 4 MiB, usually of less than a kilobyte, and answers
  one request. The windows of puts and of shared memory, and the number of small requests in
  flight, bound how many there are.
- A server that sends what was not asked for loses the connection when the client has seen 1,000
  such replies (`connection.py`), and one that sends a frame larger than may come there at once.

ZeroMQ knows no bound in bytes. A false server can fill memory as fast as the network carries bytes
while the interpreter is held, or with one message of endless frames; so it could with any mark.
"""

from math import ceil

import zmq

from remote_server import protocol
from remote_server.client.results import ClientConfig
from remote_server.keys import CURVE_FRAME_BYTES, ClientKeys

_HANDSHAKE_MS = 5_000
_CONNECT_MS = 5_000


def set_options(
    socket: "zmq.Socket[bytes]",
    config: ClientConfig,
    keys: ClientKeys | None,
    *,
    brings_blocks: bool,
) -> None:
    """Before `socket` is connected. `brings_blocks` when replies have payload frames."""
    most_bytes = protocol.MAX_FRAME_BYTES if brings_blocks else protocol.MAX_HEADER_BYTES
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # Not for names: libzmq would look for their IPv6 addresses alone.
        zmq.IPV6: "[" in config.endpoint,
        zmq.IMMEDIATE: 1,
        # The windows bound what is queued; a mark on top could only fail a send half-way.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: most_bytes if keys is None else most_bytes + CURVE_FRAME_BYTES,
        zmq.RECONNECT_IVL: ceil(config.reconnect_s * 1e3),
        zmq.RECONNECT_IVL_MAX: ceil(config.longest_reconnect_s * 1e3),
        zmq.CONNECT_TIMEOUT: _CONNECT_MS,
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
    }
    if not brings_blocks:
        options |= _heartbeats(config)
    for option, value in options.items():
        socket.setsockopt(option, value)
    if keys is not None:
        socket.curve_serverkey = keys.server
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret


def _heartbeats(config: ClientConfig) -> dict[int, int]:
    """For connections on which headers alone come.

    Nothing else ends such a connection when the network swallows it, or when a damaged length
    makes ZeroMQ wait for bytes that never come: a request that is given up changes nothing there.

    The connection for gets needs none: when nothing has come for a second, it is replaced
    (`get_lane.py`). And it must have none: it is the one that is replaced while messages pour in,
    and a socket that is being closed takes no message, as at a mark.
    """
    timeout_ms = ceil(4 * config.heartbeat_s * 1e3)
    return {
        zmq.HEARTBEAT_IVL: ceil(config.heartbeat_s * 1e3),
        zmq.HEARTBEAT_TIMEOUT: timeout_ms,
        # The server forgets a client that vanished after this time.
        zmq.HEARTBEAT_TTL: timeout_ms,
    }
