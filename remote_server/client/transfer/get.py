"""Gets: one caller's get as a state machine."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import NamedTuple

from remote_server.client.results import GetOutcome, GetResult, GetStopwatch, resolve
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    Stalled,
)
from remote_server.protocol import MAX_AHEAD_KEYS


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


class Ahead(NamedTuple):
    """What one request names ahead of it, and the sizes of these blocks."""

    keys: list[bytes]
    sizes: list[int]


class NamedAhead:
    """The blocks of one get that the server knows of and that were not requested yet: always the
    next ones. Each is named once."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()

    def next(self, number: int, blocks: Iterator[tuple[bytes, int]], most_bytes: int) -> Ahead:
        """What a request of the next `number` blocks can name, so that the server knows of
        `most_bytes` behind them. `blocks` are the keys and sizes of all that remain."""
        room = most_bytes - sum(islice(self._sizes, number, None))
        ahead = Ahead([], [])
        for key, size in islice(blocks, max(number, len(self._sizes)), None):
            room -= size
            if room < 0 or len(ahead.keys) == MAX_AHEAD_KEYS:
                break
            ahead.keys.append(key)
            ahead.sizes.append(size)
        return ahead

    def sent(self, number: int, ahead: Ahead) -> None:
        """The request of the next `number` blocks was sent, and named `ahead`."""
        for _ in range(min(number, len(self._sizes))):
            self._sizes.popleft()
        self._sizes += ahead.sizes


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
