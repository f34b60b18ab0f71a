"""A tenant's part of the server: storage, queues, transports and request handlers.

Tenants share only the loop and the socket. A request can therefore find, evict, pin or clear only
its own tenant's blocks, under any name, and a quota is the budget of a tier. Without tenants one of
these serves all clients.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec
import zmq

from remote_server.plain_text import FewLines
from remote_server.server.config import TenantConfig
from remote_server.server.entrance.hellos import PeerCheck
from remote_server.server.lanes.transport import LaneTransport
from remote_server.server.meters import Meters
from remote_server.server.reports.identity import Identity, default_name
from remote_server.server.reports.recording import Recorder
from remote_server.server.reports.snapshot import MAX_HOLDERS, Held, Part, Queues, Recovery
from remote_server.server.requests.dispatch import Handlers
from remote_server.server.requests.transports import Transports
from remote_server.server.sending.bounds import HeldByOne, InFlight
from remote_server.server.sending.replies import Replies
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.shm.endpoint import LocalSocket
from remote_server.server.shm.fills import Fills
from remote_server.server.shm.leases import Leases
from remote_server.server.shm.regions import Regions
from remote_server.server.shm.transport import ShmTransport
from remote_server.server.tenant.context import ServerContext
from remote_server.server.tenant.storage import Storage
from remote_server.server.transfer import get, put
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.hot_keys import HotKeys
from remote_server.server.transfer.put import Puts
from remote_server.server.zmq.transport import ZmqTransport
from remote_server.store.eviction.report import eviction_stats
from remote_server.turns import Steps, none_in

log = logging.getLogger(__name__)


class Tenant:
    """One tenant's storage, and its clients' requests. One thread."""

    def __init__(
        self,
        config: TenantConfig,
        server: ServerContext,
        server_counters: Mapping[str, int],
        go_on_later: "Callable[[Tenant, bytes, Steps[None]], None]",
    ) -> None:
        """Maps the memory and opens the disk; `close` releases both. `server_counters` are shown
        beside its own. `go_on_later` queues the remaining steps of a request when the disk has been
        read. Raises `ConfigError`, and then nothing is held."""
        self.config = config
        self.label = f"{config.name}: " if config.name else ""
        """The prefix of its log lines; empty without tenants."""
        self._server_counters = server_counters
        self._guard = guard = server.loop.guard
        clock = server.loop.clock
        self.storage = Storage(config, server)
        self.store = store = self.storage.store
        memory = store.memory

        # Replies
        self._meters = Meters(store.namespaces.known.__contains__)
        knows = server.lanes.connections.knows
        self.send_queues = SendQueues(server.router, memory.unpin_all, server.held, guard, knows)
        later = partial(go_on_later, self)
        replies = Replies(store, self.send_queues, self._meters, guard, later)

        # Puts and gets
        self.leases = Leases(memory.unpin_all, clock)
        self.fills = Fills(server.moves, guard)
        self.regions = Regions(store.counters, self.leases, self.fills, self.storage.arena)
        self.local = self._listen_locally(server) if server.config.shared_memory else None
        name = server.config.name or default_name()
        self.identity = Identity(
            name, store, clock, lambda: self.handlers.draining, self._all_counters,
            self.storage.bucket_stats,
        )  # fmt: skip
        in_flight = InFlight(memory, server.config.max_inflight)
        self.puts = Puts(store, replies, none_in(put.UNENDED), self.identity.load)
        hot_keys = HotKeys(clock, store.tier_stack.explain)
        self.gets = Gets(
            store, self.send_queues, in_flight, replies, none_in(get.UNENDED), hot_keys
        )
        self.transports = Transports(
            LaneTransport(self.puts, self.gets, server.copier, server.lanes, config.name),
            ShmTransport(self.puts, self.gets, self.regions, self.local),
            ZmqTransport(self.puts, self.gets, server.copier, config.name),
        )

        # Requests
        peers = PeerCheck(FewLines(log, clock), name, in_flight.per_client)
        self.handlers = Handlers(
            config, store, replies, self.transports, self.identity, peers,
            Recorder(clock, self._declared_bytes),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Empty without tenants."""
        return self.config.name

    @property
    def busy(self) -> bool:
        """Something is under way that a drain waits for."""
        return bool(
            self.store.tier_stack.busy
            or self.send_queues.waiting
            or self.send_queues.in_flight
            or self.send_queues.on_lanes
            or any(transport.busy for transport in self.transports)
        )

    @property
    def awaits_bytes(self) -> bool:
        """Frames or reads of the bucket are under way, whose end or lateness is no event."""
        return self.storage.awaits_bytes or self.send_queues.in_flight

    @property
    def private_bytes(self) -> dict[str, int]:
        """Memory beside the arena, replies excluded, by its use."""
        return self.storage.private_bytes | {
            "puts": self.transports.zmq.uncopied.total,
            "recording": self.handlers.recorder.num_bytes,
        }

    def _declared_bytes(self, namespace: str) -> int:
        known = self.store.namespaces.known.get(namespace)
        return 0 if known is None else known.block_bytes

    def full_name(self, namespace: str) -> str:
        """`namespace`, made unique among all tenants."""
        return f"{self.name}/{namespace}" if self.name else namespace

    def _held(self) -> Held:
        """What its connections hold now."""
        connections = self.send_queues.holders()
        for client, uncopied in self.transports.zmq.uncopied.items():
            before = connections.get(client, HeldByOne(connection=client.hex()))
            connections[client] = msgspec.structs.replace(before, uncopied=uncopied)
        everybody = connections.values()
        return Held(
            gathered=sum(one.gathered for one in everybody),
            replies=sum(one.replies for one in everybody),
            streams=sum(one.streams for one in everybody),
            uncopied=self.transports.zmq.uncopied.total,
            fingerprints=self.store.namespaces.text_bytes,
            largest=sorted(everybody, key=HeldByOne.total, reverse=True)[:MAX_HOLDERS],
        )

    def snapshot(self) -> Part:
        """On the loop thread: its state now."""
        store, disk = self.store, self.storage.disk
        replies, streams = self.send_queues.num_waiting()
        traffic, namespaces = self._meters.traffic(), store.namespaces.stats()
        learned = eviction_stats(self.storage.learner)
        what_if = self.storage.follower.what_if(by_namespace=False)
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
            puts={**self.puts.in_state},
            gets={**self.gets.in_state},
            recovery=Recovery(
                segments=disk.tier.recovery.scanning if disk is not None else 0,
                blocks=disk.tier.num_unverified() if disk is not None else 0,
            ),
            held={self.config.name: self._held()},
            tiers=store.tier_stats(),
            namespaces={self.full_name(name): one for name, one in namespaces.items()},
            traffic={self.full_name(name): one for name, one in traffic.items()},
            operations=self._meters.timings(),
            counters=self._counters() | {"lookup_pending": self._meters.pending_keys},
            engines=[
                msgspec.structs.replace(one, namespace=self.full_name(one.namespace))
                for one in self.identity.engines()
            ],
            bucket=self.storage.bucket_stats(),
            eviction={self.config.name: learned} if learned is not None else {},
            what_if={self.config.name: what_if} if what_if is not None else {},
        )

    def _counters(self) -> dict[str, int]:
        """All counts since the start, by the names of PROTOCOL.md."""
        counters = self.store.all_counters()
        counters["bytes_out"] = self.send_queues.bytes_out
        counters["clients_gone"] = self.send_queues.clients_gone
        return counters

    def _all_counters(self) -> dict[str, int]:
        return self._counters() | dict(self._server_counters)

    def forget(self, clients: frozenset[bytes]) -> None:
        """The connections of these clients have ended, and their requests were dropped. They need
        not be of this tenant."""
        self._meters.forget(clients)
        for client in clients:
            self.identity.gone(client)
            self.send_queues.forget(client)

    def start_over(self, router: "zmq.Socket[bytes]") -> None:
        """`router` replaces the socket: all connections have ended, and all requests that waited
        were dropped."""
        self._meters.open.clear()
        self.identity.all_gone()
        self.send_queues.start_over(router)

    def finish_jobs(self) -> None:
        """Must be called whenever the threads of a tier woke the loop."""
        self.storage.finish_jobs(self._run)

    def handle_local(self, events: Mapping[object, int]) -> None:
        if self.local is not None:
            self._run("the local socket", partial(self.local.handle, events))

    def take_turn(self) -> bool:
        """Copy, send and release what is due. True when there is more to do at once."""
        more = False
        for transport in self.transports:
            more |= transport.take_turn(self._run)
        if self.send_queues.busy:
            more |= self._run("sending", self.send_queues.send_some)
            more |= self._run("unpinning", self.send_queues.release)
        if self.handlers.recorder.recording is not None:
            self._run("ending a recording", self.handlers.recorder.expire)
        return self.storage.take_turn(self._run) or more

    def _run(self, part: str, step: Callable[[], object]) -> bool:
        return bool(self._guard.run(f"{self.label}{part}", step, None))

    def drain_to_bucket(self) -> bool:
        """Take no more puts, and begin to write every complete pack, unless that is under way.
        False without a bucket."""
        has_bucket = self.storage.drain_to_bucket(lambda: not any(self.puts.in_state.values()))
        self.handlers.draining = self.handlers.draining or has_bucket
        return has_bucket

    def leave(self) -> None:
        """Before the socket closes: detach clients on this host, drop what waits to be sent."""
        if self.local is not None:
            self.local.close()
            self.local = None
        self.send_queues.cancel_all()

    def close(self) -> None:
        """Must be called when libzmq holds nothing of the arena any more."""
        self.leave()
        self.storage.close()

    def _listen_locally(self, server: ServerContext) -> LocalSocket | None:
        arena, needs_secret = self.storage.arena, bool(self.config.keys)
        try:
            return LocalSocket(
                server.loop, arena, self.store.epoch, self.regions, needs_secret=needs_secret
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
