"""One caller's put: cut into messages, packed into frames, summed up from the replies."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from weakref import ref

import zmq

from remote_server import protocol
from remote_server.client.region import check_rows
from remote_server.client.results import PutResult, resolve
from remote_server.client.session import Limits
from remote_server.errors import KVFerryError, RemoteProtocolError

# Smaller rows are packed, several to a frame: a frame of its own costs tens of microseconds on both
# sides, which is more than copying the row.
_PACK_BELOW_BYTES = 256 << 10
_PACKED_FRAME_BYTES = 1 << 20

# Counts of a Stored reply, which a PutResult sums up.
_COUNTS = ("total", "created", "existed", "forced", "duplicate")

_OUTCOMES = tuple(protocol.PutOutcome)  # in the order of their values, from 0


@dataclass(slots=True, eq=False)
class PutTransfer:
    """One caller's put. Its rows are ours to read until `future` ends."""

    future: "Future[PutResult]"
    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    deferred: bool
    force: bool
    timeout_s: float
    """Counts from when the I/O thread takes it over."""
    deadline: float = inf
    offsets: list[int] = field(default_factory=list)
    """Offsets of its rows in the registered region; empty over tcp."""
    to_send: deque[range] = field(default_factory=deque)
    num_in_flight: int = 0
    lent: "list[ref[memoryview]]" = field(default_factory=list)
    """One for each row passed to libzmq; dead when libzmq has released the row."""
    cut_off: bool = False
    """The socket that held its rows was closed: libzmq releases them by itself."""
    outcomes: list[protocol.PutOutcome | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    declined: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    total_bytes: int = 0
    error: KVFerryError | None = None
    ended: bool = False

    def prepare(
        self, block_bytes: int, batch_bytes: int, limits: Limits, first_bytes: int | None = None
    ) -> None:
        """Start with nothing sent yet; see `cut`. Raises `LocalProtocolError`."""
        self.rows = check_rows(self.keys, self.rows, block_bytes, writable=False)
        self.outcomes = [None] * len(self.keys)
        sizes = [row.nbytes for row in self.rows]
        self.total_bytes = sum(sizes)
        self.to_send.extend(cut(sizes, batch_bytes, limits, first_bytes))

    def message(
        self, part: range, request_id: int, limits: Limits, *, checked: bool
    ) -> protocol.Put:
        """The header for the blocks of `part`. Hashes their rows if they are to be `checked`."""
        span = slice(part.start, part.stop)
        rows = self.rows[span]
        return protocol.Put(
            request_id=request_id,
            namespace=self.namespace,
            keys=self.keys[span],
            lengths=[row.nbytes for row in rows],
            checksums=self.checksums(part) if checked else [],
            blocks_per_frame=_blocks_per_frame(rows, limits),
            deferred=self.deferred,
            force=self.force,
        )

    def checksums(self, part: range) -> list[int]:
        """Checksums of the blocks of `part`, as their rows are now."""
        span = slice(part.start, part.stop)
        return protocol.checksums(self.namespace, self.keys[span], self.rows[span])

    def frames(self, part: range, per_frame: int) -> list[zmq.Frame]:
        """The payload: the rows themselves, recorded in `lent`, or copies when packed."""
        rows = [self.rows[index] for index in part]
        if per_frame > 1:
            return [
                zmq.Frame(b"".join(rows[first : first + per_frame]), copy=False)
                for first in range(0, len(rows), per_frame)
            ]
        # pyzmq keeps the only reference to each view for as long as libzmq may read it. Its own
        # trackers give the same information, at the price of a lock and an event per frame.
        views = [memoryview(row) for row in rows]
        self.lent += map(ref, views)
        self.cut_off = False
        return [zmq.Frame(view, copy=False) for view in views]

    def add(self, part: range, reply: protocol.Stored) -> None:
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

    @property
    def settled(self) -> bool:
        """Nothing remains to be sent and no reply is awaited."""
        return not self.to_send and not self.num_in_flight

    def is_released(self) -> bool:
        """libzmq holds none of its rows any more."""
        self.lent = [view for view in self.lent if view() is not None]
        return not self.lent

    def resolve(self) -> None:
        """Resolve `future`; the rows are the caller's again."""
        if self.ended:
            return
        assert not self.lent
        self.ended = True
        self.rows = []
        result = PutResult(
            **self.counts,
            declined=self.declined,
            outcomes=self.outcomes,
            bytes_sent=self.bytes_sent,
            error=self.error,
        )
        resolve(self.future, result)

    def abandon(self, error: KVFerryError) -> None:
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


def cut(
    sizes: list[int], batch_bytes: int, limits: Limits, first_bytes: int | None = None
) -> list[range]:
    """Consecutive runs of blocks, each about a batch and within the server's limits.

    The first is about `first_bytes`, and each is twice the one before until it is a batch: the
    server begins soon, and is seldom interrupted.
    """
    most_bytes = min(batch_bytes, limits.max_message_bytes)
    enough = min(first_bytes or most_bytes, most_bytes)
    parts: list[range] = []
    first, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        full = num_bytes + size > enough or index - first == limits.max_keys
        if index > first and full:
            parts.append(range(first, index))
            first, num_bytes = index, 0
            enough = min(2 * enough, most_bytes)
        num_bytes += size
    if sizes:
        parts.append(range(first, len(sizes)))
    return parts


def _blocks_per_frame(rows: Sequence[memoryview], limits: Limits) -> int:
    largest = max(row.nbytes for row in rows)
    if largest >= _PACK_BELOW_BYTES:
        return 1
    return max(1, min(_PACKED_FRAME_BYTES, limits.max_frame_bytes) // largest)
