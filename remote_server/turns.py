"""Long requests in steps, and whose step is next."""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from time import thread_time
from typing import Generic, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")

Steps = Generator[None, None, Result]
"""What is left to do of a request, and what comes of it."""

# Keys of one step. A key costs up to 4 µs (put), mostly one: a millisecond at most.
KEYS_PER_STEP = 256

# The same of a lookup, whose keys cost 0.05 µs in memory and up to 1 µs with a disk and an age.
LOOKUP_KEYS_PER_STEP = 1024


def parts(items: Sequence[Item], size: int = 0) -> Iterable[Sequence[Item]]:
    """`items` in runs of a step each; one run, with none perhaps, where they are few."""
    size = size or KEYS_PER_STEP
    if len(items) <= size:
        return (items,)
    return (items[first : first + size] for first in range(0, len(items), size))


def to_end(steps: Steps[Result]) -> Result:
    """All of it at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


Work = TypeVar("Work")

# Who comes back with work goes before those who were there all the time until it has had so much
# more than the one that has had least.
AHEAD_S = 0.001

# So many connections are remembered without a look at which of them matter still.
FEW_CONNECTIONS = 64


class _Place:
    """What a tenant, or a connection, has had; and where it is among its like."""

    __slots__ = ("had_s", "is_in_line")

    def __init__(self, had_s: float) -> None:
        self.had_s = had_s
        self.is_in_line = False
        """Something of it waits, and it is in the line of its like or has its turn."""


Placed = TypeVar("Placed", bound=_Place)


class _Line(Generic[Placed]):
    """Those with something waiting, by what they have had."""

    __slots__ = ("_heap", "_last", "_new", "least_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Placed]] = []
        self._new = count(-(1 << 62))
        self._last = count()
        self.least_s = 0.0
        """What the one whose turn it was last had had. Who comes now is taken to have had that."""

    def join(self, place: Placed) -> None:
        """It had nothing waiting until now: of those that have had the same it is the first."""
        place.is_in_line = True
        heappush(self._heap, (max(self.least_s, place.had_s - AHEAD_S), next(self._new), place))

    def stay(self, place: Placed) -> None:
        """It has had a turn, and something of it waits still."""
        heappush(self._heap, (max(self.least_s, place.had_s), next(self._last), place))

    def next(self) -> Placed:
        """Whose turn it is; it is taken out of the line."""
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
    """What one connection has waiting, in the order in which it came."""

    __slots__ = ("num_bytes", "tenant", "waiting")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__(tenant.line.least_s)
        self.tenant = tenant
        self.waiting: deque[tuple[object, int]] = deque()
        self.num_bytes = 0


class Turns(Generic[Work]):
    """Work that waits, of all connections. One thread.

    A connection's work is done in the order in which it came. What it has had is remembered while
    others have had less, also when nothing of it waits: otherwise one that always has one request
    under way would always come first.
    """

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        """By `clock` a step is measured. That of the thread's own time stands still while the
        machine runs something else, for which no connection is to blame."""
        self._clock = clock
        self._connections: dict[Hashable, _Connection] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._line: _Line[_Tenant] = _Line()
        self._look_at = FEW_CONNECTIONS
        self.num_waiting = 0
        self.num_bytes = 0

    def has(self, client: Hashable) -> bool:
        """Whether something of `client` waits."""
        return self.held_by(client)[0] > 0

    def held_by(self, client: Hashable) -> tuple[int, int]:
        """How much of `client` waits: its number, and its bytes."""
        connection = self._connections.get(client)
        return (0, 0) if connection is None else (len(connection.waiting), connection.num_bytes)

    def held_by_tenant(self, name: str) -> tuple[int, int]:
        """The same of all connections of a tenant."""
        tenant = self._tenants.get(name)
        return (0, 0) if tenant is None else (tenant.num_waiting, tenant.num_bytes)

    def add(self, name: str, client: Hashable, work: Work, num_bytes: int = 0) -> None:
        """`work` waits behind what `client`, a connection of the tenant `name`, has waiting.
        `num_bytes` is what it holds of memory meanwhile."""
        connection = self._connections.get(client) or self._new(name, client)
        connection.waiting.append((work, num_bytes))
        self._count(connection, 1, num_bytes)
        tenant = connection.tenant
        if not connection.is_in_line:
            tenant.line.join(connection)
        if not tenant.is_in_line:
            self._line.join(tenant)

    def take_turn(self, step: Callable[[Work], bool]) -> None:
        """Give a step to the work whose turn it is; something must wait. `step` returns True when
        the work is done. What raises in it is done as well."""
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
            # A step may find that its client has gone, and drop what waits of it, this included.
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
        """What waited of `client`, which has gone; its caller ends it."""
        connection = self._connections.get(client)
        if connection is None:
            return []
        dropped = [work for work, _ in connection.waiting]
        self._count(connection, -len(dropped), -connection.num_bytes)
        connection.waiting.clear()
        return dropped  # type: ignore[return-value]

    def drop_all(self) -> list[Work]:
        """What waited of everybody."""
        return [work for client in [*self._connections] for work in self.drop(client)]

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _new(self, name: str, client: Hashable) -> _Connection:
        if len(self._connections) >= self._look_at:
            self._forget_some()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._line.least_s)
        connection = self._connections[client] = _Connection(tenant)
        return connection

    def _next_tenant(self) -> _Tenant:
        while not (tenant := self._line.next()).num_waiting:
            tenant.is_in_line = False  # what waited was dropped
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
        """Those who would be where a new one begins."""
        self._connections = {
            client: one
            for client, one in self._connections.items()
            if one.is_in_line or one.had_s > one.tenant.line.least_s
        }
        self._look_at = max(FEW_CONNECTIONS, 2 * len(self._connections))

    def _forget_all(self) -> None:
        """Nothing waits, so nobody is behind anybody."""
        self._connections.clear()
        self._tenants.clear()
        self._line = _Line()
        self._look_at = FEW_CONNECTIONS
