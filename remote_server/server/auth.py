"""Who may connect: asked by libzmq once in every handshake (ZAP), answered on the loop thread.

A peer that is refused gets no further: libzmq closes its connection, and no queue, client or
namespace of ours ever hears of it. What is known of a peer that was let in is its public key, which
libzmq proved and puts beside every frame of it, whatever the peer itself says.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zmq
from zmq.utils import z85

from remote_server.guard import Guard
from remote_server.keys import CURVE_FRAME_BYTES, ServerKeys
from remote_server.plain_text import FewLines
from remote_server.process_limits import NO_MORE_FILES, Entrance, may_open
from remote_server.protocol import MAX_FRAME_BYTES
from remote_server.server.connections import ENDED_CURVE, ENDED_PLAIN, Connections
from remote_server.server.tenant_config import KnownKeys

log = logging.getLogger(__name__)

# Without a domain libzmq asks nobody about peers without CURVE.
_DOMAIN = b"kvferry"
_ENDPOINT = "inproc://zeromq.zap.01"

# A peer that says nothing holds a connection for so long.
HANDSHAKE_MS = 5_000

# Handshakes answered before requests get their turn again.
_ANSWERS_PER_TURN = 16

RELOAD_S = 1.0

# With several tenants one handshake is answered at a time, and libzmq's word of its end is waited
# for: well below a millisecond, unless the peer leaves in that moment.
ANSWER_ENDS_S = 0.05


_OK, _REFUSED, _FULL = b"200", b"400", b"500"
"""What a refused peer is told. 500 rather than 300, of which libzmq tells the peer nothing."""

_OPENED, _CLOSED = int(zmq.Event.ACCEPTED), int(zmq.Event.DISCONNECTED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
# Whichever side notices first that the other has no keys, or others, ends the handshake.
_BROKEN = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
_LISTENING, _NOT_ACCEPTED = int(zmq.Event.LISTENING), int(zmq.Event.ACCEPT_FAILED)

# Looking whether there are descriptors again, while there are none.
_LOOK_AGAIN_S = 0.5

COUNTERS = (
    "peers_refused_unknown_key", "peers_refused_connections", "peers_refused_share",
    "peers_refused_handshake", "peers_refused_unfinished",
    "refused_routing_id", "sockets_replaced", "accept_failed",
)  # fmt: skip


class Door:
    """Answers for the ROUTER, in whose context nothing else is asked. One thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        poller: zmq.Poller,
        clock: Callable[[], float],
        max_connections: int,
        server_keys: ServerKeys | None,
        known: KnownKeys | None,
        guard: Guard | None = None,
        tenants: Sequence[str] = ("",),
    ) -> None:
        """Before `router` is bound. Without keys everybody is let in while there is room."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._guard = guard or Guard()
        self._clock = clock
        self._max_connections = max_connections
        self._context = context
        ended = ENDED_PLAIN if server_keys is None else ENDED_CURVE
        self.connections = Connections(max_connections, tenants, ended)
        self.of_tenant = {tenant: {"connections_refused": 0} for tenant in tenants}
        """Counters of each: connections with its key for which there was no place."""
        self._several = len(tenants) > 1
        self._answered_at: float | None = None  # the one whose end is waited for
        self._gone: list[bytes] = []
        self._succeeded_at = 0.0
        self._known = known
        self._server_keys = server_keys
        self._poller = poller
        self.opened = 0
        """Connections accepted since the start, whatever became of them."""
        self._reload_at = self._open_at = clock()
        self._entrance: Entrance | None = None
        self._lines = FewLines(log, clock)
        self._asked: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(_ENDPOINT)
        poller.register(self._asked, zmq.POLLIN)
        self.watch(router)

    def watch(self, router: "zmq.Socket[bytes]") -> None:
        """Answer for this one from here on. Before it is bound."""
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
        # Without a mark: at one, libzmq drops what it reports, and the counts would be wrong.
        self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.linger = 0
        reports = f"inproc://door-{id(router)}"
        router.monitor(
            reports, _OPENED | _CLOSED | _SUCCEEDED | _BROKEN | _LISTENING | _NOT_ACCEPTED
        )
        self._monitor.connect(reports)
        self._poller.register(self._monitor, zmq.POLLIN)

    def look_away(self) -> None:
        """Before the ROUTER is closed."""
        if self._entrance is not None:
            self._entrance.close()
            self._entrance = None
        self._poller.unregister(self._monitor)
        self._router.disable_monitor()
        self._monitor.close(0)

    @property
    def num_connections(self) -> int:
        """Those in a handshake included."""
        return len(self.connections)

    @property
    def is_shut(self) -> bool:
        """There were no descriptors for connections. Call `handle` again soon."""
        return self._entrance is not None and self._entrance.shut

    def tenant_of(self, frame: zmq.Frame) -> str | None:
        """Whose connection `frame` came on; None when its key was withdrawn since."""
        if self._known is None:
            return ""
        return self._known.tenants.get(str(frame.get("User-Id")))

    def former_tenant_of(self, frame: zmq.Frame) -> str:
        """Whose it was before its key was withdrawn."""
        return "" if self._known is None else self._known.former.get(str(frame.get("User-Id")), "")

    def admits(self, client: bytes, frame: zmq.Frame, tenant: str) -> bool:
        """Whether the connection of `client`, whose `frame` this is, is still there. Called with
        each message, and takes note of the first one."""
        if self.connections.knows(client):
            return True
        self._take_note()
        return self.connections.met(client, int(frame.get(zmq.SRCFD)), tenant)

    def take_gone(self) -> list[bytes]:
        """The routing ids of connections that have ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def bound(self) -> None:
        """Right after the bind of `router`, while there are descriptors. Raises `OSError`."""
        self._take_note()

    def handle(self, events: Mapping[object, int]) -> None:
        """Answer who is asked for, and take note of who came and left."""
        now = self._clock()
        if self._known is not None and now >= self._reload_at:
            self._reload_at = now + RELOAD_S
            self._known.look_again()
        if self.is_shut and now >= self._open_at:
            self._open_at = now + _LOOK_AGAIN_S
            assert self._entrance is not None
            self._entrance.open_again()
        if self._asked in events:
            for _ in range(_ANSWERS_PER_TURN):
                if (
                    self._waits_for_an_end(now)
                    or not int(self._asked.getsockopt(zmq.EVENTS)) & zmq.POLLIN
                ):
                    break
                # Who is asked for has been accepted before, so this must be known before.
                self._take_note()
                self._answer(self._asked.recv_multipart(zmq.NOBLOCK))
        elif self._monitor in events:
            self._take_note()
        self._place()

    def close(self) -> None:
        self.look_away()
        self._poller.unregister(self._asked)
        self._asked.close(0)

    def _take_note(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            head = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            event = int.from_bytes(head[:2], sys.byteorder)
            value = int.from_bytes(head[2:6], sys.byteorder)
            if event == _OPENED:
                self.opened += 1
                self._accepted(value)
            elif event == _SUCCEEDED:
                self.connections.succeeded()
                self._succeeded_at = self._clock()
            elif event == _CLOSED:
                self._closed(value)
            elif event == _LISTENING:
                self._entrance = Entrance(value)
            elif event == _NOT_ACCEPTED:
                self.counters["accept_failed"] += 1
                if value in NO_MORE_FILES and self._entrance is not None and not self.is_shut:
                    self._lines.say(
                        logging.WARNING,
                        "this process has the %d files open that it may; new connections wait",
                        may_open(),
                    )
                    self._entrance.shut_out()
                    self._open_at = self._clock() + _LOOK_AGAIN_S
            else:
                self.counters["peers_refused_handshake"] += 1
                self._say("a peer without our public key, or no CURVE, or no ZeroMQ at all")

    def _accepted(self, fd: int) -> None:
        oldest = self.connections.accepted(fd)
        if oldest is not None:
            oldest.shut()
            self.counters["peers_refused_unfinished"] += 1
            self._say(f"{oldest.peer}: its handshake took long while many others were under way")

    def _place(self) -> None:
        """Those whose handshakes have ended."""
        if not self.connections.has_to_place():
            return
        for beyond in self.connections.place():
            beyond.shut()
            assert beyond.tenant is not None
            self._no_place(beyond.peer, beyond.tenant)
        if not self.connections.has_to_place():
            self._answered_at = None
        elif self._clock() >= self._succeeded_at + ANSWER_ENDS_S:
            self.connections.give_up_placing()

    def _closed(self, fd: int) -> None:
        self._answered_at = None  # it may have been the one
        client = self.connections.closed(fd)
        if client is not None:
            self._gone.append(client)

    def _waits_for_an_end(self, now: float) -> bool:
        """Of the handshake that was answered: it shows which connection is whose."""
        if self._answered_at is None:
            return False
        self._take_note()
        self._place()
        if self._answered_at is not None and now >= self._answered_at + ANSWER_ENDS_S:
            self._answered_at = None
        return self._answered_at is not None

    def _no_place(self, peer: str, tenant: str) -> None:
        if self.connections.is_full:
            self.counters["peers_refused_connections"] += 1
            self._say(f"{peer}: {self._max_connections} connections are open already")
        else:
            self.counters["peers_refused_share"] += 1
            self._say(f"{peer}: tenant {tenant} has as many connections as it may")
        self.of_tenant[tenant]["connections_refused"] += 1

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, routing id, mechanism, credentials.

        Every question gets an answer: libzmq lets no peer in without one.
        """
        verdict, key = self._guard.run("the door", partial(self._judge, request), (_REFUSED, ""))
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
                self._say(f"{address}: no tenant has the key {key}")
        else:
            tenant = None
        if tenant is None:
            return _REFUSED, key
        if not self.connections.has_room(tenant):
            self._no_place(address, tenant)
            return _FULL, key
        if self._several:
            self.connections.let_in(tenant)
            self._answered_at = self._clock()
        return _OK, key

    def _say(self, reason: str) -> None:
        """Now and then: who knocks in a loop shall not fill a log."""
        self._lines.say(logging.WARNING, "refused a connection: %s (all are counted)", reason)
