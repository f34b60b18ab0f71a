"""Turns: requests in steps, the states of those that move blocks, and their order among tenants and
connections."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from time import thread_time
from typing import Generic, TypeVar

from remote_server.errors import RequestRefused

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""The rest of a request's work, and its result."""

# Keys of one step. A key costs up to 4 µs (put), mostly one: a millisecond at most.
KEYS_PER_STEP = 256

# The same for a lookup, whose keys cost 0.05 µs in memory and up to 1 µs with a disk and a ttl.
LOOKUP_KEYS_PER_STEP = 1024


def parts(items: Sequence[Item], size: int = 0) -> Iterable[Sequence[Item]]:
    """`items` in runs of one step each; a single run, perhaps empty, when they are few."""
    size = size or KEYS_PER_STEP
    if len(items) <= size:
        return (items,)
    return (items[first : first + size] for first in range(0, len(items), size))


def to_end(steps: Steps[Result]) -> Result:
    """Run all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


class Transfer:
    """One put or get. It is counted in its state from its first step until its end."""

    __slots__ = ("_in_state", "client", "request_id", "state")

    def __init__(
        self, client: bytes, request_id: int, state: StrEnum, in_state: dict[str, int]
    ) -> None:
        """`state` is the first one. `in_state` has the number of transfers in each state but the
        ends. Among the ends are REFUSED, DROPPED and FAILED."""
        self.client = client
        self.request_id = request_id
        self.state = state
        self._in_state = in_state

    def _begin(self) -> None:
        self._in_state[self.state] += 1

    def _enter(self, state: StrEnum) -> None:
        self._in_state[self.state] -= 1
        self._in_state[state] += 1
        self.state = state

    def _end(self, state: StrEnum, why: BaseException | str | None = None) -> None:
        """`state` is an end; abnormal if there is a reason, `why`."""
        self._in_state[self.state] -= 1
        if why is not None:
            log.debug(
                "%s %d of connection %s: %s, was %s: %s",
                type(self).__name__, self.request_id, self.client.hex(), state, self.state,
                str(why) or type(why).__name__,
            )  # fmt: skip
        self.state = state

    def _end_early(self, error: BaseException) -> None:
        """`error` ended a step: a refusal, GeneratorExit when the client has gone, or a defect."""
        states = type(self.state)
        if isinstance(error, RequestRefused):
            self._end(states["REFUSED"], error)
        elif isinstance(error, GeneratorExit):
            self._end(states["DROPPED"], error)
        else:
            self._end(states["FAILED"], error)


Work = TypeVar("Work")

# Head start of a tenant or connection that returns with work: it precedes those that waited all the
# time until it has had this much more than the least of them.
AHEAD_S = 0.001

# Connections that are remembered before stale ones are removed.
FEW_CONNECTIONS = 64


class _Place:
    """The time that a tenant, or a connection, has had, and its place among its peers."""

    __slots__ = ("had_s", "is_in_line")

    def __init__(self, had_s: float) -> None:
        self.had_s = had_s
        self.is_in_line = False
        """It has waiting work, and is in the line of its peers or has its turn."""


Placed = TypeVar("Placed", bound=_Place)


class _Line(Generic[Placed]):
    """A line of tenants or connections with waiting work, by the time they have had."""

    __slots__ = ("_heap", "_last", "_new", "least_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Placed]] = []
        self._new = count(-(1 << 62))
        self._last = count()
        self.least_s = 0.0
        """The time that the holder of the last turn had had. A newcomer starts with it."""

    def join(self, place: Placed) -> None:
        """Add one that had no waiting work, before those that have had the same time."""
        place.is_in_line = True
        heappush(self._heap, (max(self.least_s, place.had_s - AHEAD_S), next(self._new), place))

    def stay(self, place: Placed) -> None:
        """Add one that has had a turn and has more waiting work."""
        heappush(self._heap, (max(self.least_s, place.had_s), next(self._last), place))

    def next(self) -> Placed:
        """Remove and return the one whose turn it is."""
        self.least_s, _, place = heappop(self._heap)
        return place

    def clear(self) -> None:
        self._heap.clear()


class _Tenant(_Place):
    __slots__ = ("line", "num_bytes", "num_waiting")

    def __init__(self, had_s: float) -> None:
        super().__init__(had_s)
        self.line: _Line[_Connection] = _Line()
        self.num_waiting = 0
        self.num_bytes = 0


class _Connection(_Place):
    """The waiting work of one connection, in the order of arrival."""

    __slots__ = ("num_bytes", "tenant", "waiting")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__(tenant.line.least_s)
        self.tenant = tenant
        self.waiting: deque[tuple[object, int]] = deque()
        self.num_bytes = 0


class Turns(Generic[Work]):
    """Waiting work of all connections. One thread.

    A connection's work is done in the order of arrival. The time that a connection has had is
    remembered while others have had less, even when it has no waiting work: otherwise one that
    always has a single request in flight would always come first.
    """

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        """`clock` measures a step. A thread's own time, the default, stands still while the machine
        runs other processes, which are no connection's fault."""
        self._clock = clock
        self._connections: dict[Hashable, _Connection] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._line: _Line[_Tenant] = _Line()
        self._purge_at = FEW_CONNECTIONS
        self.num_waiting = 0
        self.num_bytes = 0

    def has(self, client: Hashable) -> bool:
        """Whether `client` has waiting work."""
        return self.held_by(client)[0] > 0

    def held_by(self, client: Hashable) -> tuple[int, int]:
        """The waiting work of `client`: its number, and its bytes."""
        connection = self._connections.get(client)
        return (0, 0) if connection is None else (len(connection.waiting), connection.num_bytes)

    def held_by_tenant(self, name: str) -> tuple[int, int]:
        """The same for all connections of a tenant."""
        tenant = self._tenants.get(name)
        return (0, 0) if tenant is None else (tenant.num_waiting, tenant.num_bytes)

    def add(self, name: str, client: Hashable, work: Work, num_bytes: int = 0) -> None:
        """Queue `work` behind the waiting work of `client`, a connection of the tenant `name`.
        `num_bytes` is the memory that it holds meanwhile."""
        connection = self._connections.get(client) or self._new(name, client)
        connection.waiting.append((work, num_bytes))
        self._count(connection, 1, num_bytes)
        tenant = connection.tenant
        if not connection.is_in_line:
            tenant.line.join(connection)
        if not tenant.is_in_line:
            self._line.join(tenant)

    def take_turn(self, step: Callable[[Work], bool]) -> None:
        """Run a step of the work whose turn it is; there must be some. `step` returns True when the
        work is done. Work whose step raises is done as well."""
        tenant = self._next_tenant()
        connection = self._next_connection(tenant)
        head = connection.waiting[0]
        done, began = True, self._clock()
        try:
            done = step(head[0])  # type: ignore[arg-type]
        finally:
            took = self._clock() - began
            connection.had_s += took
            tenant.had_s += took
            # A step may find that its client has gone, and drop the client's work, this included.
            if done and connection.waiting and connection.waiting[0] is head:
                connection.waiting.popleft()
                self._count(connection, -1, -head[1])
            if connection.waiting:
                tenant.line.stay(connection)
            else:
                connection.is_in_line = False
            if tenant.num_waiting:
                self._line.stay(tenant)
            else:
                tenant.is_in_line = False
            if not self.num_waiting:
                self._forget_all()

    def drop(self, client: Hashable) -> list[Work]:
        """Remove and return the work of `client`, which has gone; the caller ends it."""
        connection = self._connections.get(client)
        if connection is None:
            return []
        dropped = [work for work, _ in connection.waiting]
        self._count(connection, -len(dropped), -connection.num_bytes)
        connection.waiting.clear()
        return dropped  # type: ignore[return-value]

    def drop_all(self) -> list[Work]:
        """Remove and return all waiting work."""
        return [work for client in [*self._connections] for work in self.drop(client)]

    # ── private ──────────────────────────────────────────────────────────────────────────

    def _new(self, name: str, client: Hashable) -> _Connection:
        if len(self._connections) >= self._purge_at:
            self._forget_some()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._line.least_s)
        connection = self._connections[client] = _Connection(tenant)
        return connection

    def _next_tenant(self) -> _Tenant:
        while not (tenant := self._line.next()).num_waiting:
            tenant.is_in_line = False  # its work was dropped
        return tenant

    def _next_connection(self, tenant: _Tenant) -> _Connection:
        while not (connection := tenant.line.next()).waiting:
            connection.is_in_line = False
        return connection

    def _count(self, connection: _Connection, number: int, num_bytes: int) -> None:
        tenant = connection.tenant
        connection.num_bytes += num_bytes
        tenant.num_bytes += num_bytes
        tenant.num_waiting += number
        self.num_bytes += num_bytes
        self.num_waiting += number

    def _forget_some(self) -> None:
        """Remove connections whose place a new one would have as well."""
        self._connections = {
            client: one
            for client, one in self._connections.items()
            if one.is_in_line or one.had_s > one.tenant.line.least_s
        }
        self._purge_at = max(FEW_CONNECTIONS, 2 * len(self._connections))

    def _forget_all(self) -> None:
        """Forget all: without waiting work there is no order."""
        self._connections.clear()
        self._tenants.clear()
        self._line = _Line()
        self._purge_at = FEW_CONNECTIONS


InState = dict[str, int]
"""How many transfers of one kind are in each state now, by the state's name."""


def none_in(states: Iterable[StrEnum]) -> InState:
    """The count of each of `states` at the start."""
    return {state.value: 0 for state in states}
