"""Channel: the interface of all that carries requests, and the checks that a request must pass."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from operator import attrgetter
from typing import Protocol

import zmq

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.connection import Connection
from remote_server.client.connection.poll_set import PollSet
from remote_server.client.connection.session import Declaration, Session
from remote_server.client.results import Counters, LaneState
from remote_server.errors import (
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerUnavailable,
)
from remote_server.keys import ClientKeys

logger = logging.getLogger(__name__)

# Messages processed before the other connections get their turn.
TURN_MESSAGES = 64


class Request(Protocol):
    """One call of a caller, on its way to a channel and then in it."""

    timeout_s: float
    """Counts from when the I/O thread takes it over."""
    deadline: float

    @property
    def ended(self) -> bool:
        """Its future has a result."""

    def turn_away(self, error: KVFerryError) -> None:
        """End it, unless it has ended: no channel has taken it over."""


class Transfer(Request, Protocol):
    """A request with rows."""

    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    offsets: list[int]
    """Offsets of its rows in the registered region; empty over tcp."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientContext:
    """One for each client, used by its I/O thread."""

    config: ClientConfig
    session: Session
    counters: Counters
    clock: Callable[[], float]
    zmq_context: "zmq.Context[zmq.Socket[bytes]]"
    poll_set: PollSet
    keys: ClientKeys | None

    on_reply: Callable[[protocol.Reply], bool]
    """Whether to process a reply that has come."""

    verify: Callable[[str, list[bytes]], None]
    """Makes the server verify its copies of these keys of a namespace, which came out wrong."""

    next_request_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    def connect(
        self, *, brings_blocks: bool = False, for_transfers: bool = True, for_lanes: bool = False
    ) -> Connection:
        """A new connection. `brings_blocks`: replies have payload frames. `for_transfers`: on
        demand, if the client is configured so; `for_lanes`: always on demand, and it knows the
        address of its peer. Raises as `Connection` does."""
        on_demand = for_lanes or (for_transfers and self.config.idle_close_s is not None)
        connection = Connection(
            self.zmq_context, self.poll_set, self.config, self.clock, self.keys,
            brings_blocks=brings_blocks, on_demand=on_demand,
        )  # fmt: skip
        connection.names_peer = for_lanes
        return connection


class Channel(ABC):
    """Requests of one kind over one transport. The I/O thread alone uses it, except for `ready`,
    `region_transport`, `lane_state` and `queued_bytes`, which any thread may read.

    The loop calls in each turn: `offer` for new requests, and for all channels that have something
    to do, `receive`, `notice_changes`, `expire`, `pump`. A request that `offer` has taken ends
    exactly once, at the latest in `end_all`.
    """

    name: str
    """For errors and the log."""

    blocked = False
    """The connection refused a message, which no event takes back: poll again shortly."""

    def __init__(self, client_context: ClientContext, connection: Connection | None = None) -> None:
        """`connection` belongs to this channel alone; None when it uses another channel's."""
        self.connection = connection
        self._session = client_context.session
        self._config = client_context.config
        self._counters = client_context.counters
        self._next_request_id = client_context.next_request_id
        self._on_reply = client_context.on_reply

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        """Requests that come now can be sent, or a moment later."""
        one = self.connection
        return one is None or one.on_demand or one.connected or one.opening

    @property
    def region_transport(self) -> str:
        """Transport of rows in the registered region, if this channel carries them now."""
        return ""

    @property
    def lane_state(self) -> LaneState | None:
        """The state of the client's lanes, if they are this channel's. Any thread may read it."""
        return None

    @property
    def wake_at(self) -> float:
        """Time at which something of it may be late or due."""
        return inf

    @property
    def has_more(self) -> bool:
        """The next turn has work, whether or not anything comes."""
        return False

    @property
    def can_step(self) -> bool:
        """`step` has work that needs no other part of a turn."""
        return False

    @property
    def releasing(self) -> Sequence[Request]:
        """Puts that have all replies, or none to come, and wait for libzmq to release their rows,
        which no event reports."""
        return ()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all its transfers that have not ended."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Requests that callers wait for."""
        return 0

    @property
    def needs_connection(self) -> bool:
        """Something is to be sent or expected."""
        return self.num_waiting > 0

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def wakes(self, now: float, readable: Container[object]) -> bool:
        """Whether it has something to do in this turn. Most channels rest most of the time, and a
        call from cold caches that does nothing costs a microsecond: a lookup costs the I/O thread
        0.28 ms, and 0.52 with calls of every channel. The loop calls it after `receive` of the
        channels before it, so that it sees what these have received."""
        one = self.connection
        return (one is not None and one.wakes(now)) or self.needs_connection or self.wake_at <= now

    @abstractmethod
    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is one for this channel. It ends at once when it cannot be
        sent. False: another channel's."""

    def receive(self, now: float, readable: Container[object]) -> None:  # noqa: B027
        """Process what has come; `readable` has the sockets with something to receive."""

    def notice_changes(self, now: float) -> None:
        """End the requests of a connection that broke, and replace one that is stuck."""
        if self.connection is None:
            return
        if False in self.connection.changes(now):
            self._counters["disconnects"] += 1
            self.lost()
        self._replace_if_stuck(now)

    def expire(self, now: float) -> None:  # noqa: B027
        """End what is late, and the puts whose rows libzmq has released."""

    def pump(self, now: float) -> None:  # noqa: B027
        """Send what connection and window allow."""

    def step(self) -> None:  # noqa: B027
        """Do a bounded part of the work of `can_step`."""

    def region_registered(self) -> None:  # noqa: B027
        """A region was registered, and the channels for its rows are open."""

    def keep_connection(self, now: float) -> None:
        """Open a connection on demand that is needed, and close one that has been idle for long."""
        if self.connection is not None:
            self.connection.keep(now, in_use=self.needs_connection)

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def end_all(self, error: KVFerryError) -> None:
        """End every request, as unavailable; only those of `releasing` may end later."""

    def cancel_all(self, error: KVFerryError) -> None:
        """End every request that a caller waits for, as late."""
        self.end_all(error)

    def lost(self) -> None:
        """End every request: the connection broke, and no reply will come."""
        self.end_all(ServerUnavailable(f"the connection for {self.name} broke"))

    def restarted(self, now: float) -> None:  # noqa: B027
        """The server restarted, and all requests of all channels have ended: keep late replies to
        them from being processed."""

    def reset(self) -> None:
        """Start anew, on a new connection. All requests have ended."""
        if self.connection is not None:
            self.connection.reopen()

    def close(self) -> None:
        """Release everything. All requests have ended, except those of `releasing`."""
        if self.connection is not None:
            self.connection.close()

    def check(self) -> None:  # noqa: B027
        """Assert that the books balance."""

    # ── for its subclasses ───────────────────────────────────────────────────────────────

    def _declaration_of(self, namespace: str) -> Declaration:
        """Raises `LocalProtocolError` when `namespace` was never declared."""
        try:
            return self._session.declarations[namespace]
        except (KeyError, TypeError):
            raise LocalProtocolError(f"namespace {namespace!r} was not declared") from None

    def _checked_rows(self, transfer: Transfer, *, writable: bool) -> list[memoryview]:
        """The rows of `transfer`, which can begin now. Raises `LocalProtocolError` when they cannot
        be transferred at all, `ServerUnavailable` when there is no way now."""
        declaration = self._declaration_of(transfer.namespace)
        block_bytes = declaration.block_bytes
        rows = check_rows(transfer.keys, transfer.rows, block_bytes, writable=writable)
        self._session.require(declaration)
        self._require_way()
        return rows

    def _turn_away(self, request: Request, error: KVFerryError) -> None:
        """End a request that cannot begin."""
        local = isinstance(error, LocalProtocolError)
        self._counters["local_errors" if local else "unavailable"] += 1
        # A traceback would keep the locals of its frames alive, a caller's rows among them.
        request.turn_away(error.with_traceback(None))

    def _require_way(self) -> None:
        """Raises `ServerUnavailable` when what comes now cannot be sent."""
        one = self.connection
        if one is not None and not one.demand():
            raise ServerUnavailable(f"the connection for {self.name} is down")

    def _replace_if_stuck(self, now: float) -> None:
        one = self.connection
        if one is not None and one.due_at <= now and not one.on_demand:
            one.reopen()

    def _read_replies(self, take: Callable[[protocol.Reply], None]) -> None:
        """Pass the current server's replies, none with a payload, to `take`, which may raise
        `RemoteProtocolError`."""
        assert self.connection is not None
        for _ in range(TURN_MESSAGES):
            try:
                reply = self.connection.receive()
                if reply is None:
                    return
                if self.connection.discard_rest():
                    raise RemoteProtocolError(f"a {type(reply).__name__} came with a payload")
                if self._on_reply(reply):
                    take(reply)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("%s: %s", self.name, error)


def check_keys(keys: Sequence[bytes]) -> int:
    """The length of all keys, or 0 where they differ. Raises `LocalProtocolError` when the protocol
    cannot carry one of `keys`."""
    # Two passes over all in C: most requests have keys of one length. A list counts the identical
    # objects of such passes faster than a set takes them in.
    if [*map(type, keys)].count(bytes) == len(keys) > 0:
        lengths, first = [*map(len, keys)], len(keys[0])
        if 0 < first <= protocol.MAX_KEY_BYTES and lengths.count(first) == len(keys):
            return first
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or not 0 < len(key) <= protocol.MAX_KEY_BYTES:
            raise LocalProtocolError(
                f"key {number} is not 1 to {protocol.MAX_KEY_BYTES} bytes: {key!r:.80}"
            )
    return 0


def check_namespace(namespace: str) -> None:
    """Raise `LocalProtocolError` when the protocol cannot carry `namespace`."""
    try:
        fits = 0 < len(namespace) <= protocol.MAX_NAMESPACE_CHARS
        namespace.encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"namespace {namespace!r:.80}: {error}") from error
    if not fits:
        raise LocalProtocolError(
            f"namespace {namespace!r:.80} must be 1 to {protocol.MAX_NAMESPACE_CHARS} characters"
        )


def check_rows(
    keys: Sequence[bytes], rows: Sequence[memoryview], block_bytes: int, *, writable: bool
) -> list[memoryview]:
    """`rows` as flat byte views of our own, which a caller cannot release. Raises
    `LocalProtocolError` when they cannot be transferred."""
    check_keys(keys)
    if len(keys) != len(rows):
        raise LocalProtocolError(f"{len(keys)} keys with {len(rows)} rows")
    if _are_flat(rows, block_bytes, writable=writable):
        return [memoryview(row) for row in rows]
    flat = []
    for number, row in enumerate(rows):
        try:
            view = memoryview(row).cast("B")
        except (TypeError, ValueError) as error:
            raise LocalProtocolError(f"row {number} is not contiguous bytes: {error}") from error
        if not 0 < view.nbytes <= block_bytes:
            raise LocalProtocolError(
                f"row {number} holds {view.nbytes} bytes, declared were 1 to {block_bytes}"
            )
        if writable and view.readonly:
            raise LocalProtocolError(f"row {number} cannot be written")
        flat.append(view)
    return flat


_shape = attrgetter("format", "ndim", "c_contiguous", "readonly")
_WRITABLE, _READ_ONLY = ("B", 1, True, False), ("B", 1, True, True)


def _are_flat(rows: Sequence[memoryview], block_bytes: int, *, writable: bool) -> bool:
    """Whether all rows can be transferred as they are. Checks each in C."""
    if not {*map(type, rows)} <= {memoryview}:
        return False
    try:
        shapes = {*map(_shape, rows)}
        sizes = {row.nbytes for row in rows}
    except ValueError:  # one of them has been released
        return False
    fit = shapes <= ({_WRITABLE} if writable else {_WRITABLE, _READ_ONLY})
    return fit and (not sizes or 0 < min(sizes) <= max(sizes) <= block_bytes)
