"""Channels of a client, each with its connection, and the operations over all of them.

Small requests, gets and puts have a connection each, so that a lookup never waits behind megabytes.
A fourth carries the messages of shared memory once a region is registered.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial

import zmq

from remote_server.client.channel import ClientContext
from remote_server.client.connection import Connection
from remote_server.client.control import ControlChannel
from remote_server.client.get import GetTransfer
from remote_server.client.put import PutTransfer
from remote_server.client.region import RegisteredRegion
from remote_server.client.requests import Ask
from remote_server.client.results import GetOutcome
from remote_server.client.shm_link import ShmChannel
from remote_server.client.tcp_gets import TcpGets
from remote_server.client.tcp_puts import TcpPuts
from remote_server.errors import KVFerryError
from remote_server.keys import read_client_keys


class Channels:
    """All channels of one client; `register` adds the one for shared memory. Used by the I/O thread
    only, except for the properties marked otherwise."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        client_context: ClientContext,
    ) -> None:
        self._context = context
        self._poller = poller
        self._client_context = client_context
        self._session = client_context.session
        self._config = client_context.config
        self._counters = client_context.counters
        self._clock = client_context.clock
        self._keys = read_client_keys(self._config.keys) if self._config.keys else None
        control, puts = self._connect(), self._connect()
        gets = self._connect(brings_blocks=True)
        self.connections: tuple[Connection, ...] = (control, gets, puts)
        self._needed = self.connections
        self.control = ControlChannel(control, client_context)
        self.gets = TcpGets(gets, client_context)
        self.puts = TcpPuts(puts, client_context)
        self.shared: ShmChannel | None = None

    def _connect(self, *, brings_blocks: bool = False) -> Connection:
        return Connection(
            self._context,
            self._poller,
            self._config,
            self._clock,
            self._keys,
            brings_blocks=brings_blocks,
        )

    def register(self, region: RegisteredRegion) -> None:
        """Add the channel for rows in `region`. Raises `OSError`, and then nothing has changed."""
        try:
            connection = self._connect()
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        try:
            self.shared = ShmChannel(region, connection, self._poller, self._client_context)
        except OSError:
            connection.close()
            raise
        self.connections = (*self.connections, connection)

    # ── state ────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[ControlChannel | TcpGets | TcpPuts | ShmChannel]:
        yield self.control
        yield from self._for_rows

    @property
    def _for_rows(self) -> tuple[TcpGets | TcpPuts | ShmChannel, ...]:
        """The channels with rows in transit, in the order of `connections[1:]`."""
        shared = () if self.shared is None else (self.shared,)
        return (self.gets, self.puts, *shared)

    @property
    def ready(self) -> bool:
        """Every required connection is up. Any thread may read it."""
        if not all(one.connected or one.reopening for one in self._needed):
            return False
        only_shared = self.shared is not None and self._config.transport == "shm"
        return not only_shared or self.transport == "shm"

    @property
    def transport(self) -> str:
        """Transport of rows in the registered region now. Any thread may read it."""
        return "shm" if self.shared is not None and self.shared.in_use else "tcp"

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all transfers that have not ended. Any thread may read it."""
        shared = self.shared.queued_bytes if self.shared is not None else 0
        return self.gets.queued_bytes + self.puts.queued_bytes + shared

    @property
    def wake_at(self) -> float:
        """Time at which something of them may be late, due or stuck."""
        return min(
            *(channel.wake_at for channel in self),
            *(connection.stuck_at for connection in self.connections),
        )

    @property
    def has_more(self) -> bool:
        """The next turn has work, whether or not anything comes."""
        return self.puts.has_more or (self.shared is not None and self.shared.has_more)

    @property
    def poll_again(self) -> bool:
        """A state may have changed that libzmq reports by no event."""
        return self.puts.is_settling or any(channel.blocked for channel in self)

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def accept(self, request: Ask | GetTransfer | PutTransfer, now: float) -> None:
        """Take over `request`, on its channel."""
        shared = self.shared
        request.deadline = now + request.timeout_s
        if isinstance(request, Ask):
            self.control.accept(request)
        elif isinstance(request, GetTransfer):
            if shared is not None and shared.takes(request):
                shared.gets.accept(request, now)
            else:
                self.gets.accept(request, now)
        elif shared is not None and shared.takes(request):
            shared.puts.accept(request)
        else:
            self.puts.accept(request)

    def copy_on(self) -> bool:
        """Copy one more step when nothing else is due: the rest of a turn takes a tenth of the time
        of its copy. Returns False when a full turn is due: the end of a lease frees space in the
        window, and the next blocks must be requested in this turn."""
        shared = self.shared
        if shared is None or not shared.gets.in_the_middle:
            return False
        if self.puts.has_more or shared.puts.has_more:
            return False
        if self.puts.is_settling or self._clock() >= min(self.wake_at, self._session.wake_at()):
            return False
        shared.gets.copy()
        return shared.gets.in_the_middle

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process what has come."""
        self.control.receive(now)
        self.gets.receive(now)
        self.puts.receive()
        if self.shared is not None:
            self.shared.receive(now, readable)

    def notice_losses(self, now: float) -> None:
        """End the requests of connections that broke. The loop handles the control connection."""
        for connection, channel in zip(self.connections[1:], self._for_rows, strict=True):
            if False in connection.changes(now):
                self._counters["disconnects"] += 1
                channel.lost()
        for connection in self.connections:
            if connection.stuck_at <= now:
                connection.reopen()

    def expire(self, now: float) -> None:
        """End what is late, and the puts whose rows libzmq has released."""
        self.puts.settle()
        for channel in self:
            channel.expire(now)

    def pump(self, now: float) -> None:
        """Send what connections and windows allow."""
        self.control.pump()
        self.gets.pump(now)
        self.puts.pump()
        if self.shared is not None:
            self.shared.pump(now)

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def ends(self, error: KVFerryError, outcome: GetOutcome) -> list[Callable[[], None]]:
        """The steps that end every put and get. Each must run even if another one fails."""
        steps = [partial(self.gets.end_all, error, outcome), partial(self.puts.end_all, error)]
        if self.shared is not None:
            steps.append(partial(self.shared.end_all, error, outcome))
        return [*steps]

    def end_transfers(self, error: KVFerryError, outcome: GetOutcome) -> None:
        """End every put and get."""
        for step in self.ends(error, outcome):
            step()

    def resets(self) -> list[Callable[[], None]]:
        """The steps that open new connections, with nothing attached. All requests have ended."""
        return [self.connections[0].reopen, *(channel.reset for channel in self._for_rows)]

    def close(self) -> None:
        """Close all connections. All requests have ended, except puts that wait for libzmq."""
        for connection in self.connections:
            connection.close()
        if self.shared is not None:
            self.shared.close()

    def check(self) -> None:
        """Assert that the books balance."""
        for channel in self:
            channel.check()
