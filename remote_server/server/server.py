"""The server's life and its loop: run → serve → start → (handle…) → drain → stop."""

import logging
import signal
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Self

import msgspec
import zmq

from remote_server.errors import ServerFailed
from remote_server.guard import Guard
from remote_server.keys import read_server_keys
from remote_server.native.moves import Moves
from remote_server.plain_text import plain
from remote_server.process_limits import (
    check_file_sizes,
    check_memory_fits,
    check_room_for_files,
    named_when_missing,
    warn_if_dev_shm_is_small,
    warn_if_too_few,
)
from remote_server.protocol import TierStats
from remote_server.server.config import MAP, ServerConfig, TenantConfig, read_tenants
from remote_server.server.entrance.auth import Authenticator
from remote_server.server.entrance.connections import most_handshakes
from remote_server.server.entrance.tenant_keys import TenantKeys
from remote_server.server.intake.intake import Flooded, Intake, make_router
from remote_server.server.intake.serving import Serving
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.lanes.offer import lane_files, offer_lanes
from remote_server.server.loop_context import LoopContext
from remote_server.server.reports.identity import fleets_of, server_version
from remote_server.server.reports.kv_events import Feed
from remote_server.server.reports.snapshot import Snapshot, gather, tiers_of
from remote_server.server.sending.bounds import Allowances
from remote_server.server.shm.endpoint import MAX_PENDING, MAX_REGIONS
from remote_server.server.shm.leases import Leases
from remote_server.server.tenant.context import ServerContext
from remote_server.server.tenant.tenant import Tenant
from remote_server.server.transfer.copier import Copier
from remote_server.server.upkeep.loop_calls import LoopCalls, Wakeup
from remote_server.server.upkeep.prefetches import Prefetches
from remote_server.server.upkeep.private_memory import PrivateMemory
from remote_server.server.upkeep.upkeep import Upkeep
from remote_server.shm.mapping import BYTES_PER_WORD, WORD_BYTES, Population
from remote_server.store.bucket.opening import BUCKET_FILES, SharedBucket
from remote_server.store.disk.segments import segment_bytes_for
from remote_server.store.io_threads import Threads
from remote_server.store.store import Store

log = logging.getLogger(__name__)

STUCK_RETRY_MS = 2  # when a client's queue is full; libzmq does not report when it drains
# When frames or reads of the bucket are under way, or the local socket rests, and nothing else
# happens.
RELEASE_MS = 10
PENDING_MS = 100  # when a pending attach may time out, or descriptors are short
WATCH_MS = 100  # of libzmq's memory, while a client is connected
IDLE_MS = 1_000  # also the longest delay of the end of a lease

# Between looks at what no event reports: of connections, that a handshake or an attach takes too
# long; of the process, its memory.
CONNECTIONS_S = 0.01
CHECKS_S = 0.05

# Estimated descriptors: of libzmq, the loop and the admin HTTP with its connections; and of one
# local socket with its largest number of regions and attaching clients.
OWN_FILES = 128
LOCAL_FILES = 3 * (MAX_REGIONS + MAX_PENDING) + 2


class Server:
    """One cache server. `run()` in a process, or `with Server(config) as server:` in a test.

    One thread owns the socket, the store and the queues, and copies; a second one populates the
    arena and ends.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._leave = threading.Event()
        self._drain_until: float | None = None
        self._signalled = False
        self._failure: ServerFailed | None = None
        self._thread: threading.Thread | None = None

    # ── life ─────────────────────────────────────────────────────────────────────────────

    def run(self, on_ready: Callable[["Server"], None]) -> None:
        """Serve until a signal: the first SIGINT or SIGTERM drains, the second ends at once.

        Raises `ConfigError` when it cannot start, and `ServerFailed` when it cannot go on. Must run
        on the main thread.
        """
        self.start()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
            on_ready(self)
            self.serve()
        finally:
            self.stop()
        if self._failure is not None:
            raise self._failure

    @named_when_missing()
    def start(self) -> None:
        """Bind the address and map the memory: clients may connect. Raises `ConfigError`."""
        check_memory_fits(self.config.memory)
        warn_if_dev_shm_is_small(self.config.memory)
        tenants = read_tenants(self.config)
        if self.config.disk and not any(one.disk for one in tenants):
            log.warning("disk: %s stays unused: no tenant of %s has a part of it, `disk = ...`",
                        plain(self.config.disk), plain(self.config.tenants))  # fmt: skip
        url = self.config.bucket
        self._bucket = SharedBucket(url, len(tenants)) if url else None
        for config in tenants:
            check_file_sizes(config.memory + config.memory // BYTES_PER_WORD * WORD_BYTES, "memory")
            if config.disk:
                check_file_sizes(segment_bytes_for(config.disk), "disk")
        check_room_for_files(self._bucket_files)
        warn_if_too_few(self.config.max_connections, self._other_files(tenants))
        self._guard = Guard(self._clock)
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        loop = LoopContext(self._poller, self._clock, self._guard, self._wakeup.wake)
        self._connections_at = self._checks_at = self._clock()

        # What moves bytes, on the loop and beside it
        self.copier = Copier(self._guard)
        self._moves = Moves()
        self._disk_threads = Threads()
        self._population: Population | None = None
        self._bells = self._wakeup.wakeup.fileno(), self._moves.fileno()
        for bell in self._bells:
            self._poller.register(bell, zmq.POLLIN)

        self._private_memory = PrivateMemory(self._clock())
        self._held = Allowances()
        self._serving = Serving(len(tenants))
        self.feed: Feed | None = None
        self.tenants: dict[str, Tenant] = {}
        """By tenant name. Without tenants one serves all clients, under the empty name."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        auth: Authenticator | None = None
        try:
            # A connection, a tenant's requests, and the messages that come
            router = make_router(self._context, self.config.bind)
            auth = self._auth = self._make_auth(router, loop, [config.name for config in tenants])
            self.lanes = ServerLanes(loop, self._auth.connections)
            server = ServerContext(
                self.config, loop, router, self._held, self.copier, self._moves, self.lanes,
                self._disk_threads, self._bucket,
            )  # fmt: skip
            for config in tenants:
                self.tenants[config.name] = Tenant(
                    config, server, self._server_counters(config), self._serving.go_on_later
                )
            self._intake = Intake(
                self._context, router, loop, self._auth, self.tenants, self._serving, self.lanes
            )
            self._intake.bind(self.config.bind)
            if self.config.events:
                self.feed = self._open_feed()
            offer_lanes(self.lanes, self.config, self._intake.endpoint)
        except BaseException:
            for tenant in self.tenants.values():
                tenant.leave()
            if self._bucket is not None:
                self._bucket.leave()
            if auth is not None:
                auth.close()
            self._context.destroy(linger=0)
            for tenant in self.tenants.values():
                tenant.close()
            self._stop_threads()
            self._wakeup.close()
            raise
        if self.config.populate:
            self._population = Population([each.storage.arena for each in self.tenants.values()])
        self.loop_calls = LoopCalls(self._wakeup.wake)
        self.prefetches = Prefetches(self.tenants, self._guard, self._wakeup.wake)
        self._upkeep = Upkeep(self.tenants, self._clock())

    def serve(self) -> None:
        """Answer requests until `leave` is called or a drain ends."""
        more_to_do = False
        try:
            while not self._leave.is_set() and not self._drained():
                more_to_do = self._turn(more_to_do)
        finally:
            self.loop_calls.close()

    def _turn(self, more_to_do: bool) -> bool:
        """One turn of the loop. Each part runs under the guard, so that none can end the server.
        `more_to_do` is the result of the turn before: True skips the wait for events."""
        run = self._guard.run
        events = dict(self._poller.poll(self._patience_ms(more_to_do)))
        idle, now, (wakeup, moved) = not events, self._clock(), self._bells
        has_requests = events.pop(self._intake.router, 0)
        if events.pop(wakeup, 0):
            self._wakeup.drain()
            for tenant in self.tenants.values():
                tenant.finish_jobs()
        if events.pop(moved, 0):
            run("moved blocks", self._moves.finish, None)
        if self.feed is not None and events.pop(self.feed.replays, 0):
            run("replays of events", self.feed.take_requests, None)
        if events.pop(self.lanes.bell, 0):
            run("lanes", self.lanes.reap, None)
        if events or now >= self._connections_at:
            self._connections_at = now + CONNECTIONS_S
            self._handle_connections(events)
        if has_requests:
            run("receiving requests", self._take_in, None)
        more_to_do = False
        if self._serving.num_waiting:
            more_to_do = run("serving requests", self._serve_requests, False)
        if self.copier.busy:
            more_to_do |= run("copying", self.copier.copy_some, False)
        for tenant in self.tenants.values():
            more_to_do |= tenant.take_turn()
        if self.feed is not None:
            more_to_do |= run("events", self.feed.take_turn, False)
        more_to_do |= self.prefetches.take_turn()
        self.loop_calls.run_one()
        idle = idle and not more_to_do
        if idle or now >= self._checks_at:
            self._checks_at = now + CHECKS_S
            run("periodic checks", partial(self._check_periodically, idle), None)
        return more_to_do

    def drain(self) -> None:
        """From any thread or signal handler: decline puts, finish requests, end `serve`."""
        self._drain_until = self._clock() + self.config.drain_timeout_s
        for tenant in self.tenants.values():
            tenant.handlers.draining = True
        self._wakeup.wake()

    def leave(self) -> None:
        """From any thread or signal handler: return from `serve` now."""
        self._leave.set()
        self._wakeup.wake()

    def stop(self) -> None:
        """Close everything and return the memory to the machine."""
        drained = not self._leave.is_set()
        self.lanes.close()
        if self.feed is not None:
            self.feed.close()
        self.copier.stop()
        self._wakeup.close()
        self._serving.drop_all()
        for tenant in self.tenants.values():
            tenant.leave()
        if self._bucket is not None:
            self._bucket.leave()
        self._auth.close()
        # After a drain the last replies are still in libzmq: give it time to send them.
        self._intake.router.close(linger=200 if drained else 0)
        self._context.term()
        for tenant in self.tenants.values():
            tenant.close()
        self._stop_threads()

    @property
    def endpoint(self) -> str:
        """The address that clients connect to, with the port that was bound; from `start` on."""
        return self._intake.endpoint

    # ── calls through `loop_calls` ─────────────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        """On the loop thread: the state of the whole server now."""
        tenants = self.tenants.values()
        seen = gather([tenant.snapshot() for tenant in tenants])
        first = next(iter(tenants))
        own = {"queues", "counters"}
        rest = {k: v for k, v in msgspec.structs.asdict(seen).items() if k not in own}
        return Snapshot(
            **rest,
            server=server_version(),
            name=first.identity.name,
            mover=first.identity.mover,
            lanes=str(self.lanes),
            num_lanes=self.lanes.num_open,
            fleets=fleets_of([one.identity for one in tenants]),
            endpoint=self.endpoint,
            epoch=first.store.epoch,
            uptime_s=first.store.uptime_s,
            draining=first.handlers.draining,
            connections=self._auth.num_connections,
            queues=msgspec.structs.replace(
                seen.queues,
                turns=self._serving.num_waiting,
                copies=self.copier.turns.num_waiting,
                copy_bytes=self.copier.turns.num_bytes,
            ),
            private_bytes=self._private_memory.grown(),
            accounts=dict(self._accounts()),
            ailing=self._guard.ailing + self._ended_threads(),
            counters=seen.counters
            | self._auth.all_counters()
            | self.lanes.counters
            | dict(self._guard.counters),
        )

    def _stop_threads(self) -> None:
        self._moves.close()
        self._disk_threads.stop()
        if self._bucket is not None:
            self._bucket.stop()

    def _ended_threads(self) -> list[str]:
        """One line for each kind of thread that has ended before the server."""
        lines = []
        if dead := self._disk_threads.num_dead:
            lines.append(f"{dead} disk threads have ended")
        if self._bucket is not None and (dead := self._bucket.num_dead):
            lines.append(f"{dead} threads of the bucket have ended")
        if self._population is not None and self._population.failed:
            lines.append("the thread that populates the memory has failed")
        return lines

    def tiers(self) -> dict[str, TierStats]:
        """Occupancy by tier, all tenants together."""
        return tiers_of([tenant.store.tier_stats() for tenant in self.tenants.values()])

    def _server_counters(self, tenant: TenantConfig) -> ChainMap[str, int]:
        """Counters of the server that are shown to `tenant` beside its own."""
        of_tenant = self._auth.of_tenant[tenant.name]
        # The Counter is last: it has a zero for every name.
        return ChainMap(self._guard.counters, self.lanes.counters, of_tenant, self._auth.counters)

    @property
    def _bucket_files(self) -> int:
        return BUCKET_FILES if self.config.bucket else 0

    def _other_files(self, tenants: Sequence[TenantConfig]) -> int:
        """The most descriptors needed beside those of TCP connections."""
        each = LOCAL_FILES if self.config.shared_memory else 0
        segments = [t.disk // segment_bytes_for(t.disk) for t in tenants if t.disk]
        handshakes = most_handshakes(self.config.max_connections)
        own = OWN_FILES + lane_files(self.config) + self._bucket_files
        return own + each * len(tenants) + sum(segments) + handshakes

    # ── the loop, in parts ───────────────────────────────────────────────────────────────

    def _make_auth(
        self, router: "zmq.Socket[bytes]", loop: LoopContext, tenants: list[str]
    ) -> Authenticator:
        config = self.config
        return Authenticator(
            self._context, router, loop, config.max_connections,
            read_server_keys(config.keys) if config.keys else None,
            TenantKeys(config.tenants, tenants) if config.tenants else None, tenants,
        )  # fmt: skip

    def _open_feed(self) -> Feed:
        config, first = self.config, next(iter(self.tenants.values()))
        sources = {one.full_name(""): one.store.watch() for one in self.tenants.values()}
        feed = Feed(
            self._context, config.events, first.identity.name, sources, self._clock,
            as_maps=config.events_format == MAP,
        )  # fmt: skip
        self._poller.register(feed.replays, zmq.POLLIN)
        return feed

    def _handle_connections(self, events: Mapping[object, int]) -> None:
        """Connections that begin or end, on ZeroMQ, for lanes and on the local sockets."""
        run = self._guard.run
        run("authentication", partial(self._auth.handle, events), None)
        run("connections that ended", self._intake.forget_gone, None)
        run("connections of lanes", partial(self.lanes.handle, events), None)
        for tenant in self.tenants.values():
            tenant.handle_local(events)

    def _serve_requests(self) -> bool:
        self._intake.forget_gone()
        return self._serving.serve()

    def _take_in(self) -> None:
        try:
            self._intake.take_in()
        except Flooded:
            self._start_over("a message has more frames than can be dropped")

    def _start_over(self, why: str) -> None:
        log.error("all connections are closed: %s", why)
        try:
            self._intake.start_over()
        except ServerFailed as error:
            log.error("%s; the server ends", error)
            self._failure = error
            self.leave()
        self._private_memory.given_back(self._clock())

    def _patience_ms(self, more_to_do: bool) -> int:
        if more_to_do:
            return 0
        tenants = self.tenants.values()
        if any(tenant.send_queues.stuck for tenant in tenants):
            return STUCK_RETRY_MS
        if self._drain_until is not None or any(tenant.awaits_bytes for tenant in tenants):
            return RELEASE_MS
        if self.feed is not None and self.feed.is_waiting:
            return RELEASE_MS
        if any(tenant.local is not None and tenant.local.is_resting for tenant in tenants):
            return RELEASE_MS
        if any(tenant.local is not None and tenant.local.pending for tenant in tenants):
            return PENDING_MS
        if self._auth.is_shut or self.lanes.is_waiting:
            return PENDING_MS
        return WATCH_MS if self._auth.num_connections else IDLE_MS

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        busy = self._serving.num_waiting or self.copier.busy
        quiet = not (busy or any(tenant.busy for tenant in self.tenants.values()))
        return quiet or self._clock() >= self._drain_until

    def _check_periodically(self, idle: bool) -> None:
        now = self._clock()
        num_connections = self._auth.num_connections
        if why := self._private_memory.why_beyond(now, num_connections, self._accounts):
            self._start_over(why)
        self._upkeep.run(now, idle=idle)

    def _accounts(self) -> Mapping[str, int]:
        """The bytes of private memory that are accounted for, by their use."""
        known: Counter[str] = Counter()
        for tenant in self.tenants.values():
            known.update(tenant.private_bytes)
        known["replies"] += self._held.num_bytes
        known["requests"] += self._serving.num_bytes
        if self._bucket is not None:
            known.update(self._bucket.room.taken)
        return known

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signalled:
            self.leave()
            return
        self._signalled = True  # first of all: the next signal may interrupt this function
        self.drain()
        log.info(
            "%s: draining for up to %gs; a second signal ends it at once",
            signal.Signals(number).name, self.config.drain_timeout_s,
        )  # fmt: skip

    # ── without tenants ──────────────────────────────────────────────────────────────────

    @property
    def store(self) -> Store:
        """Of the first tenant; without tenants, of all clients."""
        return next(iter(self.tenants.values())).store

    @property
    def leases(self) -> Leases:
        """Of the first tenant; without tenants, of all clients."""
        return next(iter(self.tenants.values())).leases

    # ── in a test ────────────────────────────────────────────────────────────────────────

    def wait_until_drained(self, timeout_s: float) -> bool:
        """After `drain`: whether serving ended within `timeout_s`."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        self._thread = threading.Thread(target=self.serve, name="server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self.leave()
        self._thread.join()
        self.stop()
