"""Puts: one caller's put as a state machine."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from weakref import ref

from remote_server import protocol
from remote_server.client.connection.limits import Limits
from remote_server.client.results import PutResult, resolve
from remote_server.errors import (
    KVFerryError,
    RemoteProtocolError,
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

    def prepare(self, rows: list[memoryview], batch_bytes: int, limits: Limits) -> None:
        """Cut it into batches of checked `rows`, each of about `batch_bytes` and within the
        server's limits."""
        self.rows = rows
        self.outcomes = [None] * len(self.keys)
        self.total_bytes = sum(row.nbytes for row in rows)
        most_bytes = min(batch_bytes, limits.max_message_bytes)
        first = num_bytes = 0
        for index, row in enumerate(rows):
            full = num_bytes + row.nbytes > most_bytes or index - first == limits.max_keys
            if index > first and full:
                self.to_send.append(range(first, index))
                first, num_bytes = index, 0
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
    ticket: int = -1
    """Index of the ticket that fences its rows; none over tcp."""
