"""One DEALER socket and what we know of its state. Used by the I/O thread only.

No other file of the client sends, receives or sets an option.
"""

import itertools
import sys
from collections.abc import Container, Sequence
from math import ceil, inf

import zmq

from remote_server import protocol
from remote_server.client.results import ClientConfig
from remote_server.errors import ConfigError, RemoteProtocolError
from remote_server.keys import CURVE_FRAME_BYTES, ClientKeys

_HANDSHAKE_MS = 5_000
_CONNECT_MS = 5_000
_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
)
_REFUSALS = {
    400: "the server does not know our key",
    500: "the server has as many connections as it may",
}
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_monitor_numbers = itertools.count(1)

# libzmq drops the rest of a frame that is larger than the buffer, so nothing is copied here.
_NOWHERE = bytearray()


class Connection:
    """A DEALER that reconnects by itself and can be replaced by a fresh one at any time.

    Frames handed to `send` wait inside libzmq only while a peer is there (ZMQ_IMMEDIATE), and
    closing throws them away (linger 0): after `close` or `reopen` libzmq lets go of every row
    within moments, which the sender of the frames can tell (`put_transfer.py`).
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        config: ClientConfig,
        keys: ClientKeys | None = None,
        *,
        receive_high_water_mark: int,
    ) -> None:
        self._context = context
        self._poller = poller
        self._config = config
        self._keys = keys
        self._receive_high_water_mark = receive_high_water_mark
        self.connected = False
        """The handshake is done and the peer has not left since."""
        self.reopening = False
        """Replaced by us while connected, and not back yet: it should be in a moment."""
        self.nobody_there = False
        """An attempt to connect has failed."""
        self.turned_away = ""
        """Why the last attempt to connect was refused, when libzmq could tell; else empty."""
        self.stuck_at = inf
        """When to `reopen` unless connected by then. libzmq reconnects by itself after most
        failures, but never again to a peer that broke ZMTP: a frame too large, another protocol.
        """
        self.readable = self._changed = False
        """Whether the last poll said that there is something to receive."""
        self._magic = bytearray(len(protocol.MAGIC))
        self._open()

    def _open(self) -> None:
        self.readable = self._changed = False
        config = self._config
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            # Not for names: it would look for their IPv6 addresses alone.
            zmq.IPV6: "[" in config.endpoint,
            zmq.IMMEDIATE: 1,
            # The windows bound what is queued; a mark on top could only fail a send half-way.
            zmq.SNDHWM: 0,
            zmq.RCVHWM: self._receive_high_water_mark,
            zmq.MAXMSGSIZE: protocol.MAX_FRAME_BYTES,
            zmq.RECONNECT_IVL: ceil(config.reconnect_s * 1e3),
            zmq.RECONNECT_IVL_MAX: ceil(config.longest_reconnect_s * 1e3),
            zmq.CONNECT_TIMEOUT: _CONNECT_MS,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: ceil(config.heartbeat_s * 1e3),
            zmq.HEARTBEAT_TIMEOUT: ceil(4 * config.heartbeat_s * 1e3),
            # Tells the server when to forget a client that vanished.
            zmq.HEARTBEAT_TTL: ceil(4 * config.heartbeat_s * 1e3),
        }.items():
            self._socket.setsockopt(option, value)
        if self._keys is not None:
            self._socket.curve_serverkey = self._keys.server
            self._socket.curve_publickey = self._keys.public
            self._socket.curve_secretkey = self._keys.secret
            self._socket.maxmsgsize = protocol.MAX_FRAME_BYTES + CURVE_FRAME_BYTES
        # Not pyzmq's default name, which is made of a file descriptor that is soon another's.
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            _EVENTS, f"inproc://kvferry-monitor-{next(_monitor_numbers)}"
        )
        try:
            self._socket.connect(config.endpoint)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            raise ConfigError(f"endpoint: {config.endpoint!r}: {error}") from error
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        """Leave, and drop what was not sent yet. Safe to repeat."""
        self.connected = self.reopening = False
        self.stuck_at = inf
        if self._socket.closed:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def reopen(self) -> None:
        """Replace the socket: what was queued or on its way, in either direction, is gone."""
        was_up = self.connected or self.reopening
        self.close()
        self._open()
        self.reopening = was_up

    def look(self, events: Container[object]) -> None:
        """Take note of what a poll said. Asking a socket that has nothing costs microseconds."""
        self.readable = self._socket in events
        self._changed = self._monitor in events

    def changes(self, now: float) -> list[bool]:
        """What happened since the last call, oldest first: True connected, False lost."""
        changes: list[bool] = []
        if not self._changed:
            return changes
        while True:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return changes
            event, value = _event_of(message[0])
            if event == zmq.Event.CONNECT_RETRIED:
                self.nobody_there = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected, self.reopening, self.stuck_at = True, False, inf
                self.turned_away = ""
                changes.append(True)
            else:
                self.turned_away = self._why_not(event, value) or self.turned_away
                self.stuck_at = now + self._config.longest_reconnect_s
                if self.connected:
                    self.connected = False
                    changes.append(False)

    def _why_not(self, event: int, value: int) -> str:
        """What a failed handshake says about the two sides' keys; empty for anything else."""
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return _REFUSALS.get(value, f"the server refuses the connection with status {value}")
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM:
            return "the server has no keys" if self._keys else "the server demands keys"
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self._keys and not self.turned_away:
            return (
                "the server ends the handshake: it is most likely not the one whose public key "
                f"{self._config.keys} holds"
            )
        return ""

    def send(self, header: Sequence[bytes], payload: Sequence[zmq.Frame] = ()) -> bool:
        """Queue one message, all of it or nothing. False: not now, nothing was taken.

        libzmq may refuse the first frame only; it never refuses the rest of a message it began.
        """
        frames: list[bytes | zmq.Frame] = [*header, *payload]
        last = frames.pop()
        try:
            for frame in frames:
                self._socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
            self._socket.send(last, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> protocol.Reply | None:
        """The header of the next message, or None when there is none.

        Its payload frames are still to be taken, one by one, and the rest given up with
        `discard_rest`, before the next call. Raises `RemoteProtocolError` for a message that
        cannot be read; all of it has been discarded then.
        """
        # Asked rather than tried: an exception costs twenty times as much.
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        length = self._socket.recv_into(self._magic, flags=zmq.NOBLOCK)
        try:
            if length != len(protocol.MAGIC) or self._magic != protocol.MAGIC or not self.more:
                raise RemoteProtocolError("a message that does not start like one of ours")
            return protocol.decode_reply(self._socket.recv(zmq.NOBLOCK))
        except RemoteProtocolError:
            self.discard_rest()
            raise

    @property
    def more(self) -> bool:
        """Whether the message being received has another frame."""
        return bool(self._socket.getsockopt(zmq.RCVMORE))

    def frame_into(self, row: memoryview) -> int:
        """Receive the next frame into `row` and return how long it was.

        A longer frame is cut off at the end of `row`; nothing is ever written beyond it.
        """
        return self._socket.recv_into(row, flags=zmq.NOBLOCK)

    def frame(self) -> memoryview:
        """The next frame, in memory of its own."""
        return self._socket.recv(zmq.NOBLOCK, copy=False).buffer

    def discard_frame(self) -> int:
        """Throw the next frame away and return how long it was."""
        return self._socket.recv_into(_NOWHERE, flags=zmq.NOBLOCK)

    def discard_rest(self) -> int:
        """Throw away what is left of the message being received; returns how many frames."""
        num_frames = 0
        while self.more:
            self.discard_frame()
            num_frames += 1
        return num_frames


def _event_of(frame: bytes) -> tuple[int, int]:
    """What happened, and a number of 32 bits that depends on it.

    pyzmq's own parser makes an enum member of that number and keeps it for ever: pauses before
    reconnecting are random, and a client far from its server grew by one for each of them.
    """
    return int.from_bytes(frame[:2], sys.byteorder), int.from_bytes(frame[2:6], sys.byteorder)
