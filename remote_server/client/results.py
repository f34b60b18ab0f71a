"""Results and counters of a client."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple, TypeVar

from remote_server.errors import KVFerryError
from remote_server.protocol import Blocks, Got, PutOutcome


class Op(StrEnum):
    """Kinds of requests, independent of the messages on the wire."""

    HELLO = auto()
    LOOKUP = auto()
    LOCATE = auto()
    RECORD = auto()
    TOUCH = auto()
    STATS = auto()
    CLEAR = auto()
    KEEP = auto()
    VERIFY = auto()
    PUT = auto()
    GET = auto()

    @property
    def timeouts(self) -> str:
        """Name of the counter of those that had no reply in time."""
        return f"timeouts_{self}"


T = TypeVar("T")

logger = logging.getLogger(__name__)


def resolve(future: "Future[T]", result: T) -> None:
    """End `future` with `result`."""
    try:
        future.set_result(result)
    except BaseException:
        _log()


def fail(future: "Future[T]", error: Exception) -> None:
    """End `future` with `error`."""
    try:
        future.set_exception(error)
    except BaseException:
        _log()


def _log() -> None:
    # The future has ended: `concurrent.futures` logs exceptions of callbacks, except SystemExit and
    # its like. Those would end the I/O thread, and no other future would end.
    logger.exception("client: a callback of a request raised what ends a thread")


class LaneState(NamedTuple):
    """The lanes of a client. Without an open one, rows that shared memory does not reach are
    payload of ZeroMQ messages."""

    num_open: int
    reason: str
    """Why none is open; empty when one is, or may be in a moment."""


class GetOutcome(StrEnum):
    """Outcome of one key of a get. Only `HIT` guarantees the row's bytes."""

    HIT = auto()  # the row holds the block, verified
    MISS = auto()  # the server does not have it (any more)
    CORRUPT = auto()  # the bytes were not the block; the server was asked to verify its copy
    LATE = auto()  # the deadline, a stall or the caller ended the wait
    SLOW = auto()  # others came, and more slowly than they are worth: see `RemoteClient.get`
    REFUSED = auto()  # by the server, or by this client before sending; `error` has the reason
    UNAVAILABLE = auto()  # no server, or it was lost meanwhile


@dataclass(frozen=True)
class GetTimes:
    """Parts of the time from `began` to `ended`, in seconds by the client's clock, which add up to
    it.

    They belong to the batch whose last message came last: a get of up to `ClientConfig.batch_bytes`
    is one batch. With several batches `serialize_s` includes the wait for space in the window.
    """

    began: float
    """Time of the call of `RemoteClient.get`."""

    ended: float
    """Time at which the last block had been verified."""

    serialize_s: float
    """Until the request was encoded and passed to ZeroMQ."""

    network_s: float
    """In the network, both ways, and in the queues of both sockets."""

    server_s: float
    """In the server, without its storage, until the last message was passed to ZeroMQ."""

    storage_s: float
    """In the server's store: to find and read the blocks."""

    deserialize_s: float
    """Receiving and verifying blocks, except while the server was busy with this get."""


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

    def landed(self, reply: Got | Blocks, came: float) -> None:
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
        reply: Got | Blocks,
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


class GetPart(NamedTuple):
    """The share of one server in a get that several have served."""

    server: int
    """Its number in the client's list when the get was begun."""

    keys: int
    """Keys that it was asked for."""

    bytes: int
    """Sum of the rows that landed from it."""

    seconds: float
    """From the call of `get` until its part ended. A server serves one get after another, so this
    may have the time behind an earlier part of the same server in it."""


@dataclass(frozen=True)
class GetResult:
    """A get that has ended: nothing writes into its rows any more."""

    landed: list[int]
    """Ascending indices of the keys whose rows now hold verified bytes."""

    outcomes: list[GetOutcome]
    """One per key."""

    bytes: int = 0
    """Sum of the landed rows' sizes."""

    error: KVFerryError | None = None
    """Why some keys were LATE, REFUSED or UNAVAILABLE. Misses and bad blocks are no error."""

    times: GetTimes | None = None
    """Of a `timed` get over tcp from a server that measures; else None."""

    parts: Sequence[GetPart] = ()
    """Of several servers, a part for each from which a key was HIT or LATE. Empty for one server,
    and where none served a key."""

    hot: list[int] = field(default_factory=list)
    """Ascending indices of keys that begin a run and that many clients request, by a server that
    was given a `fleet_digest`."""


@dataclass(frozen=True)
class PutResult:
    """A put that has ended: nothing reads its rows any more.

    The counts are the server's (`Stored`), summed over the batches with a reply; `total` is less
    than the number of keys when some batches had none.
    """

    total: int = 0
    created: int = 0
    existed: int = 0
    forced: int = 0
    duplicate: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    """Reason to count; the reasons are `protocol.Declined`'s values."""

    outcomes: list[PutOutcome | None] = field(default_factory=list)
    """One per key; None where no reply came, and then `error` has the reason."""

    bytes_sent: int = 0
    """Bytes of blocks sent; a batch sent again counts again."""

    error: KVFerryError | None = None


_COUNTERS = (
    # traffic
    "bytes_in", "bytes_out", "blocks_in", "blocks_out",
    # misses and refusals, by reason
    "unavailable", "local_errors", "refused", "unknown_namespace", "cancelled",
    *(op.timeouts for op in Op),
    # bad replies
    "checksum_failures", "short_blocks", "wrong_lengths", "misplaced_blocks", "stale_epochs",
    "protocol_errors", "late_replies",
    "verify_sent", "verify_removed", "verify_intact",
    # shared memory
    "shm_attached", "shm_detached", "shm_refused", "shm_busy", "shm_bytes_in", "shm_bytes_out",
    "withdrawn_puts", "expired_blocks", "released_leases",
    # lanes
    "lanes_opened", "lanes_refused", "lanes_not_trusted", "lanes_broken", "lane_bytes_in",
    "lane_bytes_out",
    # the connection
    "hellos", "connects", "disconnects", "turned_away", "server_restarts", "breaker_opened",
    "get_resets", "put_resets", "batches_resent", "internal_errors",
)  # fmt: skip

Counters = dict[str, int]


def new_counters() -> Counters:
    """Every counter, at zero: a snapshot names them all, and a typo is a KeyError."""
    return dict.fromkeys(_COUNTERS, 0)
