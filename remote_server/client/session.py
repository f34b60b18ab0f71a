"""What the client knows of its server: reachable, which boot, which namespaces are welcome.

    DISCONNECTED ──handshake──▶ HELLO sent for every namespace ──welcomes──▶ READY
         ▲                                   │ no answer                       │ timeouts
         └──────── connection lost ──────────┴──▶ breaker open, probe later ◀──┘

No socket, no clock, no thread: the loop tells it what happened and asks what to do.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from remote_server import protocol
from remote_server.client.breaker import Breaker, BreakerState
from remote_server.client.declarations import Declaration, Declarations, Standing
from remote_server.client.results import ClientConfig, Counters
from remote_server.errors import KVFerryError, ServerUnavailable

logger = logging.getLogger(__name__)

# A namespace the server refused is offered again this often: someone may have cleared it.
REFUSED_RETRY_S = 5.0


@dataclass(slots=True)
class Limits:
    """What a Welcome allows; until one came, what the protocol allows."""

    max_keys: int = protocol.MAX_KEYS_PER_MESSAGE
    max_frame_bytes: int = protocol.MAX_FRAME_BYTES
    max_message_bytes: int = protocol.MAX_MESSAGE_BYTES


class Epoch(Enum):
    """How a reply's epoch compares with the server we believe we talk to."""

    CURRENT = auto()
    STALE = auto()  # said by a server that has restarted since, or by nobody we know
    NEW = auto()  # the server restarted: whatever is in flight went to the old one


@dataclass(slots=True)
class Session:
    """The state above. Only the I/O thread calls it; `ready` and `epoch` anyone may read."""

    config: ClientConfig
    counters: Counters
    declarations: Declarations = field(default_factory=Declarations)
    limits: Limits = field(default_factory=Limits)
    epoch: str | None = None
    local_socket: str | None = None
    """Where the server we are connected to takes shared memory; empty when it does not."""
    local_secret: bytes = b""
    """What to say there."""
    breaker: Breaker = field(init=False)
    connected: bool = False
    ready: bool = False
    """Connected, breaker closed, every declared namespace welcome. Any thread may read it."""
    _past_epochs: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    _said_ready: bool = False
    turned_away: str = ""
    """Why the server does not let us in; empty when it does, or says nothing."""
    absent: bool = False
    """An attempt to connect failed before anything had ever answered. Any thread may read it."""

    def __post_init__(self) -> None:
        self.breaker = Breaker(
            self.config.breaker_timeouts,
            self.config.breaker_backoff_s,
            self.config.breaker_longest_backoff_s,
        )

    # ── what it answers ──────────────────────────────────────────────────────────────────

    def declaration(self, namespace: str) -> Declaration:
        """Raises `LocalProtocolError` when `namespace` was never declared."""
        return self.declarations[namespace]

    def require(self, namespace: str | None = None) -> None:
        """Return when a request about `namespace` may be sent now; else raise the reason.

        `ServerUnavailable`, or `LocalProtocolError` for a namespace that was never declared.
        """
        declaration = None if namespace is None else self.declaration(namespace)
        if not self.connected:
            why = f": {self.turned_away}" if self.turned_away else ""
            raise ServerUnavailable(f"no connection to {self.config.endpoint}{why}")
        if self.breaker.state is not BreakerState.CLOSED:
            raise ServerUnavailable(f"{self.config.endpoint} stopped answering")
        if declaration is None or declaration.is_welcome:
            return
        if declaration.standing is Standing.REFUSED:
            raise ServerUnavailable(f"namespace {namespace!r} refused: {declaration.refusal}")
        raise ServerUnavailable(f"namespace {namespace!r} is not welcomed yet")

    def due(self, now: float) -> list[Declaration]:
        """The namespaces to say hello for now."""
        if self.breaker.open_if_due(now):
            self._breaker_opened()
        if self.breaker.retry_at <= now:
            self._say_hello_again()
        due = self.declarations.due(now)
        return due if self.connected and self.breaker.state is not BreakerState.OPEN else []

    def wake_at(self) -> float:
        """When `due` may have something new to say."""
        if not self.connected:
            return inf
        return min(self.breaker.opens_at, self.breaker.retry_at, self.declarations.retry_at)

    # ── what it is told ──────────────────────────────────────────────────────────────────

    def nobody_there(self) -> None:
        """An attempt to connect failed. Worth a line once, and only before the first success:
        that a server has gone is said when it goes."""
        if self.epoch is None and not self.absent:
            self.absent = True
            self._warn("no server there yet; every block is a miss until it answers")

    def was_turned_away(self, reason: str) -> None:
        """The server was there and did not let us in, because of `reason`; or, if that is empty,
        does so now. Somebody must change a key file, so it is said whenever it changes."""
        self.turned_away = reason
        if reason:
            self.counters["turned_away"] += 1
            self.absent = self.epoch is None
            self._warn("%s; every block is a miss until it does", reason)

    def forget(self, namespace: str) -> None:
        """Stop declaring a namespace. Requests about it are refused from now on."""
        if self.declarations.remove(namespace):
            self._refresh()

    def declare(self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str]) -> None:
        """Remember a namespace; the same words again change nothing."""
        if self.declarations.add(namespace, block_bytes, fingerprint):
            self._refresh()

    def came_up(self) -> None:
        """The control connection is there. A new connection is worth a probe at once."""
        self.connected = True
        self.counters["connects"] += 1
        self._say_hello_again()

    def went_down(self, reason: str) -> None:
        """The control connection is gone, or is being replaced because of `reason`."""
        if self._said_ready:
            self._warn("%s; every block is a miss until it is back", reason)
        self._said_ready = self.connected = self.ready = False
        self.local_socket = None
        self.declarations.start_over()

    def heard(self, epoch: str, *, welcome: bool) -> Epoch:
        """Some reply said `epoch`; `welcome` when it answers a hello that is on its way.

        Only a welcome is believed about a new epoch. Anything else that names one costs a hello
        and what is in flight, but cannot talk us out of the epoch we are in.
        """
        if epoch == self.epoch:
            return Epoch.CURRENT
        if self.epoch is None:
            self.epoch = epoch
            return Epoch.CURRENT
        if welcome or not self.declarations:
            self._past_epochs.append(self.epoch)
            self.epoch = epoch
            self.counters["server_restarts"] += 1
        elif epoch in self._past_epochs or not any(one.is_welcome for one in self.declarations):
            return Epoch.STALE
        self._say_hello_again()
        return Epoch.NEW

    def asked(self, declaration: Declaration) -> None:
        """A hello for it is being sent."""
        declaration.standing = Standing.ASKED
        self.counters["hellos"] += 1
        self.breaker.probe()

    def welcomed(self, declaration: Declaration, welcome: protocol.Welcome) -> None:
        """The server holds the namespace and says what it allows."""
        declaration.standing, declaration.refusal = Standing.WELCOME, ""
        self.local_socket, self.local_secret = welcome.local_socket, welcome.local_secret
        self.limits.max_keys = min(max(1, welcome.max_keys), protocol.MAX_KEYS_PER_MESSAGE)
        self.limits.max_frame_bytes = min(max(1, welcome.max_frame_bytes), protocol.MAX_FRAME_BYTES)
        self.limits.max_message_bytes = min(
            max(1, welcome.max_message_bytes), protocol.MAX_MESSAGE_BYTES
        )
        self.breaker.close()
        self._refresh()
        if self.ready and not self._said_ready:
            self._said_ready = True
            self._log(logging.INFO, "ready, epoch %s", self.epoch)

    def not_welcomed(self, declaration: Declaration, error: KVFerryError, now: float) -> None:
        """The server answered a hello with a refusal. It is well; the namespace is not."""
        if declaration.refusal != str(error):
            declaration.refusal = str(error)
            self._warn("namespace %s refused: %s", declaration.namespace, error)
        declaration.standing = Standing.REFUSED
        declaration.retry_at = now + REFUSED_RETRY_S
        self.breaker.close()
        self._refresh()

    def hello_ended(self, declaration: Declaration) -> None:
        """A hello was given up before it was answered; another is due."""
        if declaration.standing is Standing.ASKED:
            declaration.standing = Standing.DUE

    def probe_failed(self, declaration: Declaration, now: float) -> None:
        """A hello got no answer in time."""
        self.hello_ended(declaration)
        if self.breaker.state is not BreakerState.OPEN and self.breaker.trip(now):
            self._breaker_opened()

    def forgotten(self, namespace: str) -> None:
        """The server said it does not know `namespace`, which it once welcomed."""
        self.counters["unknown_namespace"] += 1
        declaration = self.declarations.get(namespace)
        if declaration and declaration.is_welcome:
            declaration.standing = Standing.DUE
            self._refresh()

    def answered(self) -> None:
        """Some request got its answer in time."""
        self.breaker.answered()

    def answered_late(self, waited_s: float) -> None:
        """Some request got its answer so long after it was sent, and too late."""
        self.breaker.answered_late(waited_s)

    def timed_out(self, now: float, waited_s: float) -> None:
        """Some request was sent and got no answer for so long."""
        if self.breaker.timed_out(now, waited_s):
            self._breaker_opened()

    # ── its own ──────────────────────────────────────────────────────────────────────────

    def _warn(self, message: str, *about: object) -> None:
        self._log(logging.WARNING, message, *about)

    def _log(self, level: int, message: str, *about: object) -> None:
        level = logging.DEBUG if self.config.quiet else level
        logger.log(level, "%s: " + message, self.config.endpoint, *about)

    def _breaker_opened(self) -> None:
        self.counters["breaker_opened"] += 1
        self._said_ready = self.ready = False
        self._warn("stopped answering; every block is a miss until it is back")

    def _say_hello_again(self) -> None:
        if not self.declarations:
            self.breaker.close()  # nothing to probe with: the next request finds out
        self.breaker.probe()
        self.declarations.start_over()
        self._refresh()

    def _refresh(self) -> None:
        self.ready = (
            self.connected
            and self.breaker.state is BreakerState.CLOSED
            and all(declaration.is_welcome for declaration in self.declarations)
        )
