"""The interface that a client of one server and a client of several share.

`RemoteClient` has one server, `Fleet` has several. An engine's tier is written against this
interface and finds out by it which of the servers answer, hold a key or have restarted.

Servers have numbers, from 0, in the order of `names`. When the list of servers changes, `names`
changes, and with it the numbers. A caller that keeps something for each server keeps it by name.

Every request returns a `concurrent.futures.Future` at once and ends by its deadline, exactly once,
whatever the server does. A `timeout_s` counts from when the I/O thread takes the request over: at
once, unless another thread holds the interpreter. A request that cannot be sent now ends at once: a
lost server costs only its blocks. A time that is nan raises `ValueError` at once.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from math import isnan

from remote_server.client.cache_requests import Anchors, GetRequest, LookupRequest, PutRequest
from remote_server.client.connection.breaker import BreakerState
from remote_server.client.results import GetResult, PutResult
from remote_server.protocol import EngineReport, Found, Hint, StatsReply, Stretch

logger = logging.getLogger(__name__)

UNANSWERED = 255
"""A state in `Found.states` beyond `KeyState`: no server that may hold this key could be asked,
because it is lost or its breaker is open. Only a client of several servers reports it."""

UNANSWERED_LATE = 254
"""The same: a server that may hold this key did not answer in time, and no other one holds it. Its
late reply may still find the key."""

ABSENT_SO_FAR = 253
"""The same: a server that may hold this key lacks it, and another one could not be asked. As a rule
it is to be treated as absent: that server may be away for long."""

_LOOK_S = 0.01

_BREAKERS = (BreakerState.CLOSED, BreakerState.PROBING, BreakerState.OPEN)


class CacheClient(ABC):
    """A client of one cache server or of several. Every method may be called from any thread.

    A request is made by `lookup`, `put`, `get`, `touch` or `stats`, which check it; a kind of
    client implements the `send_…` of each, which take what is checked.
    """

    # ── the servers ──────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The servers' names in the client's list. One server without a name is `("",)`. The tuple
        is another object only if the names have changed."""

    @property
    @abstractmethod
    def epochs(self) -> tuple[str | None, ...]:
        """For each server, the boot that replied last; None before its first reply. A change may
        mean the loss of all its blocks."""

    @property
    @abstractmethod
    def are_ready(self) -> tuple[bool, ...]:
        """For each server, whether requests are sent to it now."""

    @property
    @abstractmethod
    def breakers(self) -> tuple[BreakerState, ...]:
        """For each server, the state of its breaker: requests are sent, or end as "unavailable"
        unsent."""

    @property
    def num_ready(self) -> int:
        """The number of servers to which requests are sent now."""
        return sum(self.are_ready)

    @property
    @abstractmethod
    def places_by_run(self) -> bool:
        """Whether the servers of a key follow from its anchor. Without that no anchor is used, and
        callers need not find any."""

    @abstractmethod
    def server_of(self, key: bytes) -> int:
        """The number of the server that was last found to hold `key` or that has taken it, else of
        the one that would be given it as far as is known here. Cheap enough to be called for every
        key of a prompt."""

    @abstractmethod
    def exclude(self, name: str, why: str) -> None:
        """Do not use the server `name` until this client is closed: the requests to it end, its
        keys are misses, and puts go to others. It stays in `names` and is not ready. Logs `why`.
        No effect for a name that is not in the list."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether some server takes requests: connected, every declared namespace welcome, breaker
        closed. Costs next to nothing.

        With `transport` set to "shm" and a region registered, attached as well. True is no
        guarantee: the server may be gone when a request comes.
        """

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Return `ready` as soon as it is true, at the latest after `timeout_s`. For a thread that
        has nothing else to do."""
        ends_by = time.monotonic() + timeout_s
        while not self.ready and time.monotonic() < ends_by:
            time.sleep(_LOOK_S)
        return self.ready

    @property
    @abstractmethod
    def absent(self) -> bool:
        """An attempt to connect failed before any reply, at every server: none listened there."""

    @property
    def breaker(self) -> BreakerState:
        """The state of the only breaker. Of several the best one: closed, probing, open."""
        return min(self.breakers, key=_BREAKERS.index)

    @property
    @abstractmethod
    def transport(self) -> str:
        """Transport of rows in the registered region now: "shm" or "tcp". All other rows use
        tcp."""

    @abstractmethod
    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        """Declare that blocks of `namespace` hold at most `block_bytes`.

        Repeated to every server this client connects to. A second call with the same name replaces
        the first. Raises `ConfigError` for values that no server accepts.
        """

    @abstractmethod
    def forget(self, namespace: str) -> None:
        """Stop declaring `namespace`, for example after a change of weights.

        A server keeps its blocks until they are evicted. Requests for it in flight end as usual;
        later ones end with `LocalProtocolError`.
        """

    @abstractmethod
    def report(self, report: EngineReport) -> None:
        """Show this on every server's page, from the next hello on, which is sent now when there is
        a connection. Raises `ConfigError` for texts that no server accepts."""

    @abstractmethod
    def register(self, view: memoryview, fd: int) -> None:
        """Declare that rows inside `view` are also reachable through `fd`, whose whole file `view`
        maps.

        When `fd` is a memfd sealed against shrinking, such as `SharedRegion` makes, a server on
        this host reads rows there for a put and lends its own memory for a get. It refuses any
        other file, which is logged once, and tcp is used. Transfers whose rows do not all lie in
        `view` are not affected. The server receives `fd` and only reads from it.

        Once per client. `view` and `fd` stay the caller's and must remain valid until `close` has
        returned. Raises `ConfigError` when they do not belong together.
        """

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        timeout_s: float = 0.05,
        on_late: Callable[[Found], None] | None = None,
        chain: Sequence[Stretch] = (),
        explain: bool = False,
        anchors: Anchors = (),
        hint: Hint | None = None,
    ) -> "Future[Found]":
        """Query which of `keys` are there: one state per key, and the readable prefix. A reply
        that comes after the deadline goes to `on_late`, on the I/O thread and at most once.
        `chain` has the stretches of all keys, or none. With `explain` the reply has the chain
        fields of each block, and the namespace may be any that the server knows. `hint` is that of
        the request. `anchors`, here and below, are for a client of several servers; one of a single
        server ignores them.

        With several servers the better state of a key's servers wins, and a state may be
        `UNANSWERED`, `UNANSWERED_LATE` or `ABSENT_SO_FAR`. The reply comes when all servers have
        answered or at the deadline, with what is known then. `on_late` then receives, once for each
        server whose reply comes late, a `Found` for all keys in which it is filled in. The future
        raises only if no server has answered.

        Raises, through the future, `ServerUnavailable`, `DeadlineExceeded`, `RequestRefused`, or
        `LocalProtocolError` for keys or a namespace that the protocol cannot carry. So do `touch`
        and `stats`.
        """
        return self.send_lookup(
            LookupRequest(
                namespace, list(keys), seconds(timeout_s), on_late, chain, explain, anchors, hint
            )
        )

    def put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *,
        deferred: bool = True,
        force: bool = False,
        timeout_s: float = 5.0,
        chain: Sequence[Stretch] = (),
        anchors: Anchors = (),
        hot: bool = False,
    ) -> "Future[PutResult]":
        """Offer the blocks in `rows`, each exactly as long as its block. `chain` has the stretches
        of all keys, or none. A `hot` put is a copy: of several servers, each run goes to the home
        that is not known to have it.

        The rows are read until the future ends and must not change before. The future never raises:
        see `PutResult.error`. `protocol.Put` explains `deferred` and `force`.
        """
        return self.send_put(
            PutRequest(
                namespace, list(keys), list(rows), deferred, force, seconds(timeout_s), chain,
                anchors, hot,
            )
        )  # fmt: skip

    def get(
        self,
        namespace: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *,
        stall_s: float = 0.05,
        timeout_s: float = 10.0,
        worth_s: float = 0.0,
        timed: bool = False,
        anchors: Anchors = (),
    ) -> "Future[GetResult]":
        """Fill `rows`, each exactly as long as its block, in the order of `keys`.

        The rows are written until the future ends and not after. The future never raises: see
        `GetResult.outcomes`. Keys that have not landed are given up after `timeout_s`, or after
        `stall_s` in which no bytes came for this get or one submitted before it. With `worth_s`,
        the time that the blocks would take from elsewhere, they are also given up when they come
        more slowly: when they are `stall_s` behind that pace, in all since they last kept up with
        it. A row whose outcome is not HIT may hold anything. `timed` measures the parts of the
        time, see `GetResult.times`, at a cost of some microseconds on either side.

        Of several servers each has its own stall, `GetResult.parts` has the share of each, and
        `times` is that of a get from only one of them.
        """
        return self.send_get(
            GetRequest(
                namespace, list(keys), list(rows), seconds(stall_s), seconds(timeout_s),
                seconds(worth_s), timed, anchors,
            )
        )  # fmt: skip

    def touch(
        self, namespace: str, keys: Sequence[bytes], *, timeout_s: float = 1.0
    ) -> "Future[int]":
        """Mark blocks as recently used; returns how many of them were there."""
        return self.send_touch(namespace, list(keys), seconds(timeout_s))

    def stats(self, *, fingerprints: bool = False, timeout_s: float = 1.0) -> "Future[StatsReply]":
        """Query the server's occupancy and counters; of several servers, those of the first that
        is ready. `fingerprints` adds what engines declared, which is most of the reply."""
        return self.send_stats(seconds(timeout_s), fingerprints=fingerprints)

    @abstractmethod
    def send_lookup(self, asked: LookupRequest) -> "Future[Found]": ...

    @abstractmethod
    def send_put(self, asked: PutRequest) -> "Future[PutResult]": ...

    @abstractmethod
    def send_get(self, asked: GetRequest) -> "Future[GetResult]": ...

    @abstractmethod
    def send_touch(self, namespace: str, keys: list[bytes], timeout_s: float) -> "Future[int]": ...

    @abstractmethod
    def send_stats(self, timeout_s: float, *, fingerprints: bool) -> "Future[StatsReply]": ...

    # ── this side ────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes of rows in puts and gets that were taken over and have not ended."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """All counters since the client was made; they only grow. Of several servers, the sums."""

    @abstractmethod
    def cancel_all(self, timeout_s: float) -> bool:
        """End every request submitted so far; their rows are free when this returns True.

        Gets end as LATE with the blocks that have landed, the others with `DeadlineExceeded`. False
        when it took longer, or when called from a future's callback; the requests still end then.
        """

    @abstractmethod
    def close(self, timeout_s: float = 1.0) -> None:
        """End every request, and the I/O thread unless it is shared. Idempotent, and safe to call
        from a callback.

        Returns after `timeout_s` at the latest. All requests have ended by then, except puts whose
        rows libzmq has not released yet.
        """

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Every request has ended, and the client does not touch a row again."""


class OneServer(CacheClient):
    """A client that has one server, without a name."""

    names = ("",)
    places_by_run = False

    @property
    @abstractmethod
    def epoch(self) -> str | None:
        """Boot of the server that replied last. A change may mean the loss of all blocks."""

    @property
    def epochs(self) -> tuple[str | None, ...]:
        return (self.epoch,)

    @property
    def are_ready(self) -> tuple[bool, ...]:
        return (self.ready,)

    @property
    def breakers(self) -> tuple[BreakerState, ...]:
        return (self.breaker,)

    @property
    @abstractmethod
    def breaker(self) -> BreakerState: ...

    def server_of(self, key: bytes) -> int:
        return 0

    def exclude(self, name: str, why: str) -> None:
        if name in self.names:
            logger.error("the server is not used: %s", why)
            self.close()


def seconds(number: float) -> float:
    """Raises `ValueError` for nan: no time is later than it, so nothing would end."""
    if isnan(number):
        raise ValueError("a time of nan seconds")
    return number
