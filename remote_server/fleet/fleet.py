"""Fleet: one client of several cache servers, none of which knows another.

Each run of a prompt has two servers as homes (`placement.py`). A lookup asks both homes of every
run at once, and the better reply wins. A put goes to one of them, a get to the one that has the
key. A list that changes moves few runs, and the homes by the previous list are asked as well for
an hour, so nothing that can be reached is lost.

Deadlines, breakers and connections are each server's own (`RemoteClient`): one that is lost or
silent costs its runs. All of them share one I/O thread.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from msgspec.structs import replace

from remote_server.client import (
    BreakerState,
    ClientConfig,
    GetOutcome,
    GetResult,
    PutResult,
    RemoteClient,
)
from remote_server.client.cache_client import CacheClient
from remote_server.client.cache_requests import GetRequest, LookupRequest, PutRequest
from remote_server.client.remote_client import future_of
from remote_server.errors import DeadlineExceeded, Stalled
from remote_server.fleet.holders import Holders
from remote_server.fleet.lookup import FleetLookup, Part
from remote_server.fleet.membership import Membership
from remote_server.fleet.server import FleetServer, roomier
from remote_server.fleet.server_list import WatchedList
from remote_server.fleet.transfers import (
    FleetGet,
    FleetPut,
    RowsPart,
    sum_up,
    unavailable,
)
from remote_server.fleet.view import View, ends_of, runs_in
from remote_server.protocol import EngineReport, Found, PutOutcome, StatsReply

# With `copies=head` the runs up to this token have two copies.
HEAD_TOKENS = 8192


class Fleet(CacheClient):
    """See `CacheClient`. Every method may be called from any thread."""

    places_by_run = True

    def __init__(
        self,
        servers: WatchedList,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is that of each client but for its server. Raises `ConfigError`."""
        self._clock = clock
        self._lock = threading.Lock()
        """Of the counts and of the servers' breakers of lookups."""
        self.holders = Holders()
        """Where each key was found or put."""
        self._counts = {"fleet_lookups": 0, "fleet_parts": 0, "fleet_second_home": 0}
        self.membership = Membership(servers, config, clock, self.holders.lost)
        """The servers, and how their list changes."""

    @property
    def _view(self) -> View:
        return self.membership.view

    # ── the servers ──────────────────────────────────────────────────────────────────────

    @property
    def clients(self) -> dict[str, RemoteClient]:
        """The client of each server, by its name."""
        return {name: one.client for name, one in self._view.servers.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return self._view.names

    @property
    def epochs(self) -> tuple[str | None, ...]:
        return tuple(one.client.epoch for one in self._view.servers.values())

    @property
    def are_ready(self) -> tuple[bool, ...]:
        return tuple(one.ready for one in self._view.servers.values())

    @property
    def breakers(self) -> tuple[BreakerState, ...]:
        return tuple(one.client.breaker for one in self._view.servers.values())

    def server_of(self, key: bytes) -> int:
        holder = self.holders.get(key)
        return 0 if holder is None else self._view.numbers.get(holder, 0)

    def exclude(self, name: str, why: str) -> None:
        self.membership.exclude(name, why)

    @property
    def ready(self) -> bool:
        return any(one.ready for one in self._view.servers.values())

    @property
    def absent(self) -> bool:
        return all(one.client.absent or one.excluded for one in self._view.servers.values())

    @property
    def transport(self) -> str:
        here = (one.client.transport for one in self._view.servers.values())
        return "shm" if "shm" in here else "tcp"

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        self.membership.declare(namespace, block_bytes, fingerprint)

    def forget(self, namespace: str) -> None:
        self.membership.forget(namespace)

    def report(self, report: EngineReport) -> None:
        self.membership.report(report)

    def register(self, view: memoryview, fd: int) -> None:
        self.membership.register(view, fd)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def send_lookup(self, asked: LookupRequest) -> "Future[Found]":
        future = future_of(Found)
        view, now_s, parts = self._view, self._clock(), dict[FleetServer, Part]()
        keys = asked.keys
        runs, away = [*runs_in(keys, asked.anchors)], list[range]()
        for anchor, run in runs:
            for server in view.all_homes(asked.namespace, anchor, now_s):
                left_s = self._left_s(server, asked, keys[run.start])
                if not left_s:
                    away.append(run)
                    continue
                part = parts.get(server)
                if part is None:
                    part = parts[server] = Part(server, left_s)
                part.add(run, keys, asked.chain)
        merged = FleetLookup(future, keys, asked.on_late, self.holders.learn, self.holders.forget)
        merged.expects([*parts.values()], away)
        if asked.anchors:
            future.add_done_callback(lambda _: self._note_homes(runs, keys))
        with self._lock:
            self._counts["fleet_lookups"] += 1
            self._counts["fleet_parts"] += len(parts)
        for part in parts.values():
            of_part = replace(
                asked, keys=part.keys, chain=part.chain, timeout_s=part.timeout_s, anchors=(),
                on_late=partial(self._late, merged, part, now_s),
            )  # fmt: skip
            reply = part.server.client.send_lookup(of_part)
            reply.add_done_callback(partial(self._found, merged, part, now_s))
        return future

    def _note_homes(self, runs: Sequence[tuple[bytes, range]], keys: Sequence[bytes]) -> None:
        """A lookup has ended: the runs whose first keys were found go on where these are."""
        for anchor, run in runs:
            if (holder := self.holders.get(keys[run.start])) is not None:
                self.holders.goes_on(anchor, holder)

    def _left_s(self, server: FleetServer, asked: LookupRequest, key: bytes) -> float:
        """How long a lookup waits for this server, 0 if not at all. One that is late is probed as
        well."""
        with self._lock:
            if not server.can_be_looked_up():
                return 0.0
            left_s = server.lookups.left_s(asked.timeout_s)
            probes = server.lookups.take_probe()
        if probes:
            probe = server.client.lookup(asked.namespace, [key], timeout_s=asked.timeout_s)
            probe.add_done_callback(partial(self._probed, server))
        return left_s

    def _probed(self, server: FleetServer, reply: "Future[Found]") -> None:
        with self._lock:
            server.lookups.probed(in_time=reply.exception() is None)

    def _found(
        self, merged: FleetLookup, part: Part, sent_s: float, reply: "Future[Found]"
    ) -> None:
        error = reply.exception()
        if error is None or isinstance(error, DeadlineExceeded):
            with self._lock:
                part.server.lookups.ended(in_time=error is None, sent_s=sent_s)
        if error is None:
            merged.answered(part, reply.result())
        else:
            merged.failed(part, error)

    def _late(self, merged: FleetLookup, part: Part, sent_s: float, found: Found) -> None:
        with self._lock:
            part.server.lookups.replied_late(self._clock() - sent_s)
        merged.late(part, found)

    def send_put(self, asked: PutRequest) -> "Future[PutResult]":
        """Each run goes to the home that has its beginning, else to the roomier one; of a list with
        `copies=head` the runs of the first 8,192 tokens go to both, if `chain` has their places. A
        `hot` run goes to the home that does not have it."""
        future = future_of(PutResult)
        view, keys, hot = self._view, asked.keys, asked.hot
        ends = [*ends_of(asked.chain)] if view.list.copies_head and not hot else []
        chosen: dict[tuple[FleetServer | None, bool], RowsPart] = {}
        for anchor, run in runs_in(keys, asked.anchors):
            homes = [one for one in view.homes(asked.namespace, anchor) if one.takes_puts]
            if hot:
                holder = self.holders.get(keys[run.start])
                server = next((one for one in homes if one is not holder), None)
            else:
                server = self._home_of(anchor, homes)
            chosen.setdefault((server, False), RowsPart(server)).indices += run
            if ends and 0 < ends[run.start] <= HEAD_TOKENS:
                for other in homes:
                    if other is not server:
                        copy = chosen.setdefault((other, True), RowsPart(other, is_copy=True))
                        copy.indices += run
        parts = [*chosen.values()]

        def learn(server: FleetServer, indices: list[int]) -> None:
            self.holders.learn(server, [keys[index] for index in indices])

        merged = FleetPut(future, len(keys), parts, learn)
        for part in parts:
            if part.server is None:
                nothing: list[PutOutcome | None] = [None] * len(part.indices)
                merged.ended(part, PutResult(outcomes=nothing, error=unavailable()))
                continue
            put = part.server.client.send_put(asked.part(part.indices))
            put.add_done_callback(partial(_put_ended, merged, part))
        return future

    def _home_of(self, anchor: bytes, homes: Sequence[FleetServer]) -> FleetServer | None:
        """Where a run of these homes is put. Its next rows follow, also before this put ends."""
        if not homes:
            return None
        home = self.holders.home_of(anchor)
        if home is None or home not in homes:
            home = roomier(*homes) if len(homes) == 2 else homes[0]
        self.holders.goes_on(anchor, home)
        return home

    def send_get(self, asked: GetRequest) -> "Future[GetResult]":
        """From the server that a lookup or a put has found to have the key, else from the first
        home that can be asked."""
        future = future_of(GetResult)
        view, keys = self._view, asked.keys
        chosen: dict[FleetServer | None, RowsPart] = {}
        holder_of, now_s, others = self.holders.get, self._clock(), 0
        for anchor, run in runs_in(keys, asked.anchors):
            homes = view.all_homes(asked.namespace, anchor, now_s)
            default = next((one for one in homes if one.ready), None)
            for index in run:
                server = holder_of(keys[index])
                if server is None or not server.ready:
                    server = default
                part = chosen.get(server)
                if part is None:
                    part = chosen[server] = RowsPart(server)
                part.indices.append(index)
                others += server is not homes[0]
        with self._lock:
            self._counts["fleet_second_home"] += others
        parts = [*chosen.values()]
        merged = FleetGet(
            future, len(keys), parts, self._clock, lambda one: view.numbers.get(one, 0)
        )
        for part in parts:
            if part.server is None:
                outcomes = [GetOutcome.UNAVAILABLE] * len(part.indices)
                merged.ended(part, GetResult([], outcomes, error=unavailable()))
                continue
            got = part.server.client.send_get(asked.part(part.indices))
            got.add_done_callback(partial(self._got, merged, part, asked.stall_s))
        return future

    def _got(
        self, merged: FleetGet, part: RowsPart, stall_s: float, got: "Future[GetResult]"
    ) -> None:
        result = got.result()
        if part.server is not None and isinstance(result.error, Stalled):
            with self._lock:
                part.server.lookups.was_late(self._clock() - stall_s)
        merged.ended(part, result)

    def send_touch(self, namespace: str, keys: list[bytes], timeout_s: float) -> "Future[int]":
        """At the servers that are known to have the keys; the others stay as they are."""
        future = future_of(int)
        chosen: dict[FleetServer, list[bytes]] = {}
        for key in keys:
            if (server := self.holders.get(key)) is not None and server.ready:
                chosen.setdefault(server, []).append(key)
        touched = [
            server.client.send_touch(namespace, some, timeout_s) for server, some in chosen.items()
        ]
        sum_up(future, touched)
        return future

    def send_stats(self, timeout_s: float, *, fingerprints: bool) -> "Future[StatsReply]":
        servers = [*self._view.servers.values()]
        server = next((one for one in servers if one.ready), servers[0])
        return server.client.send_stats(timeout_s, fingerprints=fingerprints)

    # ── this side ────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        return sum(one.client.queued_bytes for one in self._view.servers.values())

    def counters(self) -> dict[str, int]:
        return self.membership.counters() | self._counts

    def cancel_all(self, timeout_s: float) -> bool:
        ends_by_s = self._clock() + timeout_s
        in_time = True
        for server in self._view.servers.values():
            in_time &= server.client.cancel_all(max(0.0, ends_by_s - self._clock()))
        return in_time

    def close(self, timeout_s: float = 1.0) -> None:
        self.membership.close(timeout_s)

    @property
    def closed(self) -> bool:
        return all(one.client.closed for one in self._view.servers.values())


def _put_ended(merged: FleetPut, part: RowsPart, put: "Future[PutResult]") -> None:
    merged.ended(part, put.result())
