"""The server's life: run → serve → start → (handle…) → drain → stop."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import zmq

from remote_server import protocol
from remote_server.config import ServerConfig, check_memory_fits, format_bytes
from remote_server.connections import Connections
from remote_server.copier import Copier, Gate
from remote_server.desk import Desk
from remote_server.errors import ConfigError
from remote_server.handlers import server_name
from remote_server.metering import MeteredHandlers, Meters
from remote_server.outbox import SEND_HIGH_WATER_MARK, Outboxes
from remote_server.shared.handlers import SharedHandlers
from remote_server.shared.leases import Leases
from remote_server.shared.local_socket import LocalSocket
from remote_server.shared.puts import SharedPuts
from remote_server.snapshot import Queues, Recovery, Snapshot
from remote_server.store.arena import Arena, warn_if_dev_shm_is_small
from remote_server.store.disk.admission import Admission, Admit, WriteBudget
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.disk.tier import DiskTier
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.store import Store

log = logging.getLogger(__name__)

# Low, because queued megabytes fall out of the CPU's cache before they are copied. Together with
# `keep_freed_memory` it took 1 MiB frames from 2-3 to about 5 GB/s.
RECEIVE_HIGH_WATER_MARK = 8

# Requests taken in before replies and streams get their turn again.
REQUESTS_PER_TURN = 16

# A peer that is silent for this long is gone: its queue is freed and its pins with it. An idle
# one is noticed by ZeroMQ's heartbeats. One that has stopped reading is not, because our ping
# would wait behind what it ignores: there TCP counts how long its window has been shut.
HEARTBEAT_INTERVAL_MS = 5_000
SILENCE_MS = 30_000

STUCK_RETRY_MS = 2  # when a client's queue is full; libzmq does not tell us when it is not
RELEASE_MS = 10  # when frames are on their way and nothing else happens
PENDING_MS = 100  # when somebody's time to attach is running
IDLE_MS = 1_000  # also how much later than promised a lease may end

CHECK_INTERVAL_S = 10.0
CHECK_MAX_BLOCKS = 50_000  # about 30 ms, in which nobody is served
REPORT_INTERVAL_S = 60.0


class Server:
    """One cache server. `run()` in a process, or `with Server(config) as server:` in a test.

    One thread owns the socket, the store and the queues, and copies; a second one populates the
    arena and ends.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.endpoint = ""
        self._clock = clock
        self._leave = threading.Event()
        self._drain_until: float | None = None
        self._signalled = False
        self._thread: threading.Thread | None = None

    # ── life ─────────────────────────────────────────────────────────────────────────────

    def run(self, on_ready: Callable[["Server"], None]) -> None:
        """Serve until a signal: the first SIGINT or SIGTERM drains, the second leaves at once.

        Raises `ConfigError` when it cannot start. Must run on the main thread.
        """
        self.start()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
            on_ready(self)
            self.serve()
        finally:
            self.stop()

    def start(self) -> None:
        """Take the address and the memory. Clients may connect from here on."""
        check_memory_fits(self.config.memory)
        warn_if_dev_shm_is_small(self.config.memory)
        self._copier = Copier()
        self._disk = self._open_disk()
        try:
            self._context = zmq.Context()
            self._router = self._bind()
            self._arena = self._map()
        except BaseException:
            if self._disk is not None:
                self._disk.close()
            raise
        if self.config.populate:
            self._arena.populate()
        tier = MemoryTier(self._arena)
        disk = self._disk.tier if self._disk is not None else None
        self.store = Store(tier, self._clock, disk, self._admission(disk))
        self._outboxes = Outboxes(self._router, tier.unpin_all)
        self._poller = zmq.Poller()
        self._poller.register(self._copier.wakeup, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._connections.wakeup, zmq.POLLIN)
        self.leases = Leases(tier.unpin_all, self._clock)
        self._shared_puts = SharedPuts(self._arena, self._copier.gate)
        self._shared = SharedHandlers(self.store, self._shared_puts, self._arena, self.leases)
        self._local = self._listen_locally() if self.config.shared_memory else None
        name = self._local.name if self._local is not None else ""
        self._meters = Meters(self.store.namespaces.__contains__)
        self._handlers = MeteredHandlers(
            self._meters, self.store, self._copier, self._outboxes, self._shared, name
        )
        self.desk = Desk(self._copier.wake)
        self._next_check = self._clock() + CHECK_INTERVAL_S
        self._next_report = self._clock() + REPORT_INTERVAL_S
        self._reported: dict[str, int] = {}

    def serve(self) -> None:
        """Answer requests until told to leave, or drained."""
        try:
            self._serve()
        finally:
            self.desk.close()

    def _serve(self) -> None:
        more_to_do = False
        while not self._leave.is_set() and not self._drained():
            events = dict(self._poller.poll(self._patience_ms(more_to_do)))
            if self._copier.wakeup.fileno() in events:
                self._copier.drain_wakeup()
                if self.store.waterfall is not None:
                    self.store.waterfall.finish_jobs()
            if self._local is not None:
                self._local.handle(events)
            if self._router in events:
                self._handle_requests()
            more_to_copy = self._copier.copy_some()
            more_to_copy |= self._shared_puts.copy_some()
            more_to_do = self._outboxes.send_some() or more_to_copy
            self._outboxes.release()
            self._shared.expire_leases()
            if self._connections.wakeup in events:
                self._connections.read_events()
            self.desk.answer_one()
            self._apply_back_pressure()
            self._look_after(idle=not events and not more_to_do)

    def drain(self) -> None:
        """From any thread or signal handler: decline puts, finish what is under way, return."""
        self._drain_until = self._clock() + self.config.drain_timeout_s
        self._handlers.draining = True
        self._copier.wake()

    def leave(self) -> None:
        """From any thread or signal handler: return from `serve` now."""
        self._leave.set()
        self._copier.wake()

    def stop(self) -> None:
        """Close everything; the memory goes back to the machine."""
        drained = not self._leave.is_set()
        self._copier.stop()
        if self._local is not None:
            self._local.close()
        self._outboxes.cancel_all()
        self._connections.close()
        # The last replies are still in libzmq when we drained; they get a moment to leave.
        self._router.close(linger=200 if drained else 0)
        self._context.term()
        if self._disk is not None:  # before the arena, which its threads read from and into
            self._disk.close()
        self._arena.close()

    # ── seeing inside, through `desk` ────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        """On the loop thread: everything that can be seen of this server now."""
        store, waterfall, disk = self.store, self.store.waterfall, self.store.disk
        replies, streams = self._outboxes.num_waiting()
        return Snapshot(
            server=server_name(),
            endpoint=self.endpoint,
            epoch=store.epoch,
            uptime_s=store.uptime_s,
            draining=self._handlers.draining,
            connections=len(self._connections),
            regions=store.counters["regions_attached"] - store.counters["regions_gone"],
            leases=len(self.leases),
            queues=Queues(
                requests=len(self._meters.open),
                copies=self._copier.num_jobs,
                copy_bytes=self._copier.queued_bytes,
                shared_puts=len(self._shared_puts),
                replies=replies,
                streams=streams,
                demotions=waterfall.num_to_demote if waterfall is not None else 0,
            ),
            recovery=Recovery(
                segments=disk.recovery.scanning if disk is not None else 0,
                blocks=disk.num_unverified() if disk is not None else 0,
            ),
            tiers=store.tier_stats(),
            namespaces=store.namespace_stats(),
            traffic=self._meters.traffic(),
            operations=self._meters.timings(),
            counters=self._handlers.counters()
            | {
                "connections_opened": self._connections.opened,
                "lookup_pending": self._meters.pending_keys,
            },
        )

    # ── the loop, in parts ───────────────────────────────────────────────────────────────

    def _bind(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.router_mandatory = True  # tell us when a peer is gone or full, drop nothing
        router.linger = 0
        router.sndhwm = SEND_HIGH_WATER_MARK
        router.rcvhwm = RECEIVE_HIGH_WATER_MARK
        router.maxmsgsize = protocol.MAX_FRAME_BYTES
        router.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
        router.heartbeat_timeout = SILENCE_MS
        router.tcp_maxrt = SILENCE_MS
        router.ipv6 = "[" in self.config.bind
        self._connections = Connections(router)
        try:
            router.bind(self.config.bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            hint = "choose another port, or :* for any free one"
            if error.errno == zmq.EADDRINUSE:
                hint = f"another process listens there; stop it, or {hint}"
            raise ConfigError(f"bind: {self.config.bind}: {error.strerror}; {hint}") from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return router

    def _open_disk(self) -> OpenDisk | None:
        config = self.config
        if not config.disk:
            return None
        return OpenDisk(Path(config.disk), config.disk_bytes, self._copier.wake)

    def _admission(self, disk: DiskTier | None) -> Admission | None:
        if disk is None:
            return None
        config, found = self.config, sum(s.num_bytes for s in disk.segments.all)
        budget = WriteBudget(
            config.disk_write_rate, config.disk_bytes, config.disk_bytes - found, self._clock
        )
        return Admission(Admit(config.disk_admit), budget)

    def _map(self) -> Arena:
        try:
            return Arena(self.config.memory)
        except OSError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"memory: the kernel refuses {format_bytes(self.config.memory)}: {error.strerror}"
            ) from error

    def _listen_locally(self) -> LocalSocket | None:
        try:
            return LocalSocket(
                self._poller,
                self._arena,
                self.store.epoch,
                self._clock,
                attached=self._shared.region_attached,
                gone=self._shared.region_gone,
                refused=self._shared.region_refused,
            )
        except OSError as error:
            log.warning("no shared memory, clients on this host use TCP: %s", error)
            return None

    def _handle_requests(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            if self._copier.full:
                return
            # Asked rather than tried: an exception costs twenty times as much.
            if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            client = frames[0].bytes
            if self._outboxes.accepts(client):
                self._handlers.handle(client, [frame.buffer for frame in frames[1:]])
            else:
                self.store.counters["bad_messages_unread"] += 1

    def _apply_back_pressure(self) -> None:
        """While enough waits to be copied, requests stay in the kernel and the clients."""
        self._poller.modify(self._router, 0 if self._copier.full else zmq.POLLIN)

    def _patience_ms(self, more_to_do: bool) -> int:
        if more_to_do:
            return 0
        if self._outboxes.stuck:
            return STUCK_RETRY_MS
        if self._outboxes.in_flight or self._drain_until is not None:
            return RELEASE_MS
        if self._local is not None and self._local.pending:
            return PENDING_MS
        return IDLE_MS

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        quiet = not (
            self._copier.busy
            or self._shared_puts
            or (self.store.waterfall is not None and self.store.waterfall.busy)
            or self._outboxes.waiting
            or self._outboxes.in_flight
        )
        return quiet or self._clock() >= self._drain_until

    def _look_after(self, idle: bool) -> None:
        now = self._clock()
        if idle and now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            self._check()
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL_S
            self._report()

    def _check(self) -> None:
        if sum(tier.blocks for tier in self.store.tier_stats().values()) > CHECK_MAX_BLOCKS:
            return
        try:
            self.store.check()
        except AssertionError:
            self.store.counters["failed_checks"] += 1
            log.exception("the accounting does not add up: please report this as a bug")

    def _report(self) -> None:
        counters = self.store.all_counters()
        if counters == self._reported:
            return
        self._reported = counters
        memory = self.store.tier_stats()["memory"]
        log.info(
            "memory %s of %s in %d blocks, %d evicted; lookups %d of %d keys hit; gets %d of %d",
            format_bytes(memory.used_bytes), format_bytes(memory.budget_bytes), memory.blocks,
            counters["evicted"], counters["lookup_hits"], counters["lookup_keys"],
            counters["get_hit"], counters["get_total"],
        )  # fmt: skip

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signalled:
            self.leave()
            return
        self._signalled = True  # first of all: the next signal may interrupt this very function
        self.drain()
        log.info(
            "%s: draining for up to %gs; again to leave at once",
            signal.Signals(number).name,
            self.config.drain_timeout_s,
        )

    # ── in a test ────────────────────────────────────────────────────────────────────────

    @property
    def copy_gate(self) -> Gate:
        """Copying stands still while a test shuts this; everything else goes on."""
        return self._copier.gate

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self.leave()
        self._thread.join()
        self.stop()
