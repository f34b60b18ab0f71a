"""The interface that a client of one server and a client of several share.

`RemoteClient` has one server, `Fleet` has several. An engine's tier is written against this
interface and finds out by it which of the servers answer, hold a key or have restarted.

Servers have numbers, from 0, in the order of `names`. When the list of servers changes, `names`
changes, and with it the numbers. A caller that keeps something for each server keeps it by name.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

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

Anchors = Sequence[bytes | None]
"""For each key of a request the key of the first block of its run (`remote_server.runs`), which
decides its servers. None where that is not known: the key itself decides. Empty: none is known."""


class CacheClient(Protocol):
    """A client of one cache server or of several. Every method may be called from any thread.

    Futures end by their deadline, exactly once, on a thread of the client, which runs their
    callbacks.
    """

    # ── the servers ──────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> tuple[str, ...]:
        """The servers' names in the client's list. One server without a name is `("",)`. The tuple
        is another object only if the names have changed."""

    @property
    def epochs(self) -> tuple[str | None, ...]:
        """For each server, the boot that replied last; None before its first reply. A change may
        mean the loss of all its blocks."""

    @property
    def are_ready(self) -> tuple[bool, ...]:
        """For each server, whether requests are sent to it now."""

    @property
    def breakers(self) -> tuple[BreakerState, ...]:
        """For each server, the state of its breaker."""

    @property
    def num_ready(self) -> int:
        """The number of servers to which requests are sent now."""

    @property
    def places_by_run(self) -> bool:
        """Whether the servers of a key follow from its anchor. Without that no anchor is used, and
        callers need not find any."""

    def server_of(self, key: bytes) -> int:
        """The number of the server that was last found to hold `key` or that has taken it, else of
        the one that would be given it as far as is known here. Cheap enough to be called for every
        key of a prompt."""

    def exclude(self, name: str, why: str) -> None:
        """Do not use the server `name` until this client is closed: the requests to it end, its
        keys are misses, and puts go to others. It stays in `names` and is not ready. Logs `why`.
        No effect for a name that is not in the list."""

    @property
    def ready(self) -> bool:
        """Whether some server takes requests. Costs next to nothing."""

    @property
    def absent(self) -> bool:
        """An attempt to connect failed before any reply, at every server."""

    @property
    def breaker(self) -> BreakerState:
        """The state of the only breaker. Of several the best one: closed, probing, open."""

    @property
    def transport(self) -> str:
        """Transport of rows in the registered region now: "shm" or "tcp"."""

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        """See `RemoteClient.declare`; to every server. Raises `ConfigError`."""

    def forget(self, namespace: str) -> None:
        """See `RemoteClient.forget`; at every server."""

    def report(self, report: EngineReport) -> None:
        """See `RemoteClient.report`; to every server. Raises `ConfigError`."""

    def register(self, view: memoryview, fd: int) -> None:
        """See `RemoteClient.register`; with every server. Raises `ConfigError`."""

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        timeout_s: float = ...,
        on_late: Callable[[Found], None] | None = None,
        chain: Sequence[Stretch] = (),
        explain: bool = False,
        anchors: Anchors = (),
        hint: Hint | None = None,
    ) -> "Future[Found]":
        """See `RemoteClient.lookup`. With several servers the better state of a key's servers wins,
        and a state may be `UNANSWERED`, `UNANSWERED_LATE` or `ABSENT_SO_FAR`. The reply comes when
        all servers have answered or at the deadline, with what is known then. `on_late` then
        receives, once for each late reply, a `Found` for all keys in which it is filled in. The
        future raises only if no server has answered.
        """

    def put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *,
        deferred: bool = True,
        force: bool = False,
        timeout_s: float = ...,
        chain: Sequence[Stretch] = (),
        anchors: Anchors = (),
        hot: bool = False,
    ) -> "Future[PutResult]":
        """See `RemoteClient.put`. A `hot` put is a copy: of several servers, each run goes to the
        home that is not known to have it."""

    def get(
        self,
        namespace: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *,
        stall_s: float = ...,
        timeout_s: float = ...,
        worth_s: float = ...,
        timed: bool = False,
        anchors: Anchors = (),
    ) -> "Future[GetResult]":
        """See `RemoteClient.get`. Of several servers each has its own stall, `GetResult.parts` has
        the share of each, and `times` is that of a get from only one of them."""

    def touch(
        self, namespace: str, keys: Sequence[bytes], *, timeout_s: float = ...
    ) -> "Future[int]":
        """See `RemoteClient.touch`."""

    def stats(self, *, fingerprints: bool = False, timeout_s: float = ...) -> "Future[StatsReply]":
        """See `RemoteClient.stats`. Of several servers, the first that is ready."""

    # ── this side ────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows in puts and gets that were taken over and have not ended."""

    def counters(self) -> dict[str, int]:
        """All counters since the client was made; they only grow. Of several servers, the sums."""

    def cancel_all(self, timeout_s: float) -> bool:
        """See `RemoteClient.cancel_all`."""

    def close(self, timeout_s: float = ...) -> None:
        """See `RemoteClient.close`."""

    @property
    def closed(self) -> bool:
        """Every request has ended, and the client does not touch a row again."""


class OneServer(CacheClient, Protocol):
    """The servers of a client that has one. The client has `epoch`, and `CacheClient`'s other
    members."""

    @property
    def epoch(self) -> str | None:
        """Boot of the server that replied last. A change may mean the loss of all blocks."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("",)

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
    def num_ready(self) -> int:
        return int(self.ready)

    @property
    def places_by_run(self) -> bool:
        return False

    def server_of(self, key: bytes) -> int:
        return 0

    def exclude(self, name: str, why: str) -> None:
        if name in self.names:
            logger.error("the server is not used: %s", why)
            self.close()
