"""A tenant's part of the server: memory, disk, queues and request handlers.

Tenants share only the loop and the socket. A request can therefore find, evict, pin or clear only
its own tenant's blocks, under any name, and a quota is the budget of a tier. Without tenants one of
these serves all clients.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import zmq

from remote_server.errors import ConfigError
from remote_server.native.moves import Moves
from remote_server.protocol import BucketStats
from remote_server.server.config import ServerConfig, TenantConfig
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.reports.bucket_calls import CallMeter, MeteredObjects
from remote_server.server.reports.recording import Recorder
from remote_server.server.reports.snapshot import MAX_HOLDERS, Held, Part, Queues, Recovery
from remote_server.server.requests.metrics import MeteredHandlers, Meters
from remote_server.server.sending.outgoing import Allowances, HeldByOne, InFlight
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.shm.endpoint import LocalSocket
from remote_server.server.shm.fills import Fills
from remote_server.server.shm.leases import Leases, Regions
from remote_server.server.transfer.copier import Copier
from remote_server.shm.mapping import Arena
from remote_server.store.bucket.drain import PackWalk
from remote_server.store.bucket.opening import OpenBucket, SharedBucket
from remote_server.store.bucket.sweep import Limits
from remote_server.store.bucket.transfers import Largest
from remote_server.store.bucket.writer import PacksBelow, PackWriter
from remote_server.store.curve.curve import MOST_NAMESPACES, Curve
from remote_server.store.curve.follower import Follower
from remote_server.store.disk.opening import OpenDisk, make_private
from remote_server.store.disk.pool import Threads
from remote_server.store.disk.tier import DiskTier
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.report import eviction_stats
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.policies import Admission, Admit, WriteBudget
from remote_server.store.store import Store
from remote_server.store.write_behind import Below
from remote_server.turns import Guard, Steps
from remote_server.values import format_bytes

log = logging.getLogger(__name__)

# A row of an index: 300 to 500 bytes, and its part of tables that grow by doubling.
BYTES_PER_BLOCK = 1024


class Tenant:
    """One tenant's store, in an arena of its own, and its clients' requests. One thread."""

    def __init__(
        self,
        config: TenantConfig,
        server_config: ServerConfig,
        router: "zmq.Socket[bytes]",
        poller: zmq.Poller,
        copier: Copier,
        moves: Moves,
        wake: Callable[[], None],
        clock: Callable[[], float],
        server_counters: Mapping[str, int],
        guard: Guard,
        threads: Threads,
        bucket: SharedBucket | None,
        held: Allowances,
        go_on_later: "Callable[[Tenant, bytes, Steps[None]], None]",
        lanes: ServerLanes,
    ) -> None:
        """Maps the memory and opens the disk; `close` releases both. Raises `ConfigError`, and then
        nothing is held. `held` counts what connections of all tenants hold. The end of a request, a
        copy or a region runs under `guard`; disk I/O runs on `threads`. `go_on_later` queues the
        remaining steps of a request when the disk has been read. `wake` makes the loop take a turn
        soon, from any thread."""
        self._guard = guard
        self.config = config
        self._poller = poller
        self._clock = clock
        self.bucket: OpenBucket | None = None
        self.drain: PackWalk | None = None
        """The last drain into the bucket."""
        self._bucket_calls = CallMeter(clock)
        self.learner = Learner(clock) if server_config.eviction == "learned" else None
        self.disk = self._open_disk(server_config, wake, threads)
        try:
            self.arena = self._map()
        except BaseException:
            self._close_tiers()
            raise
        tier = MemoryTier(
            self.arena, namespace_bytes=config.namespace_memory, clock=clock, learner=self.learner
        )
        disk = self.disk.tier if self.disk is not None else None
        below: list[Below | PacksBelow] = []
        if disk is not None:
            below.append(Below(disk, self._admission(server_config, disk)))
        if bucket is not None:
            largest = Largest(tier.slabs.slab_bytes, server_config.pack)
            self.bucket = self._open_bucket(server_config, bucket, wake, largest)
            rate = math.ceil(server_config.bucket_write_rate / bucket.num_tenants)
            budget = WriteBudget(rate, 0, 0, clock)
            below.append(PacksBelow(self.bucket.tier, Admit(server_config.bucket_admit), budget))
        self.follower = self._follow(tier, below)
        self.store = Store(tier, clock, below, config.ttl_s, guard, self.follower)
        in_flight = InFlight(tier, server_config.max_inflight)
        knows = lanes.connections.knows
        self.send_queues = SendQueues(router, tier.unpin_all, held, guard, knows)
        self.leases = Leases(tier.unpin_all, clock)
        self.fills = Fills(moves, guard)
        self.regions = Regions(self.store.counters, self.leases, self.fills, self.arena)
        self.local = self._listen_locally() if server_config.shared_memory else None
        self._meters = Meters(self.store.namespaces.known.__contains__)
        self.handlers = MeteredHandlers(
            self._meters,
            self.store, copier, self.send_queues, self.regions,
            self.local.name if self.local is not None else "",
            self.local.secret if self.local is not None else b"",
            tenant=config.name, prefixes=config.prefixes, in_flight=in_flight,
            server_counters=server_counters, later=partial(go_on_later, self),
            bucket=self._bucket_stats, name=server_config.name, lanes=lanes, guard=guard,
            recorder=Recorder(clock, self._declared_bytes),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Empty without tenants."""
        return self.config.name

    @property
    def label(self) -> str:
        """The prefix of its log lines; empty without tenants."""
        return f"{self.name}: " if self.name else ""

    @property
    def busy(self) -> bool:
        """Something is under way that a drain waits for."""
        return bool(
            self.fills.busy
            or self.store.tier_stack.busy
            or self.send_queues.waiting
            or self.send_queues.in_flight
            or self.send_queues.on_lanes
            or self.handlers.coming.total
        )

    @property
    def awaits_bytes(self) -> bool:
        """Frames or reads of the bucket are under way, whose end or lateness is no event."""
        reading = self.bucket is not None and self.bucket.tier.reads.are_under_way
        return reading or self.send_queues.in_flight

    @property
    def private_bytes(self) -> dict[str, int]:
        """Memory beside the arena, replies excluded, by its use."""
        rows = sum(tier.blocks for tier in self.store.tier_stats().values())
        known = {
            "index": rows * BYTES_PER_BLOCK,
            "namespaces": self.store.namespaces.text_bytes,
            "puts": self.handlers.uncopied.total,
            "eviction": self.learner.num_bytes if self.learner is not None else 0,
            "what-if": self.follower.num_bytes,
            "recording": self.handlers.recorder.num_bytes,
        }
        for way in self.store.tier_stack.below:
            if isinstance(way, PackWriter):
                known["packs"] = way.num_bytes
        return known

    def _declared_bytes(self, namespace: str) -> int:
        known = self.store.namespaces.known.get(namespace)
        return 0 if known is None else known.block_bytes

    def full_name(self, namespace: str) -> str:
        """`namespace`, made unique among all tenants."""
        return f"{self.name}/{namespace}" if self.name else namespace

    def _follow(self, memory: MemoryTier, below: Sequence[Below | PacksBelow]) -> Follower:
        """What shows this tenant's requests to models of other sizes."""
        budgets = {memory.name: self.config.memory}
        budgets |= {each.tier.name: each.tier.stats().budget_bytes for each in below}
        hazards = self.learner.hazards if self.learner is not None else None
        curve = Curve(self._clock, budgets, hazards, self._has_elsewhere, self.config.ttl_s)

        def rooms(block_bytes: int) -> dict[str, float]:
            places = {memory.name: memory.slabs.num_places(block_bytes)}
            places |= {each.tier.name: each.tier.num_places(block_bytes) for each in below}
            return {
                tier: float(number * block_bytes if number > 0 else budgets[tier])
                for tier, number in places.items()
            }

        return Follower(curve, self._clock, self.learner, rooms)

    def _has_elsewhere(self, namespace: str, key: bytes) -> bool:
        """Whether another namespace of this tenant has the block of `key`."""
        stack = self.store.tier_stack
        others = islice((name for name in stack.declared if name != namespace), MOST_NAMESPACES)
        tiers = [self.store.memory, *stack.tiers]
        return any(tier.has(name, key) for name in others for tier in tiers)

    def _held(self) -> Held:
        """What its connections hold now."""
        connections = self.send_queues.holders()
        for client, uncopied in self.handlers.uncopied.items():
            before = connections.get(client, HeldByOne(connection=client.hex()))
            connections[client] = msgspec.structs.replace(before, uncopied=uncopied)
        everybody = connections.values()
        return Held(
            gathered=sum(one.gathered for one in everybody),
            replies=sum(one.replies for one in everybody),
            streams=sum(one.streams for one in everybody),
            uncopied=self.handlers.uncopied.total,
            fingerprints=self.store.namespaces.text_bytes,
            largest=sorted(everybody, key=HeldByOne.total, reverse=True)[:MAX_HOLDERS],
        )

    def snapshot(self) -> Part:
        """On the loop thread: its state now."""
        store, disk = self.store, self.disk.tier if self.disk is not None else None
        replies, streams = self.send_queues.num_waiting()
        traffic, namespaces = self._meters.traffic(), store.namespaces.stats()
        learned = eviction_stats(self.learner)
        what_if = self.follower.what_if(by_namespace=False)
        return Part(
            regions=store.counters["regions_attached"] - store.counters["regions_gone"],
            leases=len(self.leases),
            queues=Queues(
                requests=len(self._meters.open),
                copies=0,
                copy_bytes=0,
                shared_puts=self.fills.num_waiting,
                replies=replies,
                streams=streams,
                demotions=store.tier_stack.num_to_demote,
            ),
            puts={**self.handlers.puts_in_state},
            gets={**self.handlers.gets_in_state},
            recovery=Recovery(
                segments=disk.recovery.scanning if disk is not None else 0,
                blocks=disk.num_unverified() if disk is not None else 0,
            ),
            held={self.config.name: self._held()},
            tiers=store.tier_stats(),
            namespaces={self.full_name(name): one for name, one in namespaces.items()},
            traffic={self.full_name(name): one for name, one in traffic.items()},
            operations=self._meters.timings(),
            counters=self.handlers.counters() | {"lookup_pending": self._meters.pending_keys},
            engines=[
                msgspec.structs.replace(one, namespace=self.full_name(one.namespace))
                for one in self.handlers.identity.engines()
            ],
            bucket=self._bucket_stats(),
            eviction={self.config.name: learned} if learned is not None else {},
            what_if={self.config.name: what_if} if what_if is not None else {},
        )

    def _bucket_stats(self) -> BucketStats | None:
        ways = (way for way in self.store.tier_stack.below if isinstance(way, PackWriter))
        return next((self._bucket_calls.stats(way) for way in ways), None)

    def forget(self, clients: frozenset[bytes]) -> None:
        """The connections of these clients have ended, and their requests were dropped. They need
        not be of this tenant."""
        self._meters.forget(clients)
        for client in clients:
            self.handlers.identity.gone(client)
            self.send_queues.forget(client)

    def start_over(self, router: "zmq.Socket[bytes]") -> None:
        """`router` replaces the socket: all connections have ended, and all requests that waited
        were dropped."""
        self._meters.open.clear()
        self.handlers.identity.all_gone()
        self.send_queues.start_over(router)

    def finish_jobs(self) -> None:
        """Must be called whenever the threads of a tier woke the loop."""
        if self.disk is not None or self.bucket is not None:
            self._guard.run(f"{self.label}the tiers", self.store.tier_stack.finish_jobs, None)
            self._bucket_calls.count()

    def handle_local(self, events: Mapping[object, int]) -> None:
        if self.local is not None:
            handle = partial(self.local.handle, events)
            self._guard.run(f"{self.label}the local socket", handle, None)

    def take_turn(self) -> bool:
        """Copy, send and release what is due. True when there is more to do at once."""
        run, label = self._guard.run, self.label
        more = False
        if self.fills.busy:
            more = run(f"{label}copying", self.fills.fill_some, False)
        if self.send_queues.busy:
            more |= run(f"{label}sending", self.send_queues.send_some, False)
            more |= run(f"{label}unpinning", self.send_queues.release, False)
        if self.handlers.lane_room.is_waited_for:
            more |= run(f"{label}beginning puts", self.handlers.lane_room.begin_some, False)
        if self.handlers.recorder.recording is not None:
            run(f"{label}ending a recording", self.handlers.recorder.expire, None)
        if self.regions.leases:
            run(f"{label}ending leases", self.regions.expire_leases, None)
        if self.bucket is not None:
            run(f"{label}late reads of the bucket", self.bucket.tier.reads.tick, None)
            run(f"{label}sweeping the bucket", self.bucket.sweep_some, None)
        if self.drain is not None:
            more |= run(f"{label}draining to the bucket", self.drain.take_turn, False)
        if self.config.ttl_s:
            run(f"{label}ageing", self.store.tier_stack.expire_some, None)
        run(f"{label}blocks that wait for room", self.store.tier_stack.write_again, None)
        return more

    def drain_to_bucket(self) -> bool:
        """Take no more puts, and begin to write every complete pack, unless that is under way.
        False without a bucket."""
        writer = next((w for w in self.store.tier_stack.below if isinstance(w, PackWriter)), None)
        if writer is None:
            return False
        self.handlers.draining = True
        if self.drain is None or self.drain.so_far.is_over:
            known = {name: one.block_bytes for name, one in self.store.namespaces.known.items()}
            namespaces = {**self.store.tier_stack.namespaces_below(), **known}
            self.drain = PackWalk(
                self.store.tier_stack, writer, namespaces, self._is_settled, self._clock
            )
        return True

    def _is_settled(self) -> bool:
        """Whether puts and the reading of the disk after a start have ended."""
        is_read = self.disk is None or self.disk.tier.recovery.done
        return is_read and not any(self.handlers.puts_in_state.values())

    def leave(self) -> None:
        """Before the socket closes: detach clients on this host, drop what waits to be sent."""
        if self.local is not None:
            self.local.close()
            self.local = None
        self.send_queues.cancel_all()

    def close(self) -> None:
        """Must be called when libzmq holds nothing of the arena any more."""
        self.leave()
        self._close_tiers()  # before the arena, which their threads read from and into
        self.arena.close()

    def _close_tiers(self) -> None:
        if self.bucket is not None:
            self.bucket.close()
        if self.disk is not None:
            self.disk.close()

    def _open_bucket(
        self, server_config: ServerConfig, bucket: SharedBucket, wake: Callable[[], None],
        largest: Largest,
    ) -> OpenBucket:  # fmt: skip
        ages = [age_s for age_s in (server_config.bucket_days * 86_400, self.config.ttl_s) if age_s]
        num_bytes = math.ceil(server_config.bucket_bytes / bucket.num_tenants)
        limits = Limits(num_bytes, min(ages, default=0.0), can_renew=not self.config.ttl_s)
        return OpenBucket(
            bucket, MeteredObjects(bucket.objects, self._bucket_calls), self.config.name,
            largest, server_config.pack_compress, limits, wake, self._guard,
            self._clock,
        )  # fmt: skip

    def _open_disk(
        self, server_config: ServerConfig, wake: Callable[[], None], threads: Threads
    ) -> OpenDisk | None:
        if not server_config.disk or not self.config.disk:
            return None
        path = Path(server_config.disk)
        # of its own, for its budget, and so that no other tenant's file is read
        if self.config.name:
            os.close(make_private(path))
            path /= f"tenant-{self.config.name}"
        return OpenDisk(path, self.config.disk, wake, self._guard, threads, learner=self.learner)

    def _admission(self, server_config: ServerConfig, disk: DiskTier) -> Admission:
        budget, found = self.config.disk, sum(s.num_bytes for s in disk.segments.all)
        rate = server_config.disk_write_rate
        if rate:  # each tenant its part
            rate = max(1, rate * budget // server_config.disk_bytes)
        saved = WriteBudget(rate, budget, budget - found, self._clock)
        return Admission(Admit(server_config.disk_admit), saved)

    def _map(self) -> Arena:
        try:
            return Arena(self.config.memory)
        except OSError as error:
            raise ConfigError(
                f"memory: the kernel refuses {format_bytes(self.config.memory)}: {error.strerror}"
            ) from error

    def _listen_locally(self) -> LocalSocket | None:
        try:
            return LocalSocket(
                self._poller,
                self.arena,
                self.store.epoch,
                self._clock,
                attached=self.regions.attached,
                gone=self.regions.gone,
                refused=self.regions.refused,
                displaced=self.regions.displaced,
                needs_secret=bool(self.config.keys),
                guard=self._guard,
            )
        except OSError as error:
            log.warning("no shared memory, clients on this host use TCP: %s", error)
            return None


def namespaces_named(
    tenants: Mapping[str, Tenant], full_name: str | None
) -> Iterator[tuple[Tenant, str]]:
    """The namespace with that full name, in its tenant's store; of all tenants all for None."""
    for each in tenants.values():
        for name in each.store.namespaces.names:
            if full_name in (None, each.full_name(name)):
                yield each, name
