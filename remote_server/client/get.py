"""One caller's get as a state machine: its blocks, their outcomes, and its timestamps."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf

from remote_server import protocol
from remote_server.client.results import GetOutcome, GetResult, GetTimes, resolve
from remote_server.errors import KVFerryError, without_frames


class GetStopwatch:
    """Timestamps of one get. `RemoteClient.get` makes it; then only the I/O thread uses it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._began = clock()
        self._sent: dict[int, float] = {}
        self._landing_s: dict[int, float] = {}
        self.times: GetTimes | None = None
        """None until a message with the server's times has come."""

    def sending(self, request_id: int) -> None:
        """Record that a batch goes to ZeroMQ. Call it before the send: the server may have the
        batch before this thread runs again."""
        self._sent[request_id] = self.clock()

    def landed(self, reply: protocol.Got | protocol.Blocks, came: float) -> None:
        """Record that `reply`, whose header was read at `came`, has been processed."""
        now, sent = self.clock(), self._sent.get(reply.request_id)
        if sent is None:
            return
        before_s = self._landing_s.get(reply.request_id, 0.0)
        self._landing_s[reply.request_id] = before_s + now - came
        if reply.server_us:
            self.times = self._split(sent, came, now, before_s, reply)

    def _split(
        self, sent: float, came: float, now: float, before_s: float,
        reply: protocol.Got | protocol.Blocks,
    ) -> GetTimes:  # fmt: skip
        """The path of one message is the request's, the server's time, and its own way back. The
        message may have waited here while earlier blocks landed, `before_s` in all."""
        server_s = min(reply.server_us / 1e6, came - sent)
        storage_s = min(reply.storage_us / 1e6, server_s)
        on_the_way_s = came - sent - server_s
        waited_s = min(before_s, on_the_way_s)
        return GetTimes(
            began=self._began, ended=now, serialize_s=sent - self._began,
            network_s=on_the_way_s - waited_s, server_s=server_s - storage_s, storage_s=storage_s,
            deserialize_s=waited_s + now - came,
        )  # fmt: skip


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
    """Counts from when the I/O thread takes it over."""
    deadline: float = inf
    state: GetState = GetState.SUBMITTED
    stopwatch: GetStopwatch | None = None
    """Present for a `timed` get."""
    offsets: list[int] = field(default_factory=list)
    """Offsets of its rows in the registered region; empty over tcp."""
    order: int = 0
    """Position among all gets; an earlier get comes first on the wire."""
    progress: float = 0.0
    """Time at which a byte last came for it, or for a get before it."""
    to_ask: deque[int] = field(default_factory=deque)
    twins: dict[int, list[int]] = field(default_factory=dict)
    """Further indices of the same key: copied from the first one's row once that has landed."""
    outcomes: list[GetOutcome | None] = field(default_factory=list)
    num_open: int = 0
    num_asked: int = 0
    bytes: int = 0
    total_bytes: int = 0
    error: KVFerryError | None = None
    ended: bool = False
    """`future` has its result. Stored, because it is read for each block."""

    def _enter(self, state: GetState) -> None:
        assert state.value >= self.state.value, f"{self.state} is followed by {state}"
        self.state = state

    # ── on its way ───────────────────────────────────────────────────────────────────────

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

    def request_again(self, indices: list[int]) -> None:
        """These blocks were lost with their connection. Call it for the newest batch first."""
        self.to_ask.extendleft(reversed(indices))

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
        self.error = without_frames(self.error or error)
        self._enter(GetState.FAILED if self.error else GetState.LANDED)
        outcomes = [known or outcome for known in self.outcomes or [None] * len(self.keys)]
        landed = [i for i, known in enumerate(outcomes) if known is GetOutcome.HIT]
        self.to_ask.clear()
        self.rows = []
        times = None if self.stopwatch is None else self.stopwatch.times
        resolve(self.future, GetResult(landed, outcomes, self.bytes, self.error, times))

    def check(self, asked: list[int]) -> None:
        """Assert that every block without an outcome is in `asked`, once, or in `to_ask`."""
        waiting = {index for index, outcome in enumerate(self.outcomes) if outcome is None}
        firsts = sorted(waiting.difference(*self.twins.values()))
        assert sorted([*asked, *self.to_ask]) == firsts, "a block lost or requested twice"
