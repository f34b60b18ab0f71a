"""Gets on their way: the callers' transfers, the batches asked for them, and the window.

The window counts what was asked for and has not come, over all gets. A batch whose get has
ended keeps its share until its bytes have come: they are still on the wire, whoever wants them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from remote_server.client.get_times import GetStopwatch
from remote_server.client.results import ClientConfig, GetOutcome, GetResult, resolve
from remote_server.errors import KVFerryError, without_frames


@dataclass(slots=True, eq=False)
class GetTransfer:
    """One caller's get. Its rows are ours to write until `future` ends."""

    future: "Future[GetResult]"
    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    stall_s: float
    timeout_s: float
    """From when the I/O thread takes it over."""
    deadline: float = inf

    stopwatch: GetStopwatch | None = None
    """Of a `timed` get."""
    offsets: list[int] = field(default_factory=list)
    """Where its rows begin in the registered region; empty when they come over tcp."""
    order: int = 0
    """Position among all gets; whoever was asked earlier comes first on the wire."""
    progress: float = 0.0
    """When a byte last came for it, or for a get asked before it."""
    to_ask: deque[int] = field(default_factory=deque)
    twins: dict[int, list[int]] = field(default_factory=dict)
    """The same key asked again: filled from the first one's row once that has landed."""
    outcomes: list[GetOutcome | None] = field(default_factory=list)
    num_open: int = 0
    num_asked: int = 0
    bytes: int = 0
    total_bytes: int = 0
    error: KVFerryError | None = None
    ended: bool = False

    def prepare(self, rows: list[memoryview]) -> None:
        """Set out with `rows` checked and nothing asked yet."""
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

    def next_blocks(self, most_bytes: int, most_blocks: int) -> tuple[list[int], int]:
        """What to ask for next, at least one block of `to_ask`, and how many bytes that is."""
        indices: list[int] = []
        num_bytes = 0
        for index in islice(self.to_ask, most_blocks):
            size = self.rows[index].nbytes
            if indices and num_bytes + size > most_bytes:
                break
            indices.append(index)
            num_bytes += size
        return indices, num_bytes

    def settle(self, index: int, outcome: GetOutcome) -> None:
        """One key's fate is known, and with it that of the places that ask for the same key."""
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

    def end(self, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """Let the caller have its rows back. Keys without a fate get `outcome`."""
        if self.ended:
            return
        self.ended = True
        self.error = without_frames(self.error or error)
        outcomes = [known or outcome for known in self.outcomes or [None] * len(self.keys)]
        landed = [i for i, known in enumerate(outcomes) if known is GetOutcome.HIT]
        self.to_ask.clear()
        self.rows = []
        times = None if self.stopwatch is None else self.stopwatch.times
        resolve(self.future, GetResult(landed, outcomes, self.bytes, self.error, times))

    def check(self, asked: list[int]) -> None:
        """Every block without a fate is among those `asked` for, once, or waits to be."""
        waiting = {index for index, outcome in enumerate(self.outcomes) if outcome is None}
        firsts = sorted(waiting.difference(*self.twins.values()))
        assert sorted([*asked, *self.to_ask]) == firsts, "a block lost or asked for twice"


@dataclass(slots=True, eq=False)
class GetBatch:
    """One Get message. On the wire a block is its position in `indices`."""

    transfer: GetTransfer
    indices: list[int]
    sizes: list[int]
    open: set[int]
    """Positions that have not come yet."""

    def row(self, position: int) -> memoryview | None:
        """Where the block at `position` belongs; None when nobody waits for it (any more)."""
        if self.transfer.ended or position not in self.open:
            return None
        return self.transfer.rows[self.indices[position]]


class GetWindow:
    """The batches in flight, bounded in bytes and in blocks."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.batches: dict[int, GetBatch] = {}
        self.num_bytes = 0
        self.num_blocks = 0

    def has_room(self, num_bytes: int, num_blocks: int) -> bool:
        """Whether that much more may be asked for. Something always may when nothing is."""
        return not self.batches or (
            self.num_bytes + num_bytes <= self._config.get_window_bytes
            and self.num_blocks + num_blocks <= self._config.get_window_blocks
        )

    def add(self, request_id: int, transfer: GetTransfer, indices: list[int]) -> None:
        """These were asked for."""
        sizes = [transfer.rows[index].nbytes for index in indices]
        self.batches[request_id] = GetBatch(transfer, indices, sizes, set(range(len(indices))))
        self.num_bytes += sum(sizes)
        self.num_blocks += len(sizes)

    def close(self, batch: GetBatch, position: int, outcome: GetOutcome) -> None:
        """Nothing more is expected for this block."""
        batch.open.remove(position)
        self.num_bytes -= batch.sizes[position]
        self.num_blocks -= 1
        if not batch.transfer.ended:
            batch.transfer.settle(batch.indices[position], outcome)

    def close_rest(self, batch: GetBatch, outcome: GetOutcome) -> None:
        """Nothing more is expected for any block of it."""
        for position in list(batch.open):
            self.close(batch, position, outcome)

    @property
    def has_leftovers(self) -> bool:
        """Whether gets that ended still hold a share."""
        return any(batch.transfer.ended for batch in self.batches.values())

    def clear(self) -> None:
        """Nothing that was asked for will come."""
        self.batches.clear()
        self.num_bytes = self.num_blocks = 0

    def check(self, transfers: Iterable[GetTransfer]) -> None:
        """The window is exactly what open batches wait for, and `transfers` wait for no more."""
        sizes = [batch.sizes[i] for batch in self.batches.values() for i in batch.open]
        assert self.num_bytes == sum(sizes), (self.num_bytes, sizes)
        assert self.num_blocks == len(sizes), (self.num_blocks, sizes)
        assert all(batch.open for batch in self.batches.values()), "a finished batch was kept"
        for transfer in transfers:
            own = [batch for batch in self.batches.values() if batch.transfer is transfer]
            transfer.check([batch.indices[i] for batch in own for i in batch.open])
