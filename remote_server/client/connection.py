"""Connection to the server: one DEALER socket and its state. Used by the I/O thread only.

No other module of the client sends, receives or sets a socket option.

There is no receive mark (ZMQ_RCVHWM 0). At its mark libzmq stops reading a connection. When the
peer resets a connection in that state, libzmq ends the process: its next heartbeat, or a queued one
of the peer's, fails the assertion `!_io_error`. The process is an engine, and the state is reached
whenever its interpreter is held while blocks come.

The requests bound the queue instead of a mark:

- Blocks come on one connection. Its window (`tcp_channels.py`) bounds the bytes requested and not
  received, those of ended gets included.
- Every other reply is one header of at most 4 MiB, usually less than a kilobyte, and answers one
  request. The windows of puts and of shared memory, and the limit of small requests in flight,
  bound their number.
- A server that sends unrequested replies loses the connection after 1,000 of them, and one that
  sends too large a frame loses it at once.

A lost connection is closed and opened anew; libzmq never reconnects it. With ZMQ_IMMEDIATE libzmq
would drop its queue by itself in any receive, also between two frames of a message. The next
receive then fails the assertion `!_more`, which ends the process. Without that option libzmq would
keep what is to be sent, and the rows of puts with it, until the server is back.

ZeroMQ has no bound in bytes. A hostile server can fill memory as fast as the network carries bytes
while the interpreter is held, or with one message of endless frames; a mark would not change that.
"""

import errno
import itertools
import logging
import sys
from collections.abc import Callable, Container, Sequence
from math import ceil, inf

import zmq

from remote_server import protocol
from remote_server.client.poll_set import PollSet
from remote_server.client.results import ClientConfig
from remote_server.errors import ConfigError, RemoteProtocolError
from remote_server.keys import CURVE_FRAME_BYTES, ClientKeys

logger = logging.getLogger(__name__)

# Replies beyond the number owed, until the server counts as hostile. Zero would cost the connection
# when one message comes twice.
_MOST_UNASKED = 1_000

# Frames of one message that are discarded before the connection ends. An honest message has at most
# one frame per key, and none on a connection without blocks; here a few too many are tolerated.
_MOST_DISCARDED = 16
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
    500: "the server is at its limit of connections",
}
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
_HANDSHAKE_MS = 5_000
_CONNECT_MS = 5_000
_monitor_numbers = itertools.count(1)

# libzmq drops the part of a frame that exceeds the buffer, so discarding copies nothing.
_NOWHERE = bytearray()


class Connection:
    """A DEALER that connects by itself and can be replaced by a fresh one at any time.

    Frames passed to `send` queue inside libzmq only while a peer is connected, and closing discards
    them (linger 0): libzmq releases every row shortly after a loss, `close` or `reopen`. The sender
    can detect the release (`put.py`).

    Only the requests that were sent bound the queue of replies. A server that
    sends more replies than it owes loses the connection and the replies queued in it.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poll_set: PollSet,
        config: ClientConfig,
        clock: Callable[[], float],
        keys: ClientKeys | None = None,
        *,
        brings_blocks: bool = False,
    ) -> None:
        """`brings_blocks`: replies have payload frames.

        Raises `ConfigError` for an endpoint or keys that ZeroMQ refuses, and `zmq.ZMQError` when
        the process cannot open another file.
        """
        self._context = context
        self._poll_set = poll_set
        self._config = config
        self._clock = clock
        self._keys = keys
        self._brings_blocks = brings_blocks
        self.connected = False
        """The handshake is done and the peer has not disconnected since."""
        self.reopening = False
        """Replaced by us while connected, and not reconnected yet, which takes a moment."""
        self.connect_failed = False
        """An attempt to connect has failed."""
        self.turned_away = ""
        """Why the last attempt to connect was refused, as far as libzmq reports it; else empty."""
        self.stuck_at = inf
        """Time to `reopen` unless connected by then. libzmq repeats most failed attempts to connect
        by itself, but not to a peer that broke ZMTP: a frame too large, another protocol."""
        self.readable = self._changed = False
        """The last poll reported something to receive."""
        self._cut_off = False
        """We ended it, and `changes` has not reported that yet."""
        self._num_owed = 0
        """Replies owed: those to requests sent that have not come."""
        self._magic = bytearray(len(protocol.MAGIC))
        self._open()

    def _open(self) -> None:
        """Raises as the constructor does; the connection is closed then."""
        self._is_open = self.readable = self._changed = False
        self._num_owed = 0
        socket = self._context.socket(zmq.DEALER)
        try:
            _set_options(socket, self._config, self._keys, brings_blocks=self._brings_blocks)
            # pyzmq's default name contains a file descriptor, which may soon be another socket's.
            monitor = socket.get_monitor_socket(
                _EVENTS, f"inproc://kvferry-monitor-{next(_monitor_numbers)}"
            )
            try:
                socket.connect(self._config.endpoint)
            except zmq.ZMQError as error:
                _close(socket, monitor)
                if error.errno in _NO_MORE_FILES:
                    raise
                raise ConfigError(f"endpoint: {self._config.endpoint!r}: {error}") from error
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._socket, self._monitor = socket, monitor
        self._poll_set.register(socket)
        self._poll_set.register(monitor)
        self._is_open = True

    def close(self) -> None:
        """Close the socket and drop what was not sent. Idempotent."""
        self.connected = self.reopening = self.readable = self._changed = False
        self.stuck_at = inf
        if not self._is_open:
            return
        self._is_open = False
        self._poll_set.unregister(self._socket)
        self._poll_set.unregister(self._monitor)
        _close(self._socket, self._monitor)

    def reopen(self) -> None:
        """Replace the socket. Messages queued or on their way, in either direction, are lost.

        A process that cannot open another file has lost the connection, and tries again at
        `stuck_at`.
        """
        was_up = self.connected or self.reopening
        self.close()
        try:
            self._open()
        except (zmq.ZMQError, ConfigError) as error:
            self.stuck_at = self._clock() + self._config.longest_reconnect_s
            self._cut_off = was_up
            level = logging.WARNING if was_up else logging.DEBUG  # once, not every second
            logger.log(level, "%s: cannot open a connection: %s", self._config.endpoint, error)
        else:
            self.reopening = was_up

    def note_poll(self, events: Container[object]) -> None:
        """Record the result of a poll: a call to an idle socket costs microseconds."""
        self.readable = self._socket in events
        self._changed = self._monitor in events

    def changes(self, now: float) -> list[bool]:
        """Changes since the last call, oldest first: True connected, False lost."""
        changes: list[bool] = []
        if self._cut_off:
            self._cut_off = False
            changes.append(False)
        if not self._changed:
            return changes
        while True:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return changes
            event, value = _event_of(message[0])
            if event == zmq.Event.CONNECT_RETRIED:
                self.connect_failed = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected, self.reopening, self.stuck_at = True, False, inf
                self.turned_away = ""
                changes.append(True)
            else:
                self.turned_away = self._why_not(event, value) or self.turned_away
                if self.connected:
                    self.close()
                    self.stuck_at = now + self._config.reconnect_s
                    return [*changes, False]
                self.stuck_at = now + self._config.longest_reconnect_s

    def _why_not(self, event: int, value: int) -> str:
        """The mismatch of keys that a failed handshake indicates; empty for any other event."""
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

    def send(
        self, header: Sequence[bytes], payload: Sequence[zmq.Frame] = (), *, num_replies: int = 1
    ) -> bool:
        """Queue one message, whole or not at all. False: nothing was queued; try again later.

        `num_replies` is the largest number of replies to it. libzmq may refuse the first frame
        only; it never refuses the rest of a message it began.
        """
        if not self.connected:
            return False
        frames: list[bytes | zmq.Frame] = [*header, *payload]
        last = frames.pop()
        try:
            for frame in frames:
                self._socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
            self._socket.send(last, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self._num_owed += num_replies
        return True

    def receive(self) -> protocol.Reply | None:
        """The header of the next message, or None when there is none.

        Before the next call the caller takes the payload frames one by one and drops the rest with
        `discard_rest`. Raises `RemoteProtocolError` for a message that cannot be read, and discards
        all of it. Also raises it once more than `_MOST_UNASKED` replies answer no request: the
        connection is then opened anew, and `changes` reports the old one as lost.
        """
        # Queried first: an exception costs twenty times as much.
        if not self._is_open or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        self._num_owed -= 1
        if self._num_owed < -_MOST_UNASKED:
            self._hang_up()
            raise RemoteProtocolError("more replies than requests")
        length = self._socket.recv_into(self._magic, flags=zmq.NOBLOCK)
        try:
            if length != len(protocol.MAGIC) or self._magic != protocol.MAGIC or not self.more:
                raise RemoteProtocolError("a message without the magic frame and a header")
            return protocol.decode_reply(self._socket.recv(zmq.NOBLOCK))
        except RemoteProtocolError:
            self.discard_rest()
            raise

    @property
    def more(self) -> bool:
        """The message being received has another frame."""
        return self._is_open and bool(self._socket.getsockopt(zmq.RCVMORE))

    def frame_into(self, row: memoryview) -> int:
        """Receive the next frame into `row` and return its length.

        A longer frame is cut off at the end of `row`; nothing is written beyond it.
        """
        return self._socket.recv_into(row, flags=zmq.NOBLOCK)

    def frame(self) -> memoryview:
        """The next frame, in memory of its own."""
        return self._socket.recv(zmq.NOBLOCK, copy=False).buffer

    def discard_frame(self) -> int:
        """Discard the next frame and return its length."""
        return self._socket.recv_into(_NOWHERE, flags=zmq.NOBLOCK)

    def discard_rest(self) -> int:
        """Discard the rest of the message being received; returns the number of frames.

        A message of more frames than an honest one has costs the connection and all that is queued
        in it: `changes` reports it as lost.
        """
        num_frames = 0
        most = protocol.MAX_KEYS_PER_MESSAGE if self._brings_blocks else _MOST_DISCARDED
        while self.more:
            if num_frames == most:
                self._hang_up()
                break
            self.discard_frame()
            num_frames += 1
        return num_frames

    def _hang_up(self) -> None:
        """Drop the connection to a hostile server, and connect anew."""
        self._cut_off = self.connected
        self.reopen()
        self.reopening = False


def _set_options(
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
        zmq.IMMEDIATE: 0,  # see above
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

    The connection for gets needs none: it is replaced after a second of silence (`get.py`).
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


def _close(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


def _event_of(frame: bytes) -> tuple[int, int]:
    """The event, and a 32-bit number that depends on it.

    pyzmq's parser makes an enum member of that number and keeps it for ever. Pauses before
    reconnecting are random, so a disconnected client grew by one member per attempt.
    """
    return int.from_bytes(frame[:2], sys.byteorder), int.from_bytes(frame[2:6], sys.byteorder)
