"""Connection to the server: one DEALER socket and its state. Used by the I/O thread only.

No other module of the client sends, receives or sets a socket option.

There is no receive mark (ZMQ_RCVHWM 0). At its mark libzmq stops reading a connection. When the
peer resets a connection in that state, libzmq ends the process: its next heartbeat, or a queued one
of the peer's, fails the assertion `!_io_error`. The process is an engine, and the state is reached
whenever its interpreter is held while blocks come.

The requests bound the queue instead of a mark:

- Blocks come on one connection. Its window (`zmq/channels.py`) bounds the bytes requested and not
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
from collections.abc import Callable, Container, Sequence
from math import inf

import zmq

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.poll_set import PollSet
from remote_server.client.connection.socket_options import event_of, refusal_of, set_options
from remote_server.errors import ConfigError, RemoteProtocolError
from remote_server.keys import ClientKeys

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
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)

# As numbers: an operation on members of an enumeration takes a microsecond.
_CAN_RECEIVE = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# Time for a connection to a server that is there, three to five round trips. It doubles with each
# attempt: libzmq repeats one that lost a part of its handshake only after five seconds.
_OPEN_S, _LONGEST_OPEN_S = 1.0, 5.0
_monitor_numbers = itertools.count(1)

# libzmq drops the part of a frame that exceeds the buffer, so discarding copies nothing.
_NOWHERE = bytearray()


class Connection:
    """A DEALER that connects by itself and can be replaced by a fresh one at any time.

    Frames passed to `send` queue inside libzmq only while a peer is connected, and closing discards
    them (linger 0): libzmq releases every row shortly after a loss, `close` or `reopen`. The sender
    can detect the release (`../transfer/put.py`).

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
        on_demand: bool = False,
    ) -> None:
        """`brings_blocks`: replies have payload frames. `on_demand`: it rests without a socket
        until `demand`, and again after `idle_close_s` without use.

        Raises `ConfigError` for an endpoint or keys that ZeroMQ refuses, and `zmq.ZMQError` when
        the process cannot open another file.
        """
        self._context = context
        self._poll_set = poll_set
        self._config = config
        self._clock = clock
        self._keys = keys
        self._brings_blocks = brings_blocks
        self.names_peer = False
        """`peer_host` is known after each reply, for a microsecond more."""
        self.peer_host = ""
        """The numeric address of the sender of the last reply."""
        self.connected = False
        """The handshake is done and the peer has not disconnected since."""
        self.opening = False
        """Opened by us to a server that is there, and not connected yet, which takes a moment."""
        self.on_demand = on_demand
        self._rests = False
        """Without a socket until `demand`."""
        self._open_s = _OPEN_S
        self._opens_at = -inf
        """Time before which `demand` does not open it, because it has just failed."""
        self.connect_failed = False
        """An attempt to connect has failed."""
        self.turned_away = ""
        """Why the last attempt to connect was refused, as far as libzmq reports it; else empty."""
        self.due_at = inf
        """Time to `reopen` unless connected by then. libzmq repeats most failed attempts to connect
        by itself, but not to a peer that broke ZMTP: a frame too large, another protocol.
        On demand: time to give up connecting, or to rest."""
        self.readable = self._changed = False
        """The last poll reported something to receive."""
        self._cut_off = False
        """We ended it, and `changes` has not reported that yet."""
        self._num_owed = 0
        """Replies owed: those to requests sent that have not come."""
        self._magic = bytearray(len(protocol.MAGIC))
        self._is_open = False
        if on_demand:
            self._rests = True
        else:
            self._open()

    def _open(self) -> None:
        """Raises as the constructor does; the connection is closed then."""
        self._is_open = self.readable = self._changed = False
        self._num_owed = 0
        socket = self._context.socket(zmq.DEALER)
        try:
            set_options(socket, self._config, self._keys, brings_blocks=self._brings_blocks)
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
        self.connected = self.opening = self.readable = self._changed = self._rests = False
        self.due_at = inf
        if not self._is_open:
            return
        self._is_open = False
        self._poll_set.unregister(self._socket)
        self._poll_set.unregister(self._monitor)
        _close(self._socket, self._monitor)

    def reopen(self) -> None:
        """Replace the socket. Messages queued or on their way, in either direction, are lost.

        A process that cannot open another file has lost the connection, and tries again at
        `due_at`.
        """
        was_up = self.connected or self.opening
        if self.on_demand:
            self._close_until(self._clock())
            return
        self.close()
        self.opening = self._open_or_log(was_up=was_up) and was_up
        if self.opening:
            self.due_at = self._give_up_at()
        self._cut_off = self._cut_off or was_up != self.opening

    def _open_or_log(self, *, was_up: bool) -> bool:
        try:
            self._open()
        except (zmq.ZMQError, ConfigError) as error:
            level = logging.WARNING if was_up else logging.DEBUG  # once, not every second
            logger.log(level, "%s: cannot open a connection: %s", self._config.endpoint, error)
            self._close_until(self._clock() + self._config.longest_reconnect_s)
            return False
        return True

    def _close_until(self, time: float) -> None:
        """Close it; from `time` on it may be opened again."""
        self.close()
        if self.on_demand:
            self._rests, self._opens_at = True, time
        else:
            self.due_at = time

    # ── on demand ────────────────────────────────────────────────────────────────────────

    @property
    def available(self) -> bool:
        """Connected, or on demand: `demand` may succeed. Any thread may read it."""
        if self.connected or not self.on_demand:
            return self.connected
        return self.opening or (self._rests and self._clock() >= self._opens_at)

    def demand(self) -> bool:
        """What comes now can be sent, or a moment later. Opens a connection that rests."""
        if self.connected or self.opening or not self.available:
            return self.connected or self.opening
        if not self._open_or_log(was_up=True):
            return False
        self.opening, self._rests = True, False
        self.due_at = self._give_up_at()
        return True

    def _give_up_at(self) -> float:
        """For an attempt that begins now."""
        open_s, self._open_s = self._open_s, min(2 * self._open_s, _LONGEST_OPEN_S)
        return self._clock() + open_s

    def keep(self, now: float, *, in_use: bool) -> None:
        """On demand: open it when it is `in_use`, close it when it has not been for long."""
        idle_close_s = self._config.idle_close_s
        if not self.on_demand or idle_close_s is None:
            return
        if in_use:
            if self.connected:
                self.due_at = inf
            elif not self.demand():
                self._cut_off, self.due_at = True, now  # `changes` reports it
        elif self.due_at == inf and self.connected:
            self.due_at = now + idle_close_s
        elif self.due_at <= now:
            self._close_until(now)

    # ── changes ──────────────────────────────────────────────────────────────────────────

    def note_poll(self, events: Container[object]) -> None:
        """Record the result of a poll: a call to an idle socket costs microseconds."""
        if self._is_open:
            self.readable = self._socket in events
            self._changed = self._monitor in events

    def wakes(self, now: float) -> bool:
        """Something can be received, `changes` has something to report, or its time has come."""
        return self.readable or self._changed or self._cut_off or self.due_at <= now

    def changes(self, now: float) -> list[bool]:
        """Changes since the last call, oldest first: True connected, False lost."""
        changes: list[bool] = []
        if self._cut_off:
            self._cut_off = False
            changes.append(False)
            if self.on_demand:
                self.due_at = inf
        if self.on_demand and self.opening and self.due_at <= now:
            self._close_until(now + self._config.longest_reconnect_s)
            return [*changes, False]
        if not self._changed:
            return changes
        while True:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return changes
            event, value = event_of(message[0])
            if event == zmq.Event.CONNECT_RETRIED and not self.on_demand:
                self.connect_failed = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected, self.opening, self.due_at = True, False, inf
                self._open_s = _OPEN_S
                self.turned_away = ""
                changes.append(True)
            else:
                why = refusal_of(event, value, self._config.keys, first=not self.turned_away)
                self.turned_away = why or self.turned_away
                if self.connected or self.on_demand:
                    at_once = self.connected and self.on_demand
                    self._close_until(now if at_once else now + self._config.reconnect_s)
                    return [*changes, False]
                self.due_at = now + self._config.longest_reconnect_s

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
                self._socket.send(frame, _MORE, copy=False)
            self._socket.send(last, _LAST, copy=False)
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
        if not self._is_open or not int(self._socket.getsockopt(zmq.EVENTS)) & _CAN_RECEIVE:
            return None
        self._num_owed -= 1
        if self._num_owed < -_MOST_UNASKED:
            self._hang_up()
            raise RemoteProtocolError("more replies than requests")
        length = self._socket.recv_into(self._magic, flags=zmq.NOBLOCK)
        try:
            if length != len(protocol.MAGIC) or self._magic != protocol.MAGIC or not self.more:
                raise RemoteProtocolError("a message without the magic frame and a header")
            if self.names_peer:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
                self.peer_host = str(frame.get("Peer-Address"))
                return protocol.decode_reply(frame.bytes)
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
        self.opening = False


def _close(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)
