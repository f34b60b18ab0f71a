"""Membership: the servers of a fleet's list, and of the lists before it.

A list may change while requests are under way: each request keeps the view with which it began.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from remote_server.client import ClientConfig, IoThread, RemoteClient
from remote_server.fleet.server import FleetServer
from remote_server.fleet.server_list import Member, ServerList, WatchedList
from remote_server.fleet.view import View
from remote_server.process_limits import make_room_for
from remote_server.protocol import EngineReport

logger = logging.getLogger(__name__)

PREVIOUS_LIST_S = 3600.0
"""After a change of the list the homes by the list before are looked up for so long."""

# Pause between two looks at a list's file.
LIST_CHECK_S = 1.0

# A data connection that is idle for so long is closed: an engine keeps few of many servers busy.
IDLE_CLOSE_S = 60.0

# Descriptors of a server with all its connections; 14 were measured with libzmq 4.3.5.
FILES_PER_SERVER = 15


class Membership:
    """Makes and closes the clients of the servers, on one I/O thread. For any thread."""

    def __init__(
        self,
        servers: WatchedList,
        config: ClientConfig,
        clock: Callable[[], float],
        on_lost: Callable[[FleetServer], None],
    ) -> None:
        """`config` is that of each client but for its server. `on_lost` receives each server that
        is not used any more. Raises `ConfigError`."""
        self._watched = servers
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._io = IoThread()
        self._changing = threading.RLock()
        self._declared: dict[str, tuple[int, Mapping[str, str]]] = {}
        self._region: tuple[memoryview, int] | None = None
        self._report: EngineReport | None = None
        self._members: dict[str, Member] = {}
        """As each server was connected to last, by name."""
        self._dropped: list[RemoteClient] = []
        """Clients that are ending. Their counters change until they have ended."""
        self._past_counters: Counter[str] = Counter()
        """Of those that have ended."""
        self._closing = threading.Event()
        first = servers.current
        num = len(first.members)
        make_room_for(FILES_PER_SERVER * num, f"a list of {num} servers")
        try:
            connected = {one.name: self._connect(one, first) for one in first.members}
        except BaseException:
            self._io.close(1.0)
            raise
        self.view = View(connected, first)
        """Replaced as a whole when the list changes."""
        if servers.follows_a_file:
            threading.Thread(target=self._watch, name="kvferry-list", daemon=True).start()

    def _connect(self, member: Member, servers: ServerList) -> FleetServer:
        """A server that has joined the list, with all that was declared."""
        share = max(self._config.get_window_bytes // len(servers.members), self._config.batch_bytes)
        config = replace(
            self._config, endpoint=member.endpoint, keys=member.keys, server_name=member.name,
            fleet_digest=servers.digest, get_window_bytes=share, idle_close_s=IDLE_CLOSE_S,
        )  # fmt: skip
        client = RemoteClient(config, clock=self._clock, io=self._io)
        if self._region is not None:
            client.register(*self._region)
        for namespace, (block_bytes, fingerprint) in self._declared.items():
            client.declare(namespace, block_bytes, fingerprint)
        if self._report is not None:
            client.report(self._report)
        self._members[member.name] = member
        return FleetServer(member.name, client, self._clock)

    def _watch(self) -> None:
        while not self._closing.wait(LIST_CHECK_S):
            try:
                if (changed := self._watched.changed()) is not None:
                    self.use(changed)
                self.drop_old_servers()
            except Exception:
                logger.exception("could not follow the list of servers")

    def use(self, servers: ServerList) -> None:
        """Place by `servers` from now on. Those that left, and have ever replied, are looked up for
        `PREVIOUS_LIST_S`."""
        with self._changing:
            old = self.view
            known, dropped = {}, []
            for member in servers.members:
                server = old.servers.get(member.name)
                if server is None or self._members[member.name] != member:
                    dropped += [server] if server is not None else []
                    server = self._connect(member, servers)
                known[member.name] = server
            gone = [one for name, one in old.servers.items() if name not in known]
            # One that has never replied was given no block by this client.
            left = {one.name: one for one in gone if one.client.epoch is not None}
            dropped += [one for one in gone if one.client.epoch is None]
            until_s = self._clock() + PREVIOUS_LIST_S
            before = {place.names: until for until, place in old.previous}
            before[old.current.names] = until_s
            before.pop(tuple(one.name for one in servers.members), None)
            self.view = View(known | left, servers, [(at, names) for names, at in before.items()])
            for server in dropped:
                self._drop(server)
        joined = sorted(known.keys() - old.servers.keys())
        logger.info(
            "the list has %d servers now; joined: %s; left: %s",
            len(known), ", ".join(joined) or "none", ", ".join(sorted(left)) or "none",
        )  # fmt: skip

    def drop_old_servers(self) -> None:
        """Close the servers that no list names which is still asked."""
        with self._changing:
            view, now_s = self.view, self._clock()
            before = [(until, one.names) for until, one in view.previous if now_s < until]
            if len(before) == len(view.previous):
                return
            named = {*view.current.names, *(name for _, names in before for name in names)}
            kept = {name: one for name, one in view.servers.items() if name in named}
            self.view = View(kept, view.list, before)
            for server in view.servers.values():
                if server.name not in named:
                    self._drop(server)

    def _drop(self, server: FleetServer) -> None:
        self._on_lost(server)
        server.client.close(0)
        self._dropped.append(server.client)

    def exclude(self, name: str, why: str) -> None:
        """Use the server `name` no more."""
        server = self.view.servers.get(name)
        if server is not None and not server.excluded:
            server.excluded = why
            logger.error("the server %s is not used: %s", name, why)
            self._on_lost(server)
            server.client.close(0)

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        with self._changing:
            self._declared[namespace] = (block_bytes, fingerprint)
            for server in self.view.servers.values():
                if not server.excluded:
                    server.client.declare(namespace, block_bytes, fingerprint)

    def forget(self, namespace: str) -> None:
        with self._changing:
            self._declared.pop(namespace, None)
            for server in self.view.servers.values():
                server.client.forget(namespace)

    def report(self, report: EngineReport) -> None:
        with self._changing:
            self._report = report
            for server in self.view.servers.values():
                server.client.report(report)

    def register(self, view: memoryview, fd: int) -> None:
        with self._changing:
            self._region = view, fd
            for server in self.view.servers.values():
                server.client.register(view, fd)

    def counters(self) -> dict[str, int]:
        """The sums over all servers, with those that have left."""
        with self._changing:
            for client in [one for one in self._dropped if one.closed]:
                self._dropped.remove(client)
                self._past_counters.update(client.counters())
            total = self._past_counters.copy()
            for client in [*(one.client for one in self.view.servers.values()), *self._dropped]:
                total.update(client.counters())
        return dict(total)

    def close(self, timeout_s: float) -> None:
        """End every request and the thread. Idempotent."""
        self._closing.set()
        for server in self.view.servers.values():
            server.client.close(0)
        self._io.close(timeout_s)
