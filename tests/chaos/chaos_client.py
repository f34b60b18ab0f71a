"""A real client with its rows, every request of which is judged when it ends.

A request is judged by the oracle (`oracle.py`): what landed is what was stored under its key.
And by the clock: its future ends by its own deadline, give or take `SLACK_S`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from chaos_server import PATIENCE_S, eventually
from oracle import LARGE, NAMESPACES, Namespace, content, difference, is_poison, key, poison

from remote_server.client import (
    ClientConfig,
    GetOutcome,
    GetResult,
    PutResult,
    RemoteClient,
    SharedRegion,
)
from remote_server.client.lanes import link as lane_link
from remote_server.client.lanes.opening import why_slow
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RequestRefused,
    ServerUnavailable,
)
from remote_server.protocol import Stretch

SLACK_S = 60.0
"""What a busy machine may add to a deadline before a request counts as hung."""

REQUEST_S = 60.0
"""The deadline of a request that a test does not make late on purpose."""

PIECE_BYTES = 1 << 20
"""The rows of one request: enough for the largest in the random run."""

NUM_LANES = 2

LANE_PAUSE_S = 0.2
"""The longest before a lane is opened again. A client waits for up to half a minute when its lanes
break all the time, and would use ZeroMQ meanwhile."""

QUICK = {"reconnect_s": 0.02, "longest_reconnect_s": 0.2, "breaker_longest_backoff_s": 1.0}


class Hung(AssertionError):
    """A future did not end by its deadline."""


class WrongBytes(AssertionError):
    """An announced row holds other bytes, or a row that no request offered was written."""


@dataclass(eq=False)
class Request:
    """One request under way. `finish` ends it, once."""

    op: str
    future: "Future[Any]"
    ends_by: float
    namespace: Namespace | None = None
    numbers: Sequence[int] = ()
    rows: Sequence[memoryview] = ()
    piece: int = -1
    began: float = field(default_factory=time.monotonic)
    _ends: list[float] = field(default_factory=list)
    """When its future ended. The callback must not hold the request, which holds the future."""

    def __post_init__(self) -> None:
        ends = self._ends
        self.future.add_done_callback(lambda _: ends.append(time.monotonic()))

    def wait(self) -> Any:
        """What the future holds: a result, or the error it ended with. Raises `Hung`."""
        try:
            error = self.future.exception(max(0.0, self.ends_by - time.monotonic()) + SLACK_S)
        except (TimeoutError, FutureTimeoutError):
            raise Hung(f"a {self.op} is {SLACK_S:g} s behind its deadline") from None
        return self.future.result() if error is None else error

    @property
    def overrun_s(self) -> float:
        """How long after its deadline it ended; negative when it was in time."""
        return self.ended - self.ends_by

    @property
    def ended(self) -> float:
        """When its future ended: now, if its callback has not run yet."""
        return self._ends[0] if self._ends else time.monotonic()

    def judge(self, result: Any) -> str:
        """How it ended, in one word. Raises `WrongBytes`."""
        if isinstance(result, GetResult):
            self._compare(result)
            return _word_for(result)
        if isinstance(result, PutResult):
            if result.error is not None:
                return _word_for_error(result.error)
            return "declined" if sum(result.declined.values()) else "stored"
        return _word_for_error(result) if isinstance(result, BaseException) else "answered"

    def _compare(self, result: GetResult) -> None:
        assert self.namespace is not None
        for index in result.landed:
            if bytes(self.rows[index]) != content(self.namespace, self.numbers[index]):
                raise WrongBytes(
                    f"{self.namespace.name}/{self.numbers[index]} came back wrong: "
                    + difference(self.rows[index], self.namespace, self.numbers[index])
                )


def _word_for(result: GetResult) -> str:
    outcomes = set(result.outcomes)
    if outcomes == {GetOutcome.HIT}:
        return "hit"
    for outcome in (GetOutcome.CORRUPT, GetOutcome.LATE, GetOutcome.REFUSED):
        if outcome in outcomes:
            return str(outcome)
    if GetOutcome.UNAVAILABLE in outcomes:
        return "unavailable"
    return "part hit" if result.landed else "miss"


def _word_for_error(error: BaseException) -> str:
    if isinstance(error, LocalProtocolError):
        raise error
    for kind, word in (
        (DeadlineExceeded, "late"), (ServerUnavailable, "unavailable"), (RequestRefused, "refused"),
    ):  # fmt: skip
        if isinstance(error, kind):
            return word
    assert isinstance(error, KVFerryError), f"not an error of ours: {error!r}"
    return type(error).__name__


def _way_of(transport: str) -> dict[str, object]:
    """With "tcp", blocks are payload of ZeroMQ messages."""
    if transport == "lanes":
        return {"transport": "tcp", "lanes": NUM_LANES}
    return {"transport": transport, "lanes": 0 if transport == "tcp" else NUM_LANES}


class ChaosClient:
    """A `RemoteClient` over `transport` ("tcp", "shm", "lanes" or "auto"), with pieces of memory
    for rows.

    Rows of no request are full of `POISON`: any other byte there is a write after the end of a
    request.
    """

    def __init__(
        self, endpoint: str, transport: str, *, num_pieces: int = 4,
        clock: Callable[[], float] = time.monotonic, namespaces: Sequence[Namespace] = NAMESPACES,
        **settings: object,
    ) -> None:  # fmt: skip
        self.transport = transport
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """How many requests ended how, by operation and word."""
        self.blocks: Counter[str] = Counter()
        """The same for single keys of gets."""
        self.worst_overrun_s = 0.0
        self._memory = SharedRegion(num_pieces * PIECE_BYTES)
        self._free = deque(range(num_pieces))
        poison([self._piece(number) for number in self._free])
        self.config = ClientConfig(endpoint, **{**_way_of(transport), **QUICK, **settings})  # type: ignore[arg-type]
        self.client = self._connect(self.config, clock)
        self.client.register(self._memory.view, self._memory.fd)
        for namespace in namespaces:
            self.client.declare(namespace.name, namespace.block_bytes)

    def _connect(self, config: ClientConfig, clock: Callable[[], float]) -> RemoteClient:
        return RemoteClient(config, clock=clock)

    def _connections(self) -> list[RemoteClient]:
        """Of each server, the client whose books are checked."""
        return [self.client]

    def _anchors(self, ns: Namespace, numbers: Sequence[int]) -> Sequence[bytes]:
        return ()

    @property
    def has_lanes(self) -> bool:
        """One is open, where it is to use them and can."""
        return self.transport != "lanes" or bool(why_slow()) or self.client.lanes.num_open > 0

    @property
    def has_all_lanes(self) -> bool:
        """As many as it wants."""
        return self.has_lanes and self.client.lanes.num_open in (0, NUM_LANES)

    def wait_until_ready(self, patience_s: float = PATIENCE_S) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        eventually(lambda: self.client.ready and self.has_lanes, "the client is ready", patience_s)
        return time.monotonic() - began

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def lookup(
        self, ns: Namespace, numbers: Sequence[int], timeout_s: float = REQUEST_S,
        chain: Sequence[Stretch] = (),
    ) -> Request:  # fmt: skip
        future = self.client.lookup(
            ns.name, _keys(ns, numbers), timeout_s=timeout_s, chain=chain,
            anchors=self._anchors(ns, numbers),
        )  # fmt: skip
        return Request("lookup", future, time.monotonic() + timeout_s, ns, numbers)

    def touch(self, ns: Namespace, numbers: Sequence[int], timeout_s: float = REQUEST_S) -> Request:
        future = self.client.touch(ns.name, _keys(ns, numbers), timeout_s=timeout_s)
        return Request("touch", future, time.monotonic() + timeout_s, ns, numbers)

    def stats(self, timeout_s: float = REQUEST_S) -> Request:
        future = self.client.stats(timeout_s=timeout_s)
        return Request("stats", future, time.monotonic() + timeout_s)

    def clear(self, ns: Namespace, timeout_s: float = REQUEST_S) -> Request:
        future = self.client.clear(ns.name, timeout_s=timeout_s)
        return Request("clear", future, time.monotonic() + timeout_s)

    def put(
        self, ns: Namespace, numbers: Sequence[int], timeout_s: float = REQUEST_S, *,
        force: bool = False, deferred: bool = False, chain: Sequence[Stretch] = (),
    ) -> Request:  # fmt: skip
        piece, rows = self._take(ns, len(numbers))
        for number, row in zip(numbers, rows, strict=True):
            row[:] = content(ns, number)
        future = self.client.put(
            ns.name, _keys(ns, numbers), rows,
            deferred=deferred, force=force, timeout_s=timeout_s, chain=chain,
            anchors=self._anchors(ns, numbers),
        )  # fmt: skip
        op = "force" if force else "put"
        return Request(op, future, time.monotonic() + timeout_s, ns, numbers, rows, piece)

    def get(
        self, ns: Namespace, numbers: Sequence[int], timeout_s: float = REQUEST_S,
        stall_s: float | None = None,
    ) -> Request:  # fmt: skip
        piece, rows = self._take(ns, len(numbers))
        future = self.client.get(
            ns.name, _keys(ns, numbers), rows,
            stall_s=timeout_s if stall_s is None else stall_s, timeout_s=timeout_s,
            anchors=self._anchors(ns, numbers),
        )  # fmt: skip
        return Request("get", future, time.monotonic() + timeout_s, ns, numbers, rows, piece)

    def finish(self, request: Request) -> str:
        """Wait for it, judge it, take its rows back; returns how it ended, in one word."""
        result = request.wait()
        self.worst_overrun_s = max(self.worst_overrun_s, request.overrun_s)
        word = request.judge(result)
        self.outcomes[request.op, word] += 1
        if isinstance(result, GetResult):
            self.blocks.update(str(outcome) for outcome in result.outcomes)
        if request.piece >= 0:
            poison(request.rows)
            request.rows = ()
            self._free.append(request.piece)
        return word

    def _take(self, ns: Namespace, number: int) -> tuple[int, list[memoryview]]:
        piece = self._free.popleft()
        start, size = piece * PIECE_BYTES, ns.block_bytes
        assert number * size <= PIECE_BYTES, "too much for one request"
        rows = [
            self._memory.view[start + at * size : start + (at + 1) * size] for at in range(number)
        ]
        self._look_at(rows)
        return piece, rows

    def _piece(self, number: int) -> memoryview:
        return self._memory.view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]

    def _look_at(self, rows: Sequence[memoryview]) -> None:
        if not all(map(is_poison, rows)):
            raise WrongBytes("a row was written after its request had ended")

    # ── the end ──────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """At rest: its books balance, it holds nothing, and no byte beside its rows was written."""
        for connection in self._connections():
            connection.check(timeout_s=PATIENCE_S)
        assert self.client.queued_bytes == 0
        assert self.client.counters()["internal_errors"] == 0
        for piece in self._free:
            self._look_at([self._piece(piece)])

    def close(self) -> None:
        connections = self._connections()
        self.client.close(PATIENCE_S)
        self._memory.close()
        for connection in connections:
            connection.check()
        counters = self.client.counters()
        assert self.client.queued_bytes == 0
        assert counters["shm_attached"] == counters["shm_detached"]
        assert counters["internal_errors"] == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def use_all(endpoint: str, **settings: object) -> None:
    """What a server, or this process, keeps open once it has been used is open after this."""
    for transport in ("tcp", "shm", "lanes"):
        with ChaosClient(endpoint, transport, **settings) as client:  # type: ignore[arg-type]
            client.wait_until_ready()
            assert client.finish(client.put(LARGE, [0], force=True)) == "stored"
            assert client.finish(client.get(LARGE, [0])) == "hit"


@contextmanager
def eager_lanes(pause_s: float = LANE_PAUSE_S) -> Iterator[None]:
    """Clients of this process wait no longer before they open a lane again."""
    usual, lane_link.LONGEST_PAUSE_S = lane_link.LONGEST_PAUSE_S, pause_s
    try:
        yield
    finally:
        lane_link.LONGEST_PAUSE_S = usual


class JumpingClock:
    """The monotonic clock of a `ChaosClient`, and as much as it has jumped."""

    def __init__(self) -> None:
        self.jumped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.jumped

    def pass_deadline(self, client: ChaosClient, request: Request) -> str:
        """Jump past the deadline of a request of `client`, which has been sent; how it ends, in one
        word. No host is too slow for that."""
        client.client.check()  # the client's thread has had its turn: what it sends is sent
        self.jumped += 2 * REQUEST_S
        client.client.check()
        request.ends_by = time.monotonic()
        return client.finish(request)


def retried(client: ChaosClient, word: str, begin: Callable[[float], Request]) -> None:
    """Make a request until one ends with `word`, with twice the patience after each that was late:
    a connection that lost a part of a message is replaced only then."""
    timeout_s = 0.2

    def ended() -> bool:
        nonlocal timeout_s
        last = client.finish(begin(timeout_s))
        timeout_s *= 2 if last == "late" else 1
        return last == word

    client.wait_until_ready()
    eventually(ended, f"a request ends as {word}")


def _keys(namespace: Namespace, numbers: Sequence[int]) -> list[bytes]:
    return [key(namespace, number) for number in numbers]
