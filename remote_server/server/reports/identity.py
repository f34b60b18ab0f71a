"""Identity of a server: its version, its name, its load, and the lists of servers that its clients
have."""

import socket
from collections.abc import Callable, Iterable

from remote_server import protocol
from remote_server.native.mover import what_moves
from remote_server.protocol import (
    BucketStats,
    EngineState,
    Hello,
    ServerLoad,
    Stats,
    StatsReply,
    Welcome,
)
from remote_server.server.sending.times import wall_time_s
from remote_server.server.shm.endpoint import LocalSocket
from remote_server.store.eviction.report import eviction_stats
from remote_server.store.store import Store
from remote_server.values import wrong_server_name
from remote_server.version import version

LOAD_S = 0.1
"""The load is measured again after this time, so that a reply costs no pass over the slabs."""

MOST_NAMES = 64
"""Names of clients with one list, in statistics."""

MOST_ENGINES = 256
"""Engines in the statistics of a client: 50 KB."""


def server_version() -> str:
    """The program and its version, as peers and statistics show it."""
    return f"kvferry {version()}"


def default_name(host: str | None = None) -> str:
    """The first label of the name of `host`, or of this host; of a host with another kind of name
    `kvferry`."""
    label = (socket.gethostname() if host is None else host).partition(".")[0]
    return "kvferry" if wrong_server_name(label) else label


class Identity:
    """What one tenant's clients learn of the server, and it of their lists. One thread."""

    def __init__(
        self,
        name: str,
        store: Store,
        clock: Callable[[], float],
        is_draining: Callable[[], bool],
        counters: Callable[[], dict[str, int]],
        bucket: Callable[[], BucketStats | None],
    ) -> None:
        """`counters` and `bucket` are called for statistics."""
        self.name = name
        self.version = server_version()
        self.mover = what_moves()
        self._store = store
        self._clock = clock
        self._is_draining = is_draining
        self._counters = counters
        self._bucket = bucket
        self._lists: dict[bytes, tuple[str, str]] = {}  # by connection: digest, client
        self._engines: dict[bytes, EngineState] = {}  # by connection
        self._measured: ServerLoad | None = None
        self._measure_at = 0.0

    def met(self, connection: bytes, hello: Hello) -> None:
        """A client's hello was accepted."""
        if hello.fleet:
            self._lists[connection] = hello.fleet, hello.client
        else:
            self._lists.pop(connection, None)
        if (report := hello.report) is not None:
            self._engines[connection] = EngineState(
                namespace=hello.namespace, client=hello.client,
                model=hello.fingerprint.get("model_name", ""), software=report.software,
                prompt_tokens=report.prompt_tokens, reused=report.reused,
                given_up=report.given_up,
                tokens_per_s=report.tokens_per_s,
            )  # fmt: skip

    def gone(self, connection: bytes) -> None:
        """The connection has ended."""
        self._lists.pop(connection, None)
        self._engines.pop(connection, None)

    def all_gone(self) -> None:
        """All connections have ended."""
        self._lists.clear()
        self._engines.clear()

    def engines(self) -> list[EngineState]:
        """Those that are connected, each as it reported last."""
        return [*self._engines.values()]

    def fleets(self) -> dict[str, list[str]]:
        """By digest of a list: the names of up to `MOST_NAMES` connected clients that have it."""
        names: dict[str, set[str]] = {}
        for digest, client in self._lists.values():
            names.setdefault(digest, set()).add(client)
        return {digest: sorted(clients)[:MOST_NAMES] for digest, clients in names.items()}

    def welcome(
        self, hello: Hello, local: LocalSocket | None, max_lanes: int, lane_window_bytes: int
    ) -> Welcome:
        """The answer to a hello that was accepted. Its client may attach regions at `local`, and
        open so many lanes with so much under way."""
        return Welcome(
            request_id=hello.request_id,
            epoch=self._store.epoch,
            protocol=protocol.PROTOCOL_VERSION,
            server=self.version,
            max_keys=protocol.MAX_KEYS_PER_MESSAGE,
            max_frame_bytes=protocol.MAX_FRAME_BYTES,
            max_message_bytes=protocol.MAX_MESSAGE_BYTES,
            transports=["tcp"] if local is None else ["tcp", "shm"],
            draining=self._is_draining(),
            local_socket="" if local is None else local.name,
            local_secret=b"" if local is None else local.secret,
            ahead_bytes=self._store.read_ahead.most_bytes,
            name=self.name,
            load=self.load() if hello.fleet else None,
            max_lanes=max_lanes,
            lane_window_bytes=lane_window_bytes,
            packed_keys=True,
        )

    def stats(self, request: Stats, lanes: str) -> StatsReply:
        """The answer to `request`."""
        store = self._store
        return StatsReply(
            request_id=request.request_id,
            epoch=store.epoch,
            server=self.version,
            name=self.name,
            mover=self.mover,
            lanes=lanes,
            fleets=self.fleets(),
            engines=self.engines()[:MOST_ENGINES],
            uptime_s=store.uptime_s,
            time_s=wall_time_s(),
            tiers=store.tier_stats(),
            namespaces=store.namespaces.stats(texts=request.fingerprints),
            counters=self._counters(),
            bucket=self._bucket(),
            eviction=eviction_stats(store.memory.learner),
            what_if=store.what_if(by_namespace=request.fingerprints),
            protocol=protocol.PROTOCOL_VERSION,
        )

    def load(self) -> ServerLoad:
        """The load now."""
        now, load, is_draining = self._clock(), self._measured, self._is_draining()
        if load is None or now >= self._measure_at or load.draining is not is_draining:
            load = self._measured = self._measure(is_draining)
            self._measure_at = now + LOAD_S
        return load

    def _measure(self, is_draining: bool) -> ServerLoad:
        stack = self._store.tier_stack
        own = [stack.memory.stats(), *(t.stats() for t in stack.tiers if not t.is_remote)]
        used, budget = sum(t.used_bytes for t in own), sum(t.budget_bytes for t in own)
        return ServerLoad(
            fill=1000 * used // max(budget, 1),
            evicted_age_s=own[-1].evicted_age_s,
            up_s=self._store.uptime_s,
            draining=is_draining,
        )


def fleets_of(identities: Iterable[Identity]) -> dict[str, list[str]]:
    """`Identity.fleets` of all tenants together."""
    names: dict[str, set[str]] = {}
    for one in identities:
        for digest, clients in one.fleets().items():
            names.setdefault(digest, set()).update(clients)
    return {digest: sorted(clients)[:MOST_NAMES] for digest, clients in names.items()}
