"""RemoteClient: lookups, puts and gets of blocks on one server, none of which waits.

    client = RemoteClient(ClientConfig("tcp://10.0.0.7:5757"))
    client.declare("my-model", block_bytes=1 << 20)
    ...
    if client.ready:
        found = client.lookup("my-model", keys).result()
        done = client.get("my-model", keys[: found.prefix], rows).result()

Every request returns a `concurrent.futures.Future` at once and ends by its deadline, exactly once,
whatever the server does. A `timeout_s` counts from when the I/O thread takes the request over: at
once, unless another thread holds the interpreter. A request that cannot be sent now ends at once: a
lost server costs only its blocks. A time that is nan raises `ValueError` at once.

One I/O thread does all the work of one client (`loop.py`) or of several (`io_thread.py`). Futures
end on it and run their callbacks on it: a callback must be quick, and must not wait for another
request of a client on that thread. A request submitted after `close` ends on the submitting thread.
`Future.cancel` does nothing: only an ended future gives its rows back, and `cancel_all` ends all of
them sooner.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import isnan
from threading import Event, Lock
from typing import TypeVar

from remote_server import protocol
from remote_server.allocator import keep_freed_memory
from remote_server.client.cache_client import Anchors, OneServer
from remote_server.client.config import ClientConfig
from remote_server.client.connection.breaker import BreakerState
from remote_server.client.connection.session import Declaration
from remote_server.client.io_thread import IoThread
from remote_server.client.loop import Loop
from remote_server.client.requests import requests
from remote_server.client.requests.mailbox import Call
from remote_server.client.results import GetResult, GetStopwatch, LaneState, PutResult
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.put import PutTransfer
from remote_server.errors import ConfigError, RemoteProtocolError
from remote_server.shm.region import RegisteredRegion

T = TypeVar("T")


class RemoteClient(OneServer):
    """A client of one server. Every method may be called from any thread."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        io: IoThread | None = None,
    ) -> None:
        """Begin to connect; the server need not exist yet. `io` is shared with other clients and
        stays the caller's; None starts a thread that ends with this client. Raises `ConfigError`.
        """
        if config.keep_freed_memory:
            keep_freed_memory()
        self._config = config
        self._clock = clock
        io_thread = io or IoThread()
        try:
            self._loop = io_thread.add(lambda: Loop(config, clock, io_thread))
        except BaseException:
            if io is None:
                io_thread.close()
            raise
        self._own_part = io_thread if io is None else self._loop
        """What ends with this client."""
        self._declaring = Lock()
        self._registered = False
        self._num_undeclared = 0
        """Namespaces and regions not yet processed by the I/O thread: not `ready` until zero."""
        # For a client that is dropped without `close`, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._own_part.stop)

    # ── the server ───────────────────────────────────────────────────────────────────────

    def declare(
        self,
        namespace: str,
        block_bytes: int,
        fingerprint: Mapping[str, str] = {},
    ) -> None:
        """Declare that blocks of `namespace` hold at most `block_bytes`.

        Repeated to every server this client connects to. A second call with the same name replaces
        the first. Raises `ConfigError` for values that no server accepts.
        """
        if not 0 < len(namespace) <= protocol.MAX_NAMESPACE_CHARS:
            raise ConfigError(
                f"namespace: {namespace!r:.80} must be 1 to {protocol.MAX_NAMESPACE_CHARS} "
                "characters"
            )
        if not 0 < block_bytes <= protocol.MAX_FRAME_BYTES:
            raise ConfigError(
                f"block_bytes: {block_bytes} must be 1 to {protocol.MAX_FRAME_BYTES}; "
                "use smaller blocks"
            )
        declaration = Declaration(namespace, block_bytes, dict(fingerprint))
        requests.check_hello(declaration, self._config)
        self._declare(partial(self._loop.session.declare, declaration))

    def forget(self, namespace: str) -> None:
        """Stop declaring `namespace`, for example after a change of weights.

        The server keeps its blocks until they are evicted. Requests for it in flight end as usual;
        later ones end with `LocalProtocolError`.
        """
        self._call(lambda: self._loop.session.forget(namespace))

    def report(self, report: protocol.EngineReport) -> None:
        """Show this on the server's page, from the next hello on, which is sent now when there is a
        connection. Raises `ConfigError` for texts that no server accepts."""
        try:
            protocol.check_report(report.software, report.reused)
        except RemoteProtocolError as error:
            raise ConfigError(str(error)) from error
        self._call(lambda: self._loop.session.report_is(report))

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
        region = RegisteredRegion(view, fd)
        with self._declaring:
            if self._registered:
                raise ConfigError("region: this client has registered one already")
            self._registered = True
        if self._config.transport != "tcp":
            self._declare(lambda: self._loop.register(region))

    def _declare(self, run: Callable[[], object]) -> None:
        """Run it on the I/O thread; `ready` is false until then."""
        with self._declaring:
            self._num_undeclared += 1

        def run_and_count() -> None:
            try:
                run()
            finally:
                with self._declaring:
                    self._num_undeclared -= 1

        self._call(run_and_count)

    @property
    def transport(self) -> str:
        """Transport of rows in the registered region now: "shm" or "tcp". All other rows use
        tcp."""
        return self._loop.transport

    @property
    def lanes(self) -> LaneState:
        """Its lanes now."""
        return self._loop.lanes

    @property
    def ready(self) -> bool:
        """Connected, every declared namespace welcome, breaker closed. Costs next to nothing.

        With `transport` set to "shm" and a region registered, attached as well. True is no
        guarantee: the server may be gone when a request comes.
        """
        # In this order: otherwise a declaration made between the two reads would count as ready
        # before its hello was sent.
        return not self._num_undeclared and self._loop.ready

    @property
    def absent(self) -> bool:
        """An attempt to connect failed before any reply: no server listened there."""
        return self._loop.session.absent

    @property
    def turned_away(self) -> str:
        """Why the server refuses the connection; empty when it does not, or gives no reason."""
        return self._loop.session.turned_away

    @property
    def breaker(self) -> BreakerState:
        """The breaker's state: requests are sent, or end as "unavailable" unsent."""
        return self._loop.session.breaker.state

    @property
    def epoch(self) -> str | None:
        """Boot of the server that replied last. A change may mean the loss of all blocks."""
        return self._loop.session.epoch

    @property
    def load(self) -> protocol.ServerLoad | None:
        """The load that the server sent last; None before that, and without a `fleet_digest`."""
        return self._loop.session.load

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        timeout_s: float = 0.05,
        on_late: Callable[[protocol.Found], None] | None = None,
        chain: Sequence[protocol.Stretch] = (),
        explain: bool = False,
        anchors: Anchors = (),
        hint: protocol.Hint | None = None,
    ) -> "Future[protocol.Found]":
        """Query which of `keys` are there: one state per key, and the readable prefix. A reply
        that comes after the deadline goes to `on_late`, on the I/O thread and at most once.
        `chain` has the stretches of all keys, or none. With `explain` the reply has the chain
        fields of each block, and the namespace may be any that the server knows. `hint` is that of
        the request. `anchors`, here and below, are for a client of several servers, and ignored.

        Raises, through the future, `ServerUnavailable`, `DeadlineExceeded`, `RequestRefused`, or
        `LocalProtocolError` for keys or a namespace that the protocol cannot carry. So do `touch`,
        `stats`, `clear` and `keep`.
        """
        future = future_of(protocol.Found)
        ask = requests.lookup(
            future, namespace, list(keys), _seconds(timeout_s), on_late, chain,
            explain=explain, fleet=self._config.in_fleet, hint=hint,
        )  # fmt: skip
        self._loop.mailbox.submit(ask)
        return future

    def put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *,
        deferred: bool = True,
        force: bool = False,
        timeout_s: float = 5.0,
        chain: Sequence[protocol.Stretch] = (),
        anchors: Anchors = (),
        hot: bool = False,
    ) -> "Future[PutResult]":
        """Offer the blocks in `rows`, each exactly as long as its block. `chain` has the stretches
        of all keys, or none.

        The rows are read until the future ends and must not change before. The future never raises:
        see `PutResult.error`. `protocol.Put` explains `deferred` and `force`.
        """
        future = future_of(PutResult)
        put = PutTransfer(
            future, namespace, list(keys), list(rows), deferred, force, _seconds(timeout_s), chain
        )
        self._loop.mailbox.submit(put)
        return future

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
        """
        future = future_of(GetResult)
        get = GetTransfer(
            future, namespace, list(keys), list(rows), _seconds(stall_s), _seconds(timeout_s),
            _seconds(worth_s), stopwatch=GetStopwatch(self._clock) if timed else None,
        )  # fmt: skip
        self._loop.mailbox.submit(get)
        return future

    def touch(
        self, namespace: str, keys: Sequence[bytes], *, timeout_s: float = 1.0
    ) -> "Future[int]":
        """Mark blocks as recently used; returns how many of them were there."""
        future = future_of(int)
        self._loop.mailbox.submit(
            requests.touch(future, namespace, list(keys), _seconds(timeout_s))
        )
        return future

    def stats(
        self, *, fingerprints: bool = False, timeout_s: float = 1.0
    ) -> "Future[protocol.StatsReply]":
        """Query the server's occupancy and counters. `fingerprints` adds what engines declared,
        which is most of the reply."""
        future = future_of(protocol.StatsReply)
        ask = requests.stats(future, _seconds(timeout_s), fingerprints=fingerprints)
        self._loop.mailbox.submit(ask)
        return future

    def locate(
        self, keys: Sequence[bytes], *, namespace: str | None = None, timeout_s: float = 1.0
    ) -> "Future[protocol.Located]":
        """Query in which tier each of `keys` is, in `namespace` or in all that this client's key
        allows. For routers: `remote_server.locator` makes keys from tokens and joins servers."""
        future = future_of(protocol.Located)
        self._loop.mailbox.submit(
            requests.locate(future, namespace, list(keys), _seconds(timeout_s))
        )
        return future

    def record(
        self, *, after: int | None = None, timeout_s: float = 1.0
    ) -> "Future[protocol.Recorded]":
        """Query the requests of all clients of this client's tenant, behind the one of number
        `after`; None for none, only the number of the last one. The server remembers requests while
        it is queried every few seconds. For `kvferry record`."""
        future = future_of(protocol.Recorded)
        self._loop.mailbox.submit(requests.record(future, after, _seconds(timeout_s)))
        return future

    def clear(
        self, namespace: str | None = None, *, forget: bool = False, timeout_s: float = 5.0
    ) -> "Future[protocol.Cleared]":
        """Remove every block of `namespace`, or of all, from memory and disk; returns how many from
        each.

        `forget` ends the namespace on the server too. Call `forget` of this client first, or the
        client declares it again.
        """
        future = future_of(protocol.Cleared)
        self._loop.mailbox.submit(
            requests.clear(future, namespace, _seconds(timeout_s), forget=forget)
        )
        return future

    def keep(
        self,
        namespace: str,
        keys: Sequence[bytes] | None = None,
        *,
        keep: bool = True,
        timeout_s: float = 5.0,
    ) -> "Future[protocol.Kept]":
        """Pin `keys`, or all blocks of `namespace`, that are in the server's memory; with `keep`
        false, unpin them.

        Returns how many, their bytes of memory, and how many exceeded half of it. Blocks stay
        pinned until they are unpinned, removed or too old, or the server ends.
        """
        future = future_of(protocol.Kept)
        names = None if keys is None else list(keys)
        self._loop.mailbox.submit(
            requests.keep(future, namespace, names, _seconds(timeout_s), keep=keep)
        )
        return future

    # ── this side ────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows in puts and gets that were taken over and have not ended."""
        return self._loop.queued_bytes

    def counters(self) -> dict[str, int]:
        """All counters of this client since it was made; they only grow."""
        return dict(self._loop.counters)

    def cancel_all(self, timeout_s: float) -> bool:
        """End every request submitted so far; their rows are free when this returns True.

        Gets end as LATE with the blocks that have landed, the others with `DeadlineExceeded`. False
        when it took longer, or when called from a future's callback; the requests still end then.
        """
        done = Event()
        self._call(partial(self._loop.cancel_all, done))
        return not self._loop.is_current_thread and done.wait(timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """End every request, and the I/O thread unless it is shared. Idempotent, and safe to call
        from a callback.

        Returns after `timeout_s` at the latest. All requests have ended by then, except puts whose
        rows libzmq has not released yet.
        """
        self._finalizer.detach()
        self._own_part.stop()
        self._own_part.join(timeout_s)

    @property
    def closed(self) -> bool:
        """Fully closed: every request has ended, and this client does not touch a row again."""
        return self._loop.mailbox.closed

    def check(self, timeout_s: float = 30.0) -> None:
        """Raise `AssertionError` when this client's books do not balance. For tests."""
        failure: Future[None] = Future()

        def run() -> None:
            try:
                self._loop.check()
            except AssertionError as error:
                failure.set_exception(error)
            else:
                failure.set_result(None)

        self._call(run)
        failure.result(timeout_s)

    def _call(self, run: Callable[[], None]) -> None:
        self._loop.mailbox.submit(Call(run))


def _seconds(number: float) -> float:
    """Raises `ValueError` for nan: no time is later than it, so nothing would end."""
    if isnan(number):
        raise ValueError("a time of nan seconds")
    return number


def future_of(_: type[T]) -> "Future[T]":
    """A future of a request: `cancel` has no effect on it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on `cancel` returns False
    return future
