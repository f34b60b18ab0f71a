"""One DEALER socket and what we know of its state. Used by the I/O thread only.

No other file of the client sends, receives or sets an option.
"""

import errno
import itertools
import logging
import sys
from collections.abc import Callable, Container, Sequence
from math import inf

import zmq

from remote_server import protocol
from remote_server.client.results import ClientConfig
from remote_server.client.socket_options import set_options
from remote_server.errors import ConfigError, RemoteProtocolError
from remote_server.keys import ClientKeys

logger = logging.getLogger(__name__)

# Replies beyond those that were asked for, until a server is taken to be a false one. Zero would
# cost the connection where one message came twice.
_MOST_UNASKED = 1_000

# Frames of one message that are received only to be thrown away. An honest message has no more
# blocks than keys, and none where no blocks come; here one that has a few too many is forgiven.
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
    500: "the server has as many connections as it may",
}
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
_monitor_numbers = itertools.count(1)

# libzmq drops the rest of a frame that is larger than the buffer, so nothing is copied here.
_NOWHERE = bytearray()


class Connection:
    """A DEALER that reconnects by itself and can be replaced by a fresh one at any time.

    Frames handed to `send` wait inside libzmq only while a peer is there (ZMQ_IMMEDIATE), and
    closing throws them away (linger 0): after `close` or `reopen` libzmq lets go of every row
    within moments, which the sender of the frames can tell (`put_transfer.py`).

    Nothing but what was asked for bounds the replies that are queued (`socket_options.py`). A
    server that sends more replies than it owes loses the connection, and what is queued with it.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        config: ClientConfig,
        clock: Callable[[], float],
        keys: ClientKeys | None = None,
        *,
        brings_blocks: bool = False,
    ) -> None:
        """`brings_blocks` when replies have payload frames.

        Raises `ConfigError` for an endpoint or keys that ZeroMQ refuses, and `zmq.ZMQError` when
        the process may not open another file.
        """
        self._context = context
        self._poller = poller
        self._config = config
        self._clock = clock
        self._keys = keys
        self._brings_blocks = brings_blocks
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
        self._cut_off = False
        """We ended it, and `changes` has not said so yet."""
        self._num_owed = 0
        """Replies to what was sent that have not come."""
        self._magic = bytearray(len(protocol.MAGIC))
        self._open()

    def _open(self) -> None:
        """Raises as the constructor does, and is closed then."""
        self._is_open = self.readable = self._changed = False
        self._num_owed = 0
        socket = self._context.socket(zmq.DEALER)
        try:
            set_options(socket, self._config, self._keys, brings_blocks=self._brings_blocks)
            # Not pyzmq's default name, which is made of a file descriptor that is soon another's.
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
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._is_open = True

    def close(self) -> None:
        """Leave, and drop what was not sent yet. Safe to repeat."""
        self.connected = self.reopening = self.readable = self._changed = False
        self.stuck_at = inf
        if not self._is_open:
            return
        self._is_open = False
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        _close(self._socket, self._monitor)

    def reopen(self) -> None:
        """Replace the socket: what was queued or on its way, in either direction, is gone.

        A process that may not open another file has lost the connection, and tries again at
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
            logger.log(level, "%s: no connection can be made: %s", self._config.endpoint, error)
        else:
            self.reopening = was_up

    def look(self, events: Container[object]) -> None:
        """Take note of what a poll said. Asking a socket that has nothing costs microseconds."""
        self.readable = self._socket in events
        self._changed = self._monitor in events

    def changes(self, now: float) -> list[bool]:
        """What happened since the last call, oldest first: True connected, False lost."""
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

    def send(
        self, header: Sequence[bytes], payload: Sequence[zmq.Frame] = (), *, num_replies: int = 1
    ) -> bool:
        """Queue one message, all of it or nothing. False: not now, nothing was taken.

        `num_replies` is how many may come for it at most. libzmq may refuse the first frame only;
        it never refuses the rest of a message it began.
        """
        if not self._is_open:
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
        `discard_rest`. Raises `RemoteProtocolError` for a message that cannot be read: all of it
        is discarded. Raises it as well for a message beyond `_MOST_UNASKED` that answer no
        request: the connection is opened anew, and `changes` reports the old one as lost.
        """
        # Asked rather than tried: an exception costs twenty times as much.
        if not self._is_open or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        self._num_owed -= 1
        if self._num_owed < -_MOST_UNASKED:
            self._hang_up()
            raise RemoteProtocolError("more replies than were asked for")
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
        return self._is_open and bool(self._socket.getsockopt(zmq.RCVMORE))

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
        """Throw away what is left of the message being received; returns how many frames.

        A message of more frames than an honest one has costs the connection, and what is queued
        in it goes unread: `changes` reports it as lost.
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
        """Leave a server that is a false one, and connect anew."""
        self._cut_off = self.connected
        self.reopen()
        self.reopening = False


def _close(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


def _event_of(frame: bytes) -> tuple[int, int]:
    """What happened, and a number of 32 bits that depends on it.

    pyzmq's own parser makes an enum member of that number and keeps it for ever: pauses before
    reconnecting are random, and a client far from its server grew by one for each of them.
    """
    return int.from_bytes(frame[:2], sys.byteorder), int.from_bytes(frame[2:6], sys.byteorder)
