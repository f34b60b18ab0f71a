"""Who may connect: asked by libzmq once in every handshake (ZAP), answered on the loop thread.

A peer that is refused gets no further: libzmq closes its connection, and no queue, client or
namespace of ours ever hears of it. What is known of a peer that was let in is its public key, which
libzmq proved and puts beside every frame of it, whatever the peer itself says.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import partial

import zmq
from zmq.utils import z85

from remote_server.errors import ConfigError
from remote_server.few_lines import FewLines
from remote_server.guard import Guard
from remote_server.keys import CURVE_FRAME_BYTES, ServerKeys
from remote_server.open_files import NO_MORE_FILES, Entrance, may_open
from remote_server.protocol import MAX_FRAME_BYTES
from remote_server.tenants import keys_of_tenants

log = logging.getLogger(__name__)

# Without a domain libzmq asks nobody about peers without CURVE.
_DOMAIN = b"kvferry"
_ENDPOINT = "inproc://zeromq.zap.01"

# A peer that says nothing holds a connection for so long.
HANDSHAKE_MS = 5_000

# Handshakes answered before requests get their turn again.
_ANSWERS_PER_TURN = 16

_LOG_AGAIN_S = 10.0
RELOAD_S = 1.0


_OK, _REFUSED, _FULL = b"200", b"400", b"500"
"""What a refused peer is told. 500 rather than 300, of which libzmq tells the peer nothing."""

_OPENED, _CLOSED = int(zmq.Event.ACCEPTED), int(zmq.Event.DISCONNECTED)
# Whichever side notices first that the other has no keys, or others, ends the handshake.
_BROKEN = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
_LISTENING, _NOT_ACCEPTED = int(zmq.Event.LISTENING), int(zmq.Event.ACCEPT_FAILED)

# Looking whether there are descriptors again, while there are none.
_LOOK_AGAIN_S = 0.5

COUNTERS = (
    "peers_refused_unknown_key", "peers_refused_connections", "peers_refused_handshake",
    "refused_routing_id", "sockets_replaced", "accept_failed",
)  # fmt: skip


class KnownKeys:
    """The public keys of the tenants file, read again when it has changed.

    So a key is added or withdrawn while the server runs. A file that cannot be read changes
    nothing, and is said once.
    """

    def __init__(self, path: str, names: Container[str]) -> None:
        """Only tenants in `names` have a place here. Raises `ConfigError`."""
        self._path = path
        self._names = names
        self._seen = _fingerprint(path)
        self.tenants = keys_of_tenants(path)
        """Each key and whose it is."""
        self.former: dict[str, str] = {}
        """Those that were withdrawn. Connections that were made with them may still be open."""

    def look_again(self) -> None:
        seen = _fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            found = keys_of_tenants(self._path)
        except ConfigError as error:
            log.error("the tenants file has changed and is not used: %s", error)
            return
        except Exception:  # whatever is in it, the server goes on with what it knows
            log.exception("the tenants file has changed and cannot be read")
            return
        new = {name for name in found.values() if name not in self._names}
        if new:
            log.warning("tenants %s get a place when the server starts again", ", ".join(new))
        self.former |= self.tenants
        self.tenants = {key: name for key, name in found.items() if name in self._names}
        log.info("%d keys of tenants are known now", len(self.tenants))


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
    ) -> None:
        """Before `router` is bound. Without keys everybody is let in while there is room."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._guard = guard or Guard()
        self._clock = clock
        self._max_connections = max_connections
        self._known = known
        self._server_keys = server_keys
        self._poller = poller
        self.opened = 0
        """Connections accepted since the start, whatever became of them."""
        self._open: set[int] = set()  # descriptors of libzmq's connections
        self._log_at = self._reload_at = self._open_at = clock()
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
        self._open.clear()
        router.handshake_ivl = HANDSHAKE_MS
        router.zap_domain = _DOMAIN
        if self._server_keys is not None:
            router.curve_server = True
            router.curve_secretkey = self._server_keys.secret
            router.curve_publickey = self._server_keys.public
            router.maxmsgsize = MAX_FRAME_BYTES + CURVE_FRAME_BYTES
        self._monitor: zmq.Socket[bytes] = router.get_monitor_socket(
            _OPENED | _CLOSED | _BROKEN | _LISTENING | _NOT_ACCEPTED
        )
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
        return len(self._open)

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
                if not int(self._asked.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    break
                # Who is asked for has been accepted before, so this must be known before.
                self._take_note()
                self._answer(self._asked.recv_multipart(zmq.NOBLOCK))
        elif self._monitor in events:
            self._take_note()

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
                self._open.add(value)
                self.opened += 1
            elif event == _CLOSED:
                self._open.discard(value)
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
        verdict = _REFUSED
        address = request[3].decode(errors="replace") if len(request) > 3 else "?"
        if self.num_connections > self._max_connections:
            verdict = _FULL
            self.counters["peers_refused_connections"] += 1
            self._say(f"{address}: {self._max_connections} connections are open already")
        elif self._known is None:
            verdict = _OK
        elif request[5:6] == [b"CURVE"] and len(request) == 7 and len(request[6]) == 32:
            key = z85.encode(request[6]).decode()
            if key in self._known.tenants:
                verdict = _OK
            else:
                self.counters["peers_refused_unknown_key"] += 1
                self._say(f"{address}: no tenant has the key {key}")
        return verdict, key

    def _say(self, reason: str) -> None:
        """Now and then: who knocks in a loop shall not fill a log."""
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + _LOG_AGAIN_S
            log.warning("refused a connection: %s (all are counted)", reason)


def _fingerprint(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
