"""Admission of connections: libzmq queries it once in each handshake (ZAP), on the loop thread; and
of clients, by their hello.

libzmq closes the connection of a refused peer, so it reaches no queue, client or namespace. An
admitted peer is identified by its public key. libzmq has proved the key and attaches it to every
frame, whatever the peer sends.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import zmq
from zmq.utils import z85

from remote_server.keys import CURVE_FRAME_BYTES, ServerKeys
from remote_server.plain_text import FewLines
from remote_server.process_limits import NO_MORE_FILES, Entrance, may_open
from remote_server.protocol import MAX_FRAME_BYTES
from remote_server.server.entrance.connections import ENDED_CURVE, ENDED_PLAIN, Connections
from remote_server.server.entrance.penalties import Penalties
from remote_server.server.entrance.tenant_keys import TenantKeys
from remote_server.server.loop_context import LoopContext

log = logging.getLogger(__name__)

# Without a domain libzmq does not query for peers without CURVE.
_DOMAIN = b"kvferry"
_ENDPOINT = "inproc://zeromq.zap.01"

# The longest handshake. A silent peer holds a connection until then.
HANDSHAKE_MS = 5_000

# Handshakes answered before requests get their turn again.
_ANSWERS_PER_TURN = 16

RELOAD_S = 1.0

# With several tenants one handshake is answered at a time. The event of its end is awaited for this
# long: it takes well below a millisecond, unless the peer leaves in that moment.
ANSWER_ENDS_S = 0.05


_OK, _REFUSED, _FULL = b"200", b"400", b"500"
"""Verdicts. A full server replies 500 rather than 300, because libzmq does not pass 300 on."""

_OPENED, _CLOSED = int(zmq.Event.ACCEPTED), int(zmq.Event.DISCONNECTED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
# The side that first finds the other's keys missing or wrong ends the handshake.
_BROKEN = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
_LISTENING, _NOT_ACCEPTED = int(zmq.Event.LISTENING), int(zmq.Event.ACCEPT_FAILED)

# Between checks for free descriptors, while there are none.
_RETRY_S = 0.5

COUNTERS = (
    "peers_refused_unknown_key", "peers_refused_connections", "peers_refused_share",
    "peers_refused_handshake", "peers_refused_unfinished", "peers_refused_waiting", "peers_ended",
    "refused_routing_id", "sockets_replaced", "accept_failed",
)  # fmt: skip


class Authenticator:
    """Admits the connections of the ROUTER, the only socket of its context with ZAP. One thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        loop_context: LoopContext,
        max_connections: int,
        server_keys: ServerKeys | None,
        known: TenantKeys | None,
        tenants: Sequence[str] = ("",),
    ) -> None:
        """Must be created before `router` is bound. Without keys it admits every peer it has room
        for."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._guard = loop_context.guard
        self._clock = clock = loop_context.clock
        self._max_connections = max_connections
        self._context = context
        ended = ENDED_PLAIN if server_keys is None else ENDED_CURVE
        self.connections = Connections(max_connections, tenants, ended)
        self.of_tenant = {tenant: {"connections_refused": 0} for tenant in tenants}
        """Counters by tenant: connections with its key that found no free place."""
        self._several = len(tenants) > 1
        # when the handshake whose end is awaited was answered, and whether one has ended since
        self._answered_at: float | None = None
        self._ended = False
        self._gone: list[bytes] = []
        self._succeeded_at = 0.0
        self._known = known
        self._server_keys = server_keys
        self._poller = loop_context.poller
        self.opened = 0
        """Connections accepted since the start, refused ones included."""
        self._reload_at = self._open_at = clock()
        self._entrance: Entrance | None = None
        self._lines = FewLines(log, clock)
        self._penalties = Penalties(clock)
        self._asked: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(_ENDPOINT)
        self._poller.register(self._asked, zmq.POLLIN)
        self.watch(router)

    def watch(self, router: "zmq.Socket[bytes]") -> None:
        """Admit connections of `router` from now on. Must be called before it is bound."""
        self._router = router
        self.connections.clear()
        self._answered_at = None
        router.handshake_ivl = HANDSHAKE_MS
        router.zap_domain = _DOMAIN
        if self._server_keys is not None:
            router.curve_server = True
            router.curve_secretkey = self._server_keys.secret
            router.curve_publickey = self._server_keys.public
            router.maxmsgsize = MAX_FRAME_BYTES + CURVE_FRAME_BYTES
        # Without a mark: at one, libzmq drops events, and the counts would be wrong.
        self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.linger = 0
        reports = f"inproc://authenticator-{id(router)}"
        router.monitor(
            reports, _OPENED | _CLOSED | _SUCCEEDED | _BROKEN | _LISTENING | _NOT_ACCEPTED
        )
        self._monitor.connect(reports)
        self._poller.register(self._monitor, zmq.POLLIN)

    def unwatch(self) -> None:
        """Must be called before the ROUTER is closed. The socket that listens stays open."""
        self._poller.unregister(self._monitor)
        self._router.disable_monitor()
        self._monitor.close(0)

    def all_counters(self) -> dict[str, int]:
        """Those of all tenants together."""
        refused = sum(counters["connections_refused"] for counters in self.of_tenant.values())
        return {
            **self.counters, "connections_opened": self.opened, "connections_refused": refused,
        }  # fmt: skip

    @property
    def num_connections(self) -> int:
        """Those in a handshake included."""
        return len(self.connections)

    @property
    def is_shut(self) -> bool:
        """There were no descriptors for connections. Call `handle` again soon."""
        return self._entrance is not None and self._entrance.shut

    def tenant_of(self, frame: zmq.Frame) -> str | None:
        """The tenant of the connection of `frame`; None when its key was withdrawn since."""
        if self._known is None:
            return ""
        return self._known.tenants.get(str(frame.get("User-Id")))

    def former_tenant_of(self, frame: zmq.Frame) -> str:
        """The tenant that it had before its key was withdrawn."""
        return "" if self._known is None else self._known.former.get(str(frame.get("User-Id")), "")

    def admits(self, client: bytes, frame: zmq.Frame, tenant: str) -> bool:
        """Whether the connection of `client` is still open; `frame` is one of its message. Must be
        called with each message, because the first one identifies the connection."""
        if self.connections.knows(client):
            return True
        self._read_events()
        return self.connections.met(client, int(frame.get(zmq.SRCFD)), tenant)

    def end(self, client: bytes, frame: zmq.Frame, why: str) -> None:
        """End the connection of `client`, which has sent `frame`. Its key, or its address where it
        has none, is let in again after a time that doubles."""
        sender = str(frame.get("User-Id")) if self._known is not None else ""
        address = str(frame.get("Peer-Address"))
        wait_s = self._penalties.add(sender or address)
        self.counters["peers_ended"] += 1
        log.warning(
            "a connection from %s is ended, and %s has to wait %g s: %s",
            address, f"its key {sender}" if sender else "its address", wait_s, why,
        )  # fmt: skip
        self.connections.shut(client)

    def take_gone(self) -> list[bytes]:
        """The routing ids of connections that have ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def bound(self) -> None:
        """Must be called right after the bind of `router`, with free descriptors. Raises
        `OSError`."""
        self._read_events()

    def listener(self) -> int:
        """A descriptor of the socket that listens, for the next ROUTER, which closes it. Raises
        `OSError`."""
        assert self._entrance is not None, "nothing was bound"
        return self._entrance.duplicate()

    def handle(self, events: Mapping[object, int]) -> None:
        """Answer handshakes, and record which connections have opened and closed."""
        now = self._clock()
        if self._known is not None and now >= self._reload_at:
            self._reload_at = now + RELOAD_S
            self._known.reload()
        if self.is_shut and now >= self._open_at:
            self._open_at = now + _RETRY_S
            assert self._entrance is not None
            self._entrance.open_again()
        if self._asked in events:
            for _ in range(_ANSWERS_PER_TURN):
                if (
                    self._waits_for_an_end(now)
                    or not int(self._asked.getsockopt(zmq.EVENTS)) & zmq.POLLIN
                ):
                    break
                # Record first that the peer was accepted: its answer needs that.
                self._read_events()
                self._answer(self._asked.recv_multipart(zmq.NOBLOCK))
        elif self._monitor in events:
            self._read_events()
        self._place()

    def close(self) -> None:
        self.unwatch()
        self._poller.unregister(self._asked)
        self._asked.close(0)
        if self._entrance is not None:
            self._entrance.close()

    def _read_events(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            head = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            event = int.from_bytes(head[:2], sys.byteorder)
            value = int.from_bytes(head[2:6], sys.byteorder)
            if event == _OPENED:
                self.opened += 1
                self._accepted(value)
            elif event == _SUCCEEDED:
                self.connections.succeeded()
                self._succeeded_at, self._ended = self._clock(), True
            elif event == _CLOSED:
                self._closed(value)
            elif event == _LISTENING:
                self._entrance = self._entrance or Entrance(value)
            elif event == _NOT_ACCEPTED:
                self.counters["accept_failed"] += 1
                if value in NO_MORE_FILES and self._entrance is not None and not self.is_shut:
                    self._lines.say(
                        logging.WARNING,
                        "this process has its limit of %d files open; new connections wait",
                        may_open(),
                    )
                    self._entrance.shut_out()
                    self._open_at = self._clock() + _RETRY_S
            else:
                self.counters["peers_refused_handshake"] += 1
                self._log_refusal("a peer without our public key, or no CURVE, or no ZeroMQ at all")

    def _accepted(self, fd: int) -> None:
        oldest = self.connections.accepted(fd)
        if oldest is not None:
            oldest.shut()
            self.counters["peers_refused_unfinished"] += 1
            self._log_refusal(f"{oldest.peer}: its handshake was the oldest of too many")

    def _place(self) -> None:
        """Count connections whose handshakes have ended. A first message may have shown one."""
        for beyond in self.connections.place():
            beyond.shut()
            assert beyond.tenant is not None
            self._no_place(beyond.peer, beyond.tenant)
        if not self.connections.has_to_place():
            if self._ended:
                self._answered_at = None
        elif self._clock() >= self._succeeded_at + ANSWER_ENDS_S:
            self.connections.give_up_placing()

    def _closed(self, fd: int) -> None:
        self._answered_at = None  # it may be the one whose end is awaited
        client = self.connections.closed(fd)
        if client is not None:
            self._gone.append(client)

    def _waits_for_an_end(self, now: float) -> bool:
        """Whether the end of the answered handshake is awaited: it shows a connection's tenant."""
        if self._answered_at is None:
            return False
        self._read_events()
        self._place()
        if self._answered_at is not None and now >= self._answered_at + ANSWER_ENDS_S:
            self._answered_at = None
        return self._answered_at is not None

    def _no_place(self, peer: str, tenant: str) -> None:
        if self.connections.is_full:
            self.counters["peers_refused_connections"] += 1
            self._log_refusal(f"{peer}: {self._max_connections} connections are open already")
        else:
            self.counters["peers_refused_share"] += 1
            self._log_refusal(f"{peer}: tenant {tenant} has as many connections as it may")
        self.of_tenant[tenant]["connections_refused"] += 1

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, routing id, mechanism, credentials.

        Every query gets an answer: without one libzmq never admits the peer.
        """
        verdict, key = self._guard.run(
            "authentication", partial(self._judge, request), (_REFUSED, "")
        )
        text = b"" if verdict == _OK else b"refused"
        self._asked.send_multipart([b"1.0", request[1], verdict, text, key.encode(), b""])

    def _judge(self, request: list[bytes]) -> tuple[bytes, str]:
        """The verdict, and the peer's key when it has one."""
        key = ""
        address = request[3].decode(errors="replace") if len(request) > 3 else "?"
        if self._known is None:
            tenant: str | None = ""
        elif request[5:6] == [b"CURVE"] and len(request) == 7 and len(request[6]) == 32:
            key = z85.encode(request[6]).decode()
            tenant = self._known.tenants.get(key)
            if tenant is None:
                self.counters["peers_refused_unknown_key"] += 1
                self._log_refusal(f"{address}: no tenant has the key {key}")
        else:
            tenant = None
        if tenant is None:
            return _REFUSED, key
        if self._penalties.holds(key or address):
            self.counters["peers_refused_waiting"] += 1
            self._log_refusal(f"{address}: it has to wait, because of what it sent before")
            return _FULL, key
        if not self.connections.make_room(tenant):
            self._no_place(address, tenant)
            return _FULL, key
        if self._several:
            self.connections.let_in(tenant)
            self._answered_at, self._ended = self._clock(), False
        return _OK, key

    def _log_refusal(self, reason: str) -> None:
        """Log at a bounded rate: a peer that connects in a loop must not fill the log."""
        self._lines.say(logging.WARNING, "refused a connection: %s (all are counted)", reason)
