"""RemoteClient: lookups, puts and gets of blocks on one server, none of which waits.

    client = RemoteClient(ClientConfig("tcp://10.0.0.7:5757"))
    client.declare("my-model", block_bytes=1 << 20)
    ...
    if client.ready:
        found = client.lookup("my-model", keys).result()
        done = client.get("my-model", keys[: found.prefix], rows).result()

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
from threading import Event, Lock
from typing import TypeVar

from remote_server import protocol
from remote_server.allocator import keep_freed_memory
from remote_server.client.cache_client import OneServer, seconds
from remote_server.client.cache_requests import GetRequest, LookupRequest, PutRequest
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
        self._call(lambda: self._loop.session.forget(namespace))

    def report(self, report: protocol.EngineReport) -> None:
        try:
            protocol.check_report(report.software, report.reused)
        except RemoteProtocolError as error:
            raise ConfigError(str(error)) from error
        self._call(lambda: self._loop.session.report_is(report))

    def register(self, view: memoryview, fd: int) -> None:
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
        return self._loop.transport

    @property
    def lanes(self) -> LaneState:
        """Its lanes now."""
        return self._loop.lanes

    @property
    def ready(self) -> bool:
        # In this order: otherwise a declaration made between the two reads would count as ready
        # before its hello was sent.
        return not self._num_undeclared and self._loop.ready

    @property
    def absent(self) -> bool:
        return self._loop.session.absent

    @property
    def turned_away(self) -> str:
        """Why the server refuses the connection; empty when it does not, or gives no reason."""
        return self._loop.session.turned_away

    @property
    def breaker(self) -> BreakerState:
        return self._loop.session.breaker.state

    @property
    def epoch(self) -> str | None:
        return self._loop.session.epoch

    @property
    def load(self) -> protocol.ServerLoad | None:
        """The load that the server sent last; None before that, and without a `fleet_digest`."""
        return self._loop.session.load

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def send_lookup(self, asked: LookupRequest) -> "Future[protocol.Found]":
        future = future_of(protocol.Found)
        self._loop.mailbox.submit(requests.lookup(future, asked, fleet=self._config.in_fleet))
        return future

    def send_put(self, asked: PutRequest) -> "Future[PutResult]":
        future = future_of(PutResult)
        put = PutTransfer(
            future, asked.namespace, asked.keys, asked.rows, asked.deferred, asked.force,
            asked.timeout_s, asked.chain,
        )  # fmt: skip
        self._loop.mailbox.submit(put)
        return future

    def send_get(self, asked: GetRequest) -> "Future[GetResult]":
        future = future_of(GetResult)
        get = GetTransfer(
            future, asked.namespace, asked.keys, asked.rows, asked.stall_s, asked.timeout_s,
            asked.worth_s, stopwatch=GetStopwatch(self._clock) if asked.timed else None,
        )  # fmt: skip
        self._loop.mailbox.submit(get)
        return future

    def send_touch(self, namespace: str, keys: list[bytes], timeout_s: float) -> "Future[int]":
        future = future_of(int)
        self._loop.mailbox.submit(requests.touch(future, namespace, keys, timeout_s))
        return future

    def send_stats(self, timeout_s: float, *, fingerprints: bool) -> "Future[protocol.StatsReply]":
        future = future_of(protocol.StatsReply)
        ask = requests.stats(future, timeout_s, fingerprints=fingerprints)
        self._loop.mailbox.submit(ask)
        return future

    def locate(
        self, keys: Sequence[bytes], *, namespace: str | None = None, timeout_s: float = 1.0
    ) -> "Future[protocol.Located]":
        """Query in which tier each of `keys` is, in `namespace` or in all that this client's key
        allows. For routers: `remote_server.locator` makes keys from tokens and joins servers."""
        future = future_of(protocol.Located)
        self._loop.mailbox.submit(
            requests.locate(future, namespace, list(keys), seconds(timeout_s))
        )
        return future

    def record(
        self, *, after: int | None = None, timeout_s: float = 1.0
    ) -> "Future[protocol.Recorded]":
        """Query the requests of all clients of this client's tenant, behind the one of number
        `after`; None for none, only the number of the last one. The server remembers requests while
        it is queried every few seconds. For `kvferry record`."""
        future = future_of(protocol.Recorded)
        self._loop.mailbox.submit(requests.record(future, after, seconds(timeout_s)))
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
            requests.clear(future, namespace, seconds(timeout_s), forget=forget)
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
            requests.keep(future, namespace, names, seconds(timeout_s), keep=keep)
        )
        return future

    # ── this side ────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        return self._loop.queued_bytes

    def counters(self) -> dict[str, int]:
        return dict(self._loop.counters)

    def cancel_all(self, timeout_s: float) -> bool:
        done = Event()
        self._call(partial(self._loop.cancel_all, done))
        return not self._loop.is_current_thread and done.wait(timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        self._finalizer.detach()
        self._own_part.stop()
        self._own_part.join(timeout_s)

    @property
    def closed(self) -> bool:
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


def future_of(_: type[T]) -> "Future[T]":
    """A future of a request: `cancel` has no effect on it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on `cancel` returns False
    return future
