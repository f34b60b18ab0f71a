"""The socket's receiving side: bounded messages, each passed to its tenant's queue."""

import errno
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

import zmq

from remote_server import protocol
from remote_server.errors import ConfigError, RequestRefused, ServerFailed
from remote_server.process_limits import backlog
from remote_server.protocol import ErrorCode
from remote_server.server.entrance.auth import Authenticator
from remote_server.server.intake.serving import Serving
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.loop_context import LoopContext
from remote_server.server.sending.send_queue import SEND_HIGH_WATER_MARK
from remote_server.server.tenant.tenant import Tenant

# The routing id, the magic, the header, and at most one payload frame for each block.
MAX_FRAMES = 3 + protocol.MAX_KEYS_PER_MESSAGE

# As a number: an operation on members of an enumeration takes a microsecond.
_CAN_RECEIVE = int(zmq.POLLIN)

# Frames beyond these that are read and dropped at a time: 20 to 50 ms, without other requests. A
# message that has more costs its sender the connection, and the rest is dropped in later turns.
DISCARDED_FRAMES = 10_000

# Of one message. All connections are closed when it has more: 2 MB on the way are 64 MB in libzmq.
MOST_DISCARDED = 1_000_000

_HEAD = 3
"""The frames that are needed to refuse a message by its request id."""


class Flooded(Exception):
    """A message has so many frames that dropping the rest would block all other clients. It must be
    read before the next one, so only another socket helps."""


class Message(NamedTuple):
    """The routing id and the frames after it. With a `refusal` only the first frames are here."""

    frames: list[zmq.Frame]
    refusal: RequestRefused | None = None
    has_more: bool = False
    """The socket still has frames of it, which are to be dropped."""


def next_message(router: "zmq.Socket[bytes]") -> Message | None:
    """The next message, or None when there is none.

    libzmq has received a message as a whole before it hands over the first frame. The bound here is
    on the time and memory that frames take in Python, a hundred times that of libzmq.
    """
    # Checked first, because a failed receive raises: twenty times the cost.
    if not int(router.getsockopt(zmq.EVENTS)) & _CAN_RECEIVE:
        return None
    frames = [router.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        if len(frames) == MAX_FRAMES:
            is_whole = _discard_some(router)
            refusal = RequestRefused(
                ErrorCode.BAD_MESSAGE,
                f"a message of more than {MAX_FRAMES - 1:,} frames; see PROTOCOL.md",
            )
            return Message(frames[:_HEAD], refusal, has_more=not is_whole)
        frames.append(router.recv(zmq.NOBLOCK, copy=False))
    return Message(frames)


def _discard_some(router: "zmq.Socket[bytes]") -> bool:
    """Whether the message has no more frames."""
    return any(not router.recv(zmq.NOBLOCK, copy=False).more for _ in range(DISCARDED_FRAMES))


# Limits of one turn of receiving: messages answered at once, messages in all, and time.
ANSWERED_PER_TURN = 16
TAKEN_PER_TURN = 64
TURN_S = 0.001

# A peer that is silent for this long is dropped, with its queue and its pins. ZeroMQ's heartbeats
# detect an idle peer. They do not detect one that has stopped reading, because our ping waits
# behind the unread messages; there TCP counts how long the window has been shut.
HEARTBEAT_INTERVAL_MS = 5_000
SILENCE_MS = 30_000

LISTEN_AGAIN_S = 5.0


def make_router(context: "zmq.Context[zmq.Socket[bytes]]", bind: str) -> "zmq.Socket[bytes]":
    """A ROUTER that is not bound yet, so that authentication can be set up before."""
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True  # report a peer that is gone or full instead of dropping
    router.linger = 0
    router.sndhwm = SEND_HIGH_WATER_MARK
    # A receive mark is dangerous: at it libzmq stops reading the connection, and when the peer then
    # resets it, the next heartbeat fails an assertion (`!_io_error`) and ends the process. The
    # handlers' refusals bound the bytes that a peer may have in flight.
    router.rcvhwm = 0
    router.maxmsgsize = protocol.MAX_FRAME_BYTES
    router.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    router.heartbeat_timeout = SILENCE_MS
    router.tcp_maxrt = SILENCE_MS
    router.backlog = backlog()
    router.ipv6 = "[" in bind
    return router


class Intake:
    """Receives messages and passes them on to be served. One thread.

    It never stops reading while a client sends; `serving` bounds what waits.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        loop_context: LoopContext,
        auth: Authenticator,
        tenants: Mapping[str, Tenant],
        serving: Serving,
        lanes: ServerLanes,
    ) -> None:
        """The caller closes `router`. `tenants` are by name."""
        self.router = router
        self.endpoint = ""
        self._context = context
        self._poller = loop_context.poller
        self._auth = auth
        self._tenants = tenants
        self._serving = serving
        self._lanes = lanes
        self._clock = loop_context.clock
        self._num_discarded = 0
        """Frames of the message that is being dropped; 0: none is."""
        self._poller.register(router, zmq.POLLIN)

    def bind(self, address: str) -> None:
        """Bind `address`. Raises `ConfigError`."""
        try:
            self.router.bind(address)
        except zmq.ZMQError as error:
            hint = "choose another port, or :* for any free one"
            if error.errno == zmq.EADDRINUSE:
                hint = f"another process listens there; stop it, or {hint}"
            elif error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
                hint = "that host is not this machine: 0.0.0.0 is all of its addresses"
            raise ConfigError(f"bind: {address}: {error.strerror}; {hint}") from error
        self._auth.bound()
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def take_in(self) -> None:
        """Read some messages, and answer those that need not wait. Raises `Flooded` when the socket
        has to be replaced."""
        self.forget_gone()
        if self._num_discarded and not self._discard_some():
            return
        answered, until = 0, self._clock() + TURN_S
        for _ in range(TAKEN_PER_TURN):
            message = next_message(self.router)
            if message is None:
                return
            if message.has_more:
                self._end_sender(message)
                return
            answered += self._take(message)
            if answered >= ANSWERED_PER_TURN or self._clock() >= until:
                return

    def forget_gone(self) -> None:
        """Drop the requests of connections that have ended, and what is known of their clients."""
        gone = frozenset(self._auth.take_gone())
        if not gone:
            return
        for client in gone:
            self._serving.drop(client)
        self._lanes.forget(gone)
        for tenant in self._tenants.values():
            tenant.forget(gone)

    def start_over(self) -> None:
        """Replace the socket, and lose all that libzmq has received on it. Clients reconnect by
        themselves; their requests in flight are lost, blocks are not. Raises `ServerFailed`."""
        self._auth.counters["sockets_replaced"] += 1
        self._poller.unregister(self.router)
        self._lanes.forget_all()
        self._auth.unwatch()
        self.router.close(linger=0)
        self._num_discarded = 0
        self._serving.drop_all()
        self.router = make_router(self._context, self.endpoint)
        self._auth.watch(self.router)
        for tenant in self._tenants.values():
            tenant.start_over(self.router)
        self._poller.register(self.router, zmq.POLLIN)
        self._listen_again()

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _end_sender(self, message: Message) -> None:
        frames = message.frames
        client, tenant = frames[0].bytes, self._tenant_of(frames)
        if tenant is not None and self._auth.admits(client, frames[-1], tenant.name):
            self._auth.end(client, frames[-1], "it sent a message of too many frames")
        self._num_discarded = DISCARDED_FRAMES

    def _discard_some(self) -> bool:
        """Whether no message is being dropped any more. Raises `Flooded`."""
        if _discard_some(self.router):
            self._num_discarded = 0
            return True
        self._num_discarded += DISCARDED_FRAMES
        if self._num_discarded >= MOST_DISCARDED:
            raise Flooded
        return False

    def _take(self, message: Message) -> bool:
        """Whether the message is done with, rather than queued."""
        frames = message.frames
        tenant = self._tenant_of(frames)
        if tenant is None:
            return True
        client = frames[0].bytes
        if not self._auth.admits(client, frames[-1], tenant.name):
            tenant.store.counters["requests_dropped_gone"] += 1
            return True
        views = [frame.buffer for frame in frames[1:]]
        return self._serving.take(tenant, client, views, message.refusal)

    def _listen_again(self) -> None:
        """The socket that listens is one for the server's life: another process could take a port
        that is free for a moment. Connections that come meanwhile wait there."""
        deadline = self._clock() + LISTEN_AGAIN_S
        while True:
            listener = -1
            try:
                listener = self._auth.listener()
                # libzmq polls it and then accepts. Until its thread has closed the old listener,
                # both see one connection, and a blocking accept would stop that thread.
                os.set_blocking(listener, False)
                self.router.setsockopt(zmq.USE_FD, listener)
                self.router.bind(self.endpoint)
            except (OSError, zmq.ZMQError) as error:
                # Without descriptors: libzmq's thread closes its own after `close` has returned.
                if listener >= 0:
                    os.close(listener)
                if self._clock() >= deadline:
                    why = f"{self.endpoint} cannot be listened on again: {error}"
                    raise ServerFailed(why) from error
                time.sleep(0.001)
            else:
                self._auth.bound()
                return

    def _tenant_of(self, frames: list[zmq.Frame]) -> Tenant | None:
        """The tenant that libzmq authenticated in the handshake."""
        tenant = self._auth.tenant_of(frames[-1])
        if tenant is None:
            self._refuse_revoked(frames)
            return None
        if tenant and not _is_given(frames[0].bytes):
            # The id could be that of another tenant's connection that has just ended, whose waiting
            # replies this one would receive.
            self._auth.counters["refused_routing_id"] += 1
            return None
        return self._tenants[tenant]

    def _refuse_revoked(self, frames: list[zmq.Frame]) -> None:
        """Its key was withdrawn: refuse the request."""
        former = self._tenants.get(self._auth.former_tenant_of(frames[-1]))
        client = frames[0].bytes
        if former is not None and former.send_queues.accepts(client):
            refusal = RequestRefused(
                ErrorCode.REVOKED_KEY, "your key is no longer one of your tenant's"
            )
            former.handlers.refuse(client, [frame.buffer for frame in frames[1:]], refusal)


def _is_given(routing_id: bytes) -> bool:
    """Whether libzmq chose the id, rather than the peer."""
    return len(routing_id) == 5 and routing_id[0] == 0
