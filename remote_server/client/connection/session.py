"""Session: the client's view of its server: reachable, its boot, which namespaces are welcome.

    DISCONNECTED ──handshake──▶ HELLO sent for every namespace ──welcomes──▶ READY
         ▲                                   │ no answer                       │ timeouts
         └──────── connection lost ──────────┴──▶ breaker open, probe later ◀──┘

No socket, no clock, no thread: the loop reports events and queries what is due.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.breaker import Breaker, BreakerState
from remote_server.client.connection.limits import Limits
from remote_server.client.results import Counters
from remote_server.errors import NamespaceRefused, RequestRefused, ServerUnavailable

logger = logging.getLogger(__name__)


# Pause before a refused namespace is declared again: an operator may have cleared it.
REFUSED_RETRY_S = 5.0

# The same for a server of another protocol. One that was upgraded ends the connection before, and
# the next connection has its hellos at once.
OTHER_PROTOCOL_RETRY_S = 60.0


class OtherProtocol(RequestRefused):
    """The refusal of a server with another protocol number, in words of this client: those of an
    older server do not name the side to upgrade."""

    def __init__(self, server: int) -> None:
        why = protocol.other_protocol(server, protocol.PROTOCOL_VERSION)
        super().__init__(protocol.ErrorCode.UNSUPPORTED_PROTOCOL, why)


class Standing(Enum):
    """The standing of one namespace with the connected server."""

    DUE = auto()  # a hello must be sent
    ASKED = auto()  # a hello is on its way
    WELCOME = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Declaration:
    namespace: str
    block_bytes: int
    fingerprint: Mapping[str, str]
    standing: Standing = Standing.DUE
    retry_at: float = inf
    """Time at which it becomes due again after a refusal."""
    refusal: str = ""

    @property
    def is_welcome(self) -> bool:
        return self.standing is Standing.WELCOME


class Epoch(Enum):
    """How a reply's epoch compares with the current server's."""

    CURRENT = auto()
    STALE = auto()  # from a boot that has ended, or from an unknown server
    NEW = auto()  # the server restarted: requests in flight went to the old one


@dataclass(slots=True)
class Session:
    """The state drawn above. For the I/O thread only, except `ready`, `epoch` and `absent`."""

    config: ClientConfig
    counters: Counters
    declarations: dict[str, Declaration] = field(default_factory=dict)
    """Every namespace that was declared and not forgotten, by name."""
    limits: Limits = field(default_factory=Limits)
    epoch: str | None = None
    local_socket: str | None = None
    """The server's socket for shared memory; empty when it has none."""
    local_secret: bytes = b""  # to be presented there
    max_lanes: int | None = None
    """How many lanes the server offers; None: not known."""
    report: protocol.EngineReport | None = None
    """Sent with each hello."""
    load: protocol.ServerLoad | None = None
    """The one that came last. Any thread may read it."""
    breaker: Breaker = field(init=False)
    connected: bool = False
    ready: bool = False
    """Connected, breaker closed, every declared namespace welcome. Any thread may read it."""
    _renewing: bool = False
    """A hello is due for a namespace that is welcome."""
    _past_epochs: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    _logged_ready: bool = False
    turned_away: str = ""
    """Why the server refuses the connection; empty when it does not, or gives no reason."""
    absent: bool = False
    """An attempt to connect failed, and no reply has come yet. Any thread may read it."""

    def __post_init__(self) -> None:
        self.breaker = Breaker(self.config)

    # ── queries ──────────────────────────────────────────────────────────────────────────

    def require(self, declaration: Declaration | None = None) -> None:
        """Return when a request may be sent now, about the namespace of `declaration` if given;
        else raise `ServerUnavailable` with the reason."""
        if not self.connected:
            why = f": {self.turned_away}" if self.turned_away else ""
            raise ServerUnavailable(f"no connection to {self.config.endpoint}{why}")
        if self.breaker.state is not BreakerState.CLOSED:
            raise ServerUnavailable(f"{self.config.endpoint} stopped answering")
        if declaration is None or declaration.standing is Standing.WELCOME:
            return
        name = f"namespace {declaration.namespace!r}"
        if declaration.standing is Standing.REFUSED:
            raise NamespaceRefused(f"{name} refused: {declaration.refusal}")
        raise ServerUnavailable(f"{name} is not welcomed yet")

    def due(self, now: float) -> list[Declaration]:
        """The namespaces whose hello is due."""
        if self.breaker.open_if_due(now):
            self._breaker_opened()
        if self.breaker.retry_at <= now:
            self._renew_hellos()
        declared = self.declarations.values()
        for declaration in declared:
            if declaration.retry_at <= now:
                declaration.standing, declaration.retry_at = Standing.DUE, inf
        due = [one for one in declared if one.standing is Standing.DUE]
        if not self.connected or self.breaker.state is BreakerState.OPEN:
            return []
        if self._renewing and not due:
            due = [one for one in declared if one.is_welcome][:1]
        self._renewing = False
        return due

    def wake_at(self) -> float:
        """Time at which `due` may return more."""
        if not self.connected:
            return inf
        retries = (one.retry_at for one in self.declarations.values())
        return min(self.breaker.opens_at, self.breaker.retry_at, *retries)

    # ── events ───────────────────────────────────────────────────────────────────────────

    def on_connect_failed(self) -> None:
        """An attempt to connect failed. Logged once, and only before the first success: `went_down`
        logs the loss of a server."""
        if self.epoch is None and not self.absent:
            self.absent = True
            self._warn("no server there yet; every block is a miss until it answers")

    def was_turned_away(self, reason: str) -> None:
        """The server refused the connection because of `reason`; if that is empty, it accepts it
        now. Logged at every change, because a key file must be changed."""
        self.turned_away = reason
        if reason:
            self.counters["turned_away"] += 1
            self.absent = self.epoch is None
            self._warn("%s; every block is a miss until it does", reason)

    def forget(self, namespace: str) -> None:
        """Stop declaring a namespace. Requests for it are refused from now on."""
        if self.declarations.pop(namespace, None) is not None:
            self._refresh()

    def declare(self, new: Declaration) -> None:
        """Declare a namespace; a repetition changes nothing."""
        old = self.declarations.get(new.namespace)
        if old and (old.block_bytes, old.fingerprint) == (new.block_bytes, new.fingerprint):
            return
        self.declarations[new.namespace] = new
        self._refresh()

    def came_up(self) -> None:
        """The control connection is up. A new connection is probed at once."""
        self.connected = True
        self.counters["connects"] += 1
        self._renew_hellos()

    def went_down(self, reason: str) -> None:
        """The control connection is lost, or is being replaced because of `reason`."""
        if self._logged_ready:
            self._warn("%s; every block is a miss until it is back", reason)
        self._logged_ready = self.connected = self.ready = False
        self.local_socket = self.max_lanes = None
        self.limits = self.limits._replace(packed_keys=False)
        self._start_over()

    def on_epoch(self, epoch: str, *, welcome: bool) -> Epoch:
        """Compare a reply's `epoch`; `welcome` when it answers a hello in flight.

        Only a welcome establishes a new epoch. Any other reply that names one costs a hello and the
        requests in flight, but does not change the current epoch.
        """
        if epoch == self.epoch:
            return Epoch.CURRENT
        if self.epoch is None:
            self.epoch, self.absent = epoch, False
            return Epoch.CURRENT
        declared = self.declarations.values()
        if welcome or not declared:
            self._past_epochs.append(self.epoch)
            self.epoch = epoch
            self.counters["server_restarts"] += 1
        elif epoch in self._past_epochs or not any(one.is_welcome for one in declared):
            return Epoch.STALE
        self._renew_hellos()
        return Epoch.NEW

    def report_is(self, report: protocol.EngineReport) -> None:
        """Send this with the hellos from now on, of which one is due."""
        if report != self.report:
            self.report = report
            self.renew_welcome()

    def renew_welcome(self) -> None:
        """Send another hello: there is a new report, or what the last welcome offers does not work,
        and may be damaged. All namespaces stay welcome, also if there is no reply."""
        self._renewing = True

    def hello_sent(self, declaration: Declaration) -> None:
        """A hello for it is being sent."""
        if not declaration.is_welcome:
            declaration.standing = Standing.ASKED
        self.counters["hellos"] += 1
        self.breaker.probe()

    def welcomed(self, declaration: Declaration, welcome: protocol.Welcome) -> None:
        """The server accepted the namespace; adopt its limits."""
        declaration.standing, declaration.refusal = Standing.WELCOME, ""
        self.local_socket, self.local_secret = welcome.local_socket, welcome.local_secret
        self.max_lanes = welcome.max_lanes
        self.limits = Limits.of(welcome)
        self.breaker.close()
        self._refresh()
        if self.ready and not self._logged_ready:
            self._logged_ready = True
            self._log(logging.INFO, "ready, epoch %s", self.epoch)

    def not_welcomed(self, declaration: Declaration, error: RequestRefused, now: float) -> None:
        """The server refused a hello. The server is well; the namespace, or the client, is not."""
        reason = str(error)
        is_new = reason != declaration.refusal
        is_first = all(one.refusal != reason for one in self.declarations.values())
        declaration.standing, declaration.refusal = Standing.REFUSED, reason
        is_other = isinstance(error, OtherProtocol)
        if is_other or error.code == protocol.ErrorCode.WRONG_SERVER:
            declaration.retry_at = now + (OTHER_PROTOCOL_RETRY_S if is_other else REFUSED_RETRY_S)
            if is_first:
                self._warn("%s; every block is a miss until then", error.message)
        else:
            declaration.retry_at = now + REFUSED_RETRY_S
            if is_new:
                self._warn("namespace %s refused: %s", declaration.namespace, error)
        self.breaker.close()
        self._refresh()

    def hello_ended(self, declaration: Declaration) -> None:
        """A hello was given up before its reply; another is due."""
        if declaration.standing is Standing.ASKED:
            declaration.standing = Standing.DUE

    def probe_failed(self, declaration: Declaration, now: float) -> None:
        """A hello had no reply in time."""
        if declaration.is_welcome:
            return
        self.hello_ended(declaration)
        if self.breaker.state is not BreakerState.OPEN and self.breaker.trip(now):
            self._breaker_opened()

    def forgotten(self, namespace: str) -> None:
        """The server does not know `namespace`, which it once welcomed."""
        self.counters["unknown_namespace"] += 1
        declaration = self.declarations.get(namespace)
        if declaration and declaration.is_welcome:
            declaration.standing = Standing.DUE
            self._refresh()

    def timed_out(self, now: float, waited_s: float) -> None:
        """A request was sent and had no reply for `waited_s`."""
        if self.breaker.timed_out(now, waited_s):
            self._breaker_opened()

    # ── private ──────────────────────────────────────────────────────────────────────────

    def _warn(self, message: str, *about: object) -> None:
        self._log(logging.WARNING, message, *about)

    def _log(self, level: int, message: str, *about: object) -> None:
        level = logging.DEBUG if self.config.quiet else level
        logger.log(level, "%s: " + message, self.config.endpoint, *about)

    def _breaker_opened(self) -> None:
        self.counters["breaker_opened"] += 1
        self._logged_ready = self.ready = False
        self._warn("stopped answering; every block is a miss until it is back")

    def _renew_hellos(self) -> None:
        if not self.declarations:
            self.breaker.close()  # nothing to probe with: the next request finds out
        self.breaker.probe()
        self._start_over()
        self._refresh()

    def _start_over(self) -> None:
        """Make a hello due for every namespace."""
        for declaration in self.declarations.values():
            declaration.standing, declaration.retry_at = Standing.DUE, inf

    def _refresh(self) -> None:
        self.ready = (
            self.connected
            and self.breaker.state is BreakerState.CLOSED
            and all(one.is_welcome for one in self.declarations.values())
        )
