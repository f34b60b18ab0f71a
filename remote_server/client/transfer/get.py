"""Gets: one caller's get as a state machine, their queue, and the steps of all transports."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import Generic, Protocol, TypeVar

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.connection import Connection
from remote_server.client.results import GetOutcome, GetResult, GetStopwatch, Op, resolve
from remote_server.client.transfer.get_queue import Ahead, GetQueue, NamedAhead
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RequestRefused,
    Stalled,
)


class GetState(Enum):
    """State of a get. Each may be followed by one below it in the list, and by no other.

    SUBMITTED ──▶ PREPARED ──▶ REQUESTED ──▶ STREAMING ──▶ LANDED or FAILED
    """

    SUBMITTED = auto()  # no channel has taken it over
    PREPARED = auto()  # queued; nothing was requested
    REQUESTED = auto()  # a batch was requested, without a reply; others may wait for the window
    STREAMING = auto()  # a reply came: blocks are received or copied
    LANDED = auto()  # ended: the server's replies decided every block
    FAILED = auto()  # ended early: refused, late or lost; `GetTransfer.error` has the reason


@dataclass(slots=True, eq=False)
class GetTransfer:
    """One caller's get. Its rows are ours to write until `future` ends.

    A channel moves it from state to state; without `num_open` blocks it ends.
    """

    future: "Future[GetResult]"
    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    stall_s: float
    timeout_s: float
    worth_s: float = 0.0
    """The time that its blocks are worth, 0 for any; see `RemoteClient.get`."""
    deadline: float = inf
    state: GetState = GetState.SUBMITTED
    stopwatch: GetStopwatch | None = None
    """Present for a `timed` get."""
    offsets: list[int] = field(default_factory=list)
    order: int = 0
    """Position among all gets; an earlier get comes first on the wire."""
    progress: float = 0.0
    """Time at which a byte last came for it, or for a get before it."""
    behind_s: float = 0.0
    """How far it was behind its worth at that time."""
    arriving: int = 0
    """Bytes that have come of blocks which are not settled."""
    repaid: int = 0
    """Bytes whose worth was taken off `behind_s`."""
    to_ask: deque[int] = field(default_factory=deque)
    twins: dict[int, list[int]] = field(default_factory=dict)
    """Further indices of the same key: copied from the first one's row once that has landed."""
    outcomes: list[GetOutcome | None] = field(default_factory=list)
    num_open: int = 0
    num_asked: int = 0
    named: NamedAhead = field(default_factory=NamedAhead)
    bytes: int = 0
    total_bytes: int = 0
    hot: set[int] = field(default_factory=set)
    error: KVFerryError | None = None
    ended: bool = False
    """`future` has its result. Stored, because it is read for each block."""

    def _enter(self, state: GetState) -> None:
        assert state.value >= self.state.value, f"{self.state} is followed by {state}"
        self.state = state

    # ── on its way ───────────────────────────────────────────────────────────────────────

    def progressed(self, since: float, now: float) -> None:
        """Something came at `now`, and nothing between `since` and then.

        Time puts a get behind, and each byte makes up for its share of `worth_s`, but for no time
        that is still to come: a fast beginning buys no patience. That is the cumulative sum of
        Page, "Continuous inspection schemes" (Biometrika 1954), with a lower bound of zero.
        """
        if self.worth_s:
            came = self.bytes + self.arriving
            made_up = max(0, came - self.repaid) / max(1, self.total_bytes) * self.worth_s
            self.behind_s = max(0.0, self.behind_s + max(0.0, now - since) - made_up)
            self.repaid = max(came, self.repaid)
        self.progress = now

    def stalled(self) -> tuple[GetOutcome, DeadlineExceeded]:
        """The outcome of what has not come when its patience has ended, and why."""
        if not self.behind_s:
            return GetOutcome.LATE, Stalled(f"get: nothing came for {self.stall_s:.3g} s")
        came = f"{self.bytes:,} of {self.total_bytes:,} bytes came"
        why = f"get: {came}, {self.stall_s:.3g} s later than they are worth"
        return GetOutcome.SLOW, DeadlineExceeded(why)

    @property
    def patience_s(self) -> float:
        """How long it waits, from `progress` on, for something to come."""
        return self.stall_s - self.behind_s

    def prepare(self, rows: list[memoryview]) -> None:
        """Start with checked `rows` and nothing requested yet."""
        self.rows = rows
        self.total_bytes = sum(row.nbytes for row in rows)
        self.outcomes = [None] * len(self.keys)
        self.num_open = len(self.keys)
        first_of: dict[bytes, int] = {}
        for index, key in enumerate(self.keys):
            first = first_of.setdefault(key, index)
            if first == index:
                self.to_ask.append(index)
            else:
                self.twins.setdefault(first, []).append(index)
        self._enter(GetState.PREPARED)

    def next_blocks(self, most_bytes: int, most_blocks: int) -> tuple[list[int], int]:
        """Indices of the next batch, at least one block of `to_ask`, and its size in bytes."""
        indices: list[int] = []
        num_bytes = 0
        for index in islice(self.to_ask, most_blocks):
            size = self.rows[index].nbytes
            if indices and num_bytes + size > most_bytes:
                break
            indices.append(index)
            num_bytes += size
        return indices, num_bytes

    def requested(self, number: int) -> None:
        """The first `number` blocks of `to_ask` were requested."""
        for _ in range(number):
            self.to_ask.popleft()
        self.num_asked += number
        if self.state is GetState.PREPARED:
            self._enter(GetState.REQUESTED)

    def mark_hot(self, hot: Sequence[int], indices: Sequence[int]) -> None:
        """Record the hot keys of a batch, which are positions in its `indices`."""
        self.hot.update(indices[at] for at in hot if at < len(indices))

    def replied(self) -> None:
        """A reply of the server came for it."""
        if self.state is GetState.REQUESTED:
            self._enter(GetState.STREAMING)

    # ── outcomes ─────────────────────────────────────────────────────────────────────────

    def settle(self, index: int, outcome: GetOutcome) -> None:
        """Record one key's outcome, also for the other indices of the same key."""
        row = self.rows[index]
        for twin in (index, *self.twins.get(index, ())):
            fate = outcome
            if fate is GetOutcome.HIT and twin != index:
                if self.rows[twin].nbytes == row.nbytes:
                    self.rows[twin][:] = row
                else:
                    fate = GetOutcome.CORRUPT
            if fate is GetOutcome.HIT:
                self.bytes += row.nbytes
            self.outcomes[twin] = fate
            self.num_open -= 1

    def settle_hits(self, indices: Sequence[int], num_bytes: int) -> None:
        """`settle` as HIT, for many: `num_bytes` is the sum of their rows."""
        if self.twins:
            for index in indices:
                self.settle(index, GetOutcome.HIT)
            return
        hit, outcomes = GetOutcome.HIT, self.outcomes
        for index in indices:
            outcomes[index] = hit
        self.num_open -= len(indices)
        self.bytes += num_bytes

    def refused(self, error: KVFerryError, indices: Sequence[int]) -> None:
        """The server refused a batch, of which `indices` have no outcome yet. It would refuse the
        rest as well: request no more of it."""
        self.error = error
        for index in (*indices, *self.to_ask):
            self.settle(index, GetOutcome.REFUSED)
        self.to_ask.clear()

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def end(self, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """Resolve `future` and give the rows back. Keys without an outcome get `outcome`."""
        if self.ended:
            return
        self.ended = True
        self.error = self.error or error
        self._enter(GetState.FAILED if self.error else GetState.LANDED)
        outcomes = [known or outcome for known in self.outcomes or [None] * len(self.keys)]
        landed = [i for i, known in enumerate(outcomes) if known is GetOutcome.HIT]
        self.to_ask.clear()
        self.rows = []
        times = None if self.stopwatch is None else self.stopwatch.times
        hot = sorted(self.hot)
        resolve(self.future, GetResult(landed, outcomes, self.bytes, self.error, times, hot=hot))

    def turn_away(self, error: KVFerryError) -> None:
        local = isinstance(error, LocalProtocolError)
        self.end(error, GetOutcome.REFUSED if local else GetOutcome.UNAVAILABLE)

    def check(self, asked: list[int]) -> None:
        """Assert that every block without an outcome is in `asked`, once, or in `to_ask`."""
        waiting = {index for index, outcome in enumerate(self.outcomes) if outcome is None}
        firsts = sorted(waiting.difference(*self.twins.values()))
        assert sorted([*asked, *self.to_ask]) == firsts, "a block lost or requested twice"


# Silence after which the share of the window that ended gets still hold is taken back.
ABANDON_S = 1.0


@dataclass(slots=True, eq=False)
class Batch:
    """One message that requests blocks of a get."""

    transfer: GetTransfer
    indices: list[int]


class Window(Protocol):
    """The blocks requested and not received, over all gets."""

    @property
    def batches(self) -> Mapping[int, Batch]: ...

    def check(self, transfers: Iterable[GetTransfer]) -> None: ...


AnyWindow = TypeVar("AnyWindow", bound=Window)


class GetChannel(Channel, Generic[AnyWindow]):
    """All gets of one client over one transport, oldest first."""

    wake_at = inf

    def __init__(
        self, client_context: ClientContext, connection: Connection | None, window: AnyWindow
    ) -> None:
        super().__init__(client_context, connection)
        self._window: AnyWindow = window
        self._clock = client_context.clock
        self._queue = GetQueue()
        self._last_reply_at = 0.0
        self._was_opening = False

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request the next blocks of `to_ask` and return them; none when that must wait."""

    @abstractmethod
    def _take_back(self) -> None:
        """Release the share of the window that ended gets hold: its blocks will never come."""

    @property
    def _opening(self) -> bool:
        """Its connection is being opened on demand."""
        one = self.connection
        return one is not None and one.on_demand and one.opening

    def _reaches(self, transfer: GetTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a get whose rows this transport reaches."""
        if not isinstance(request, GetTransfer) or not self._reaches(request):
            return False
        try:
            request.prepare(self._checked_rows(request, writable=True))
        except KVFerryError as error:
            self._turn_away(request, error)
        else:
            self._queue.add(request, now)
            self.wake_at = min(self.wake_at, request.deadline, now + request.stall_s)
            self._end_if_settled(request)  # without a key
        return True

    def pump(self, now: float) -> None:
        """Request as much as the window allows, oldest get first."""
        self.blocked = False
        for transfer in self._queue:
            while transfer.to_ask:
                silent = not self._window.batches
                num_asked = len(self._ask_next(transfer))
                if not num_asked:
                    return
                if silent:
                    self._last_reply_at = now  # silence counts from here
                transfer.requested(num_asked)

    def _ahead(self, transfer: GetTransfer, number: int) -> tuple[Ahead, int]:
        """What the request of the next `number` blocks names ahead of it, and the milliseconds that
        its get has left. Nothing and 0 for a server that does not read ahead."""
        most_bytes = self._session.limits.ahead_bytes
        if not most_bytes:
            return Ahead([], []), 0
        blocks = ((transfer.keys[i], transfer.rows[i].nbytes) for i in transfer.to_ask)
        left_s = transfer.deadline - self._clock()
        ahead = transfer.named.next(number, blocks, most_bytes)
        return ahead, 0 if left_s == inf else max(1, round(1000 * left_s))

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def _refused(
        self, transfer: GetTransfer, reply: protocol.Error, indices: Sequence[int] = ()
    ) -> None:
        """The server refused a batch, of which `indices` have no outcome yet."""
        if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
            self._session.forgotten(transfer.namespace)
        if transfer.ended:
            return
        self._counters["refused"] += 1
        transfer.refused(RequestRefused(reply.code, reply.message), indices)

    def _answered(self, transfer: GetTransfer, now: float) -> None:
        """Record progress after a reply, and end the get when every block is settled."""
        self._session.breaker.answered()
        transfer.replied()
        self._queue.progressed(transfer, now)
        self._end_if_settled(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _end_if_settled(self, transfer: GetTransfer) -> None:
        if not transfer.ended and not transfer.num_open:
            self._end(transfer, None, GetOutcome.MISS)

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """End it with the blocks that have landed; every other key gets `outcome`."""
        self._queue.remove(transfer)
        transfer.end(error, outcome)

    def expire(self, now: float) -> None:
        """End the late gets, and take back the window's share of blocks that will never come."""
        was_opening, self._was_opening = self._was_opening, self._opening
        if was_opening or self._was_opening:
            self._queue.wait_anew(now)  # a stall does not count the time to connect
        if now < self.wake_at:
            return
        for transfer, since, stalls_at in self._queue.stall_times():
            stalled = stalls_at <= now
            if not stalled and transfer.deadline > now:
                continue
            self._counters[Op.GET.timeouts] += 1
            if transfer.num_asked and stalled:
                self._session.timed_out(now, now - since)
            outcome, error = GetOutcome.LATE, DeadlineExceeded("get: deadline passed")
            if stalled:
                outcome, error = transfer.stalled()
            self._end(transfer, error, outcome)
        if self.has_leftovers and self._last_reply_at + ABANDON_S <= now:
            self._take_back()
        self._set_wake_at()

    def _set_wake_at(self) -> None:
        self.wake_at = self._queue.wake_at()
        if self.has_leftovers:
            self.wake_at = min(self.wake_at, self._last_reply_at + ABANDON_S)

    def cancel_all(self, error: KVFerryError) -> None:
        self.end_all(error, GetOutcome.LATE)

    def end_all(self, error: KVFerryError, outcome: GetOutcome = GetOutcome.UNAVAILABLE) -> None:
        """End every get. Blocks still on their way are discarded when they come."""
        for transfer in self._queue:
            self._end(transfer, error, outcome)
        self._set_wake_at()

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        return self._queue.num_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def needs_connection(self) -> bool:
        return bool(self._queue or self._window.batches)

    @property
    def has_leftovers(self) -> bool:
        """Blocks that ended gets had requested are still on their way."""
        return any(batch.transfer.ended for batch in self._window.batches.values())

    def check(self) -> None:
        """Assert that no get here has ended and that every open block is in exactly one place."""
        assert self._queue.num_bytes == sum(get.total_bytes for get in self._queue)
        for get in self._queue:
            assert not get.ended, "an ended get is still listed"
            assert (get.state is GetState.PREPARED) == (not get.num_asked), get.state
        self._window.check(self._queue)
