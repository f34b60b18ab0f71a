"""Puts: one caller's put as a state machine, and the steps of puts that all transports share.

A put is cut into batches. The window bounds the bytes sent and not acknowledged, over all puts. A
put is settled when every batch has its reply, or when it is given up.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from weakref import ref

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.connection import Connection
from remote_server.client.connection.limits import Limits
from remote_server.client.results import Op, PutResult, resolve
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    RemoteProtocolError,
    RequestRefused,
)

# Counts of a Stored reply, which a PutResult sums up.
_COUNTS = ("total", "created", "existed", "forced", "duplicate")

_OUTCOMES = tuple(protocol.PutOutcome)  # in the order of their values, from 0


class PutState(Enum):
    """State of a put. Each may be followed by one below it in the list, and by no other.

    SUBMITTED ──▶ PREPARED ──▶ SENT ──▶ RELEASING ──▶ ANSWERED or FAILED
    """

    SUBMITTED = auto()  # no channel has taken it over
    PREPARED = auto()  # cut into batches, of which none was sent
    SENT = auto()  # a batch was sent; others may wait for space in the window
    RELEASING = auto()  # over tcp: no reply is awaited, and libzmq or a lane reads rows
    ANSWERED = auto()  # ended: every batch has its reply
    FAILED = auto()  # ended: refused, late or given up; `PutTransfer.error` has the reason


@dataclass(slots=True, eq=False)
class PutTransfer:
    """One caller's put. Its rows are ours to read until `future` ends.

    A channel moves it from state to state; `settled` and `is_released` decide when it may end.
    """

    future: "Future[PutResult]"
    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    deferred: bool
    force: bool
    timeout_s: float
    chain: Sequence[protocol.Stretch] = ()
    """The stretches of all keys, or none."""
    deadline: float = inf
    state: PutState = PutState.SUBMITTED
    offsets: list[int] = field(default_factory=list)
    to_send: deque[range] = field(default_factory=deque)
    num_in_flight: int = 0
    lent: "list[ref[memoryview]]" = field(default_factory=list)
    """One for each row passed to libzmq or to a lane; dead when that has released the row."""
    cut_off: bool = False
    """The socket that held its rows was closed: libzmq releases them by itself."""
    outcomes: list[protocol.PutOutcome | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    declined: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    total_bytes: int = 0
    error: KVFerryError | None = None

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def ended(self) -> bool:
        """`future` has its result."""
        return self.state in (PutState.ANSWERED, PutState.FAILED)

    @property
    def settled(self) -> bool:
        """Nothing remains to be sent and no reply is awaited."""
        return not self.to_send and not self.num_in_flight

    def is_released(self) -> bool:
        """Neither libzmq nor a lane reads its rows any more."""
        self.lent = [view for view in self.lent if view() is not None]
        return not self.lent

    def enter(self, state: PutState) -> None:
        """Change its state."""
        assert state.value >= self.state.value, f"{self.state} is followed by {state}"
        self.state = state

    # ── on its way ───────────────────────────────────────────────────────────────────────

    def prepare(
        self, rows: list[memoryview], batch_bytes: int, first_bytes: int, limits: Limits
    ) -> None:
        """Cut it into batches of checked `rows`, each of about `batch_bytes` and within the
        server's limits.

        The first is about `first_bytes`, and each is twice the one before until it is a batch: the
        server begins soon, and is seldom interrupted.
        """
        self.rows = rows
        self.outcomes = [None] * len(self.keys)
        self.total_bytes = sum(row.nbytes for row in rows)
        most_bytes = min(batch_bytes, limits.max_message_bytes)
        enough = min(first_bytes or most_bytes, most_bytes)
        first = num_bytes = 0
        for index, row in enumerate(rows):
            full = num_bytes + row.nbytes > enough or index - first == limits.max_keys
            if index > first and full:
                self.to_send.append(range(first, index))
                first, num_bytes = index, 0
                enough = min(2 * enough, most_bytes)
            num_bytes += row.nbytes
        if rows:
            self.to_send.append(range(first, len(rows)))
        self.enter(PutState.PREPARED)

    def checksums(self, part: range) -> list[int]:
        """Checksums of the blocks of `part`, as their rows are now."""
        span = slice(part.start, part.stop)
        return protocol.checksums(self.namespace, self.keys[span], self.rows[span])

    def pages(self, part: range) -> list[int]:
        """Checksums of the first page of each block of `part`, as their rows are now."""
        span = slice(part.start, part.stop)
        pages = [row[: protocol.PAGE_BYTES] for row in self.rows[span]]
        return protocol.checksums(self.namespace, self.keys[span], pages)

    def lend(self, part: range) -> list[memoryview]:
        """The rows of `part` to be sent, recorded in `lent`. The caller keeps no reference.

        pyzmq keeps the only reference to each view for as long as libzmq may read it. Its own
        trackers give the same information, at the price of a lock and an event per frame.
        """
        views = [memoryview(self.rows[index]) for index in part]
        self.lent += map(ref, views)
        self.cut_off = False
        return views

    def sent(self, batch: "PutBatch") -> None:
        """The first batch of `to_send` was sent."""
        self.to_send.popleft()
        self.num_in_flight += 1
        self.bytes_sent += batch.num_bytes
        self.enter(PutState.SENT)

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def stored(self, part: range, reply: protocol.Stored) -> None:
        """Add the reply to `part`. Raises `RemoteProtocolError` when it does not fit."""
        try:
            outcomes = [_OUTCOMES[outcome] for outcome in reply.outcomes]
        except IndexError as error:
            raise RemoteProtocolError(f"a put's outcomes: {error}") from error
        counts = {name: getattr(reply, name) for name in _COUNTS}
        if len(outcomes) != len(part) or min((*counts.values(), *reply.declined.values())) < 0:
            raise RemoteProtocolError("a put's reply does not fit its request")
        self.outcomes[part.start : part.stop] = outcomes
        for name, number in counts.items():
            self.counts[name] += number
        for reason, number in reply.declined.items():
            self.declined[reason] = self.declined.get(reason, 0) + number

    def refused(self, error: KVFerryError) -> None:
        """The server refused a batch, as it would those that were not sent."""
        self.error = error
        self.to_send.clear()

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def give_up(self, error: KVFerryError) -> None:
        """Send no more. Batches in flight must have been forgotten."""
        self.to_send.clear()
        self.error = self.error or error

    def resolve(self) -> None:
        """Resolve `future`; the rows are the caller's again."""
        if self.ended:
            return
        assert not self.lent
        self.enter(PutState.FAILED if self.error else PutState.ANSWERED)
        self.rows = []
        result = PutResult(
            **self.counts, declined=self.declined, outcomes=self.outcomes,
            bytes_sent=self.bytes_sent, error=self.error,
        )  # fmt: skip
        resolve(self.future, result)

    def turn_away(self, error: KVFerryError) -> None:
        """End it before anything was sent."""
        self.error = error
        self.outcomes = [None] * len(self.keys)
        self.resolve()


@dataclass(slots=True, eq=False)
class PutBatch:
    """One message in flight."""

    transfer: PutTransfer
    part: range
    lengths: list[int]
    num_bytes: int
    cost: int
    """What it takes of the window."""
    ticket: int = -1
    """Index of the ticket that fences its rows; none over tcp."""


class PutChannel(Channel):
    """All puts of one client over one transport, oldest first."""

    wake_at = inf
    queued_bytes = 0
    bytes_per_block = 0
    """What a block takes of the window beside its own bytes."""

    def __init__(
        self, client_context: ClientContext, connection: Connection | None, most_bytes: int
    ) -> None:
        """`most_bytes` is the window."""
        super().__init__(client_context, connection)
        self._transfers: dict[PutTransfer, None] = {}
        self._releasing: dict[PutTransfer, None] = {}
        self._batches: dict[int, PutBatch] = {}
        self._window_bytes = 0
        self._most_bytes = most_bytes
        self._has_sent = False
        """The last `pump` sent a message."""

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _batch_bytes(self, rows: list[memoryview]) -> tuple[int, int]:
        """Bytes of a batch of a put of `rows`, and of its first one."""

    @abstractmethod
    def _send_batch(self, batch: PutBatch) -> int:
        """Send it and return the request's id; 0 when that must wait: nothing was sent then."""

    def _returned(self, batch: PutBatch, *, answered: bool) -> None:
        """A batch was `answered`, or given up: release what it holds."""

    def _reaches(self, transfer: PutTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a put whose rows this transport reaches."""
        if not isinstance(request, PutTransfer) or not self._reaches(request):
            return False
        try:
            rows = self._checked_rows(request, writable=False)
        except KVFerryError as error:
            self._turn_away(request, error)
            return True
        request.prepare(rows, *self._batch_bytes(rows), self._session.limits)
        if request.settled:  # without a key
            request.resolve()
            return True
        self._transfers[request] = None
        self.queued_bytes += request.total_bytes
        self.wake_at = min(self.wake_at, request.deadline)
        return True

    def pump(self, now: float) -> None:
        """Send the next message if the window allows it, oldest put first.

        One a turn: hashing a window's worth of small blocks would delay lookups.
        """
        self._has_sent = self.blocked = False
        transfer = next((one for one in self._transfers if one.to_send), None)
        if transfer is None:
            return
        part = transfer.to_send[0]
        lengths = [row.nbytes for row in transfer.rows[part.start : part.stop]]
        num_bytes = sum(lengths)
        cost = num_bytes + self.bytes_per_block * len(part)
        batch = PutBatch(transfer, part, lengths, num_bytes, cost)
        if self._batches and self._window_bytes + cost > self._most_bytes:
            return
        request_id = self._send_batch(batch)
        if not request_id:
            return
        transfer.sent(batch)
        self._batches[request_id] = batch
        self._window_bytes += cost
        self._counters["bytes_out"] += batch.num_bytes
        self._counters["blocks_out"] += len(part)
        self._has_sent = True

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""
        return request_id in self._batches

    def answered(self, reply: protocol.Reply) -> None:
        """Process the reply to a batch. Raises `RemoteProtocolError` for a wrong kind."""
        batch = self._batches.get(reply.request_id)
        if batch is None:
            self._counters["late_replies"] += 1
            return
        transfer = batch.transfer
        if isinstance(reply, protocol.Stored):
            transfer.stored(batch.part, reply)
        elif isinstance(reply, protocol.Error):
            self._counters["refused"] += 1
            if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
                self._session.forgotten(transfer.namespace)
            transfer.refused(RequestRefused(reply.code, reply.message))
        else:
            raise RemoteProtocolError(f"a put was answered with {type(reply).__name__}")
        self._session.breaker.answered()
        self._forget(reply.request_id, answered=True)
        if transfer.settled:
            self._retire(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _forget(self, request_id: int, *, answered: bool = False) -> None:
        """Remove a batch: no further reply is expected."""
        batch = self._batches.pop(request_id)
        batch.transfer.num_in_flight -= 1
        self._window_bytes -= batch.cost
        self._returned(batch, answered=answered)

    def _retire(self, transfer: PutTransfer) -> None:
        """End a settled put now, or as soon as libzmq has released its rows."""
        del self._transfers[transfer]
        if transfer.is_released():
            self._finish(transfer)
        else:
            transfer.enter(PutState.RELEASING)
            self._releasing[transfer] = None

    def _finish(self, transfer: PutTransfer) -> None:
        self.queued_bytes -= transfer.total_bytes
        transfer.resolve()

    def _give_up(self, transfers: list[PutTransfer], error: KVFerryError) -> None:
        given_up = set(transfers)
        for request_id, batch in list(self._batches.items()):
            if batch.transfer in given_up:
                self._forget(request_id)
        for transfer in transfers:
            transfer.give_up(error)
            self._retire(transfer)

    def expire(self, now: float) -> None:
        """End the puts whose rows libzmq has released, and give up those that are late."""
        for transfer in [transfer for transfer in self._releasing if transfer.is_released()]:
            del self._releasing[transfer]
            self._finish(transfer)
        if now < self.wake_at:
            return
        late = [transfer for transfer in self._transfers if transfer.deadline <= now]
        for transfer in late:
            self._counters[Op.PUT.timeouts] += 1
            if transfer.num_in_flight:
                self._session.timed_out(now, transfer.timeout_s)
        self._give_up(late, DeadlineExceeded("no answer to put in time"))
        deadlines = (transfer.deadline for transfer in self._waiting)
        self.wake_at = min((deadline for deadline in deadlines if deadline > now), default=inf)

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put."""
        self._give_up(list(self._transfers), error)

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def has_more(self) -> bool:
        """The window may have room for another message."""
        return self._has_sent and any(transfer.to_send for transfer in self._transfers)

    @property
    def _waiting(self) -> list[PutTransfer]:
        """The puts that have not ended."""
        return [*self._transfers, *self._releasing]

    @property
    def releasing(self) -> Sequence[PutTransfer]:
        return [*self._releasing]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def needs_connection(self) -> bool:
        return bool(self._transfers or self._releasing)

    def check(self) -> None:
        """Assert that window and sums equal the batches, and that each put is where it belongs."""
        assert self._window_bytes == sum(batch.cost for batch in self._batches.values())
        assert self.queued_bytes == sum(transfer.total_bytes for transfer in self._waiting)
        assert sum(transfer.num_in_flight for transfer in self._waiting) == len(self._batches)
        assert not any(transfer.settled for transfer in self._transfers), "a settled put is listed"
        assert all(transfer.settled for transfer in self._releasing), "it is not settled"
        assert {one.state for one in self._transfers} <= {PutState.PREPARED, PutState.SENT}
        assert {one.state for one in self._releasing} <= {PutState.RELEASING}
