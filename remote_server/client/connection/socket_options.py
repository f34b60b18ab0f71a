"""Options of the client's sockets, and events of their monitors. `connection.py` gives the reasons
for the options of queues."""

import sys
from math import ceil

import zmq

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.keys import CURVE_FRAME_BYTES, ClientKeys

_REFUSALS = {
    400: "the server does not know our key",
    500: "the server is at its limit of connections",
}
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_HANDSHAKE_MS = 5_000
_CONNECT_MS = 5_000


def set_options(
    socket: "zmq.Socket[bytes]",
    config: ClientConfig,
    keys: ClientKeys | None,
    *,
    brings_blocks: bool,
) -> None:
    """Set all options of `socket` before it connects. `brings_blocks`: replies have payload
    frames."""
    most_bytes = protocol.MAX_FRAME_BYTES if brings_blocks else protocol.MAX_HEADER_BYTES
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # Not for names: libzmq would resolve only their IPv6 addresses.
        zmq.IPV6: "[" in config.endpoint,
        zmq.IMMEDIATE: 0,  # see `connection.py`
        # The windows bound the queue; a mark could only fail a send half-way.
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
    """For connections that carry headers alone.

    Only heartbeats end such a connection when the network drops its packets, or when a damaged
    length makes ZeroMQ wait for bytes that never come: a request that times out does not close it.

    The connection for gets needs none: it is replaced after a second of silence (`../zmq/get.py`).
    It must have none: it may be replaced while messages pour in, and a socket that is being
    closed takes no message, as at a mark.
    """
    timeout_ms = ceil(4 * config.heartbeat_s * 1e3)
    return {
        zmq.HEARTBEAT_IVL: ceil(config.heartbeat_s * 1e3),
        zmq.HEARTBEAT_TIMEOUT: timeout_ms,
        # The server forgets a vanished client after this time.
        zmq.HEARTBEAT_TTL: timeout_ms,
    }


def event_of(frame: bytes) -> tuple[int, int]:
    """The event, and a 32-bit number that depends on it.

    pyzmq's parser makes an enum member of that number and keeps it for ever. Pauses before
    reconnecting are random, so a disconnected client grew by one member per attempt.
    """
    return int.from_bytes(frame[:2], sys.byteorder), int.from_bytes(frame[2:6], sys.byteorder)


def refusal_of(event: int, value: int, keys_file: str, *, first: bool) -> str:
    """The mismatch of keys that a failed handshake indicates; empty for any other event. `first`:
    no refusal is known yet."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return _REFUSALS.get(value, f"the server refuses the connection with status {value}")
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM:
        return "the server has no keys" if keys_file else "the server demands keys"
    if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and keys_file and first:
        return (
            "the server ends the handshake: it is most likely not the one whose public key "
            f"{keys_file} holds"
        )
    return ""
