"""Queued requests: how many may wait, and the turns that they are given.

The server reads on while requests wait, because libzmq has no receive mark here (see
`make_router`). The number and the bytes of waiting requests are therefore bounded, for each
connection and for each tenant; a request beyond a bound is refused. A request of few keys is served
without a turn when no other request waits.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.server.tenant.tenant import Tenant
from remote_server.turns import Steps, Turns
from remote_server.values import MiB, format_bytes

# Time for requests in each turn of the loop. A step that has begun is finished.
TURN_S = 0.001

# Of one connection. A client has far fewer requests unanswered, and 32 MiB of puts.
MAX_REQUESTS = 1024
MAX_BYTES = 64 * MiB

# Of all connections together: a tenant may have an equal part, and at least one connection's.
MAX_REQUESTS_IN_TOTAL = 16_384
MAX_BYTES_IN_TOTAL = 512 * MiB

# What a message takes beside its bytes, in Python and in libzmq.
FRAME_BYTES = 512

# A header of up to this size is one step to decode, and so is its lookup: LOOKUP_KEYS_PER_STEP keys
# of 36 bytes. A turn costs 20 µs, as much as it takes to decode a thousand keys.
SMALL_BYTES = 40 << 10
SMALL_FRAMES = 64


class Waiting:
    """One queued message, or the remaining steps of a request."""

    __slots__ = ("arrived", "client", "refusal", "steps", "tenant", "views")

    def __init__(
        self,
        tenant: Tenant,
        client: bytes,
        views: Sequence[memoryview] = (),
        arrived: float = 0.0,
        refusal: RequestRefused | None = None,
        steps: Steps[None] | None = None,
    ) -> None:
        self.tenant = tenant
        self.client = client
        self.views = views
        self.arrived = arrived
        self.refusal = refusal
        self.steps = steps

    def step(self) -> bool:
        """Run the next step. True when the request is done."""
        if self.steps is None:
            views, self.views = self.views, ()
            self.steps = _begin(self.tenant, self.client, views, self.refusal, self.arrived)
            return self.steps is None
        try:
            next(self.steps)
        except StopIteration:
            return True
        return False

    def close(self) -> None:
        """Its client has gone: release what it holds."""
        if self.steps is not None:
            self.steps.close()


class Serving:
    """The queue of all requests of a server. One thread."""

    def __init__(self, num_tenants: int, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._turns: Turns[Waiting] = Turns()
        # libzmq hands over a message of each connection in turn. That is fair to connections. It is
        # not fair to tenants, because one tenant may have many connections.
        self._is_fair_already = num_tenants == 1
        self._max_requests = max(MAX_REQUESTS, MAX_REQUESTS_IN_TOTAL // num_tenants)
        self._max_bytes = max(MAX_BYTES, MAX_BYTES_IN_TOTAL // num_tenants)

    @property
    def num_waiting(self) -> int:
        """Requests that were read and are not done."""
        return self._turns.num_waiting

    @property
    def num_bytes(self) -> int:
        """The memory that they hold."""
        return self._turns.num_bytes

    def take(
        self,
        tenant: Tenant,
        client: bytes,
        views: Sequence[memoryview],
        refusal: RequestRefused | None = None,
    ) -> bool:
        """Serve or queue a message of `client`, given as frames without the routing id. With
        `refusal` that is the answer. True when it was answered at once, False when it waits."""
        if self._is_fair_already and not self._turns.num_waiting and _is_small(views):
            steps = _begin(tenant, client, views, refusal)
            if steps is None:
                return True
            # It has more steps than its size suggested.
            request = Waiting(tenant, client, steps=steps)
            self._turns.add(tenant.name, client, request, _bytes_of(views))
            return False
        num_bytes = _bytes_of(views)
        too_much = self._too_much(tenant.name, client, num_bytes)
        if too_much is not None:
            # Answered at once, before the requests of this connection that wait.
            tenant.store.counters["requests_refused_waiting"] += 1
            _begin(tenant, client, views, too_much)
            return True
        request = Waiting(tenant, client, views, self._clock(), refusal)
        self._turns.add(tenant.name, client, request, num_bytes)
        return False

    def go_on_later(self, tenant: Tenant, client: bytes, steps: Steps[None]) -> None:
        """Queue the remaining `steps` of a request that waited for the disk, behind its
        client's."""
        self._turns.add(tenant.name, client, Waiting(tenant, client, steps=steps))

    def serve(self) -> bool:
        """Give turns until the time for requests in a turn of the loop is over. True when more
        wait."""
        turns = self._turns
        if not turns.num_waiting:
            return False
        until = self._clock() + TURN_S
        while turns.num_waiting:
            turns.take_turn(Waiting.step)
            if self._clock() >= until:
                break
        return bool(turns.num_waiting)

    def drop(self, client: bytes) -> None:
        """`client` has gone: drop its requests."""
        for request in self._turns.drop(client):
            request.close()
            request.tenant.store.counters["requests_dropped_gone"] += 1

    def drop_all(self) -> None:
        """All connections have gone, or the server ends."""
        for request in self._turns.drop_all():
            request.close()

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _too_much(self, tenant: str, client: bytes, num_bytes: int) -> RequestRefused | None:
        waiting, held = self._turns.held_by(client)
        if waiting and (waiting >= MAX_REQUESTS or held + num_bytes > MAX_BYTES):
            return RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{waiting} requests of this connection, {format_bytes(held)}, wait already, at "
                f"most {MAX_REQUESTS} and {format_bytes(MAX_BYTES)}: wait for answers",
            )
        waiting, held = self._turns.held_by_tenant(tenant)
        if waiting and (waiting >= self._max_requests or held + num_bytes > self._max_bytes):
            return RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{waiting} requests, {format_bytes(held)}, wait already, at most "
                f"{self._max_requests} and {format_bytes(self._max_bytes)}: retry in a moment",
            )
        return None


def _begin(
    tenant: Tenant,
    client: bytes,
    views: Sequence[memoryview],
    refusal: RequestRefused | None,
    arrived: float | None = None,
) -> Steps[None] | None:
    """Run the first step of a request. Returns the remaining steps, None when it is done."""
    if not tenant.send_queues.accepts(client):
        tenant.store.counters["bad_messages_unread"] += 1
        tenant.handlers.not_begun(client, views)
        return None
    if refusal is not None:
        tenant.handlers.refuse(client, views, refusal)
        return None
    return tenant.handlers.handle(client, views, arrived)


def _is_small(views: Sequence[memoryview]) -> bool:
    """Whether it has so few keys that one step is enough."""
    if len(views) == 2:
        return views[1].nbytes <= SMALL_BYTES
    return len(views) < 2 or (len(views) <= SMALL_FRAMES and views[1].nbytes <= SMALL_BYTES)


def _bytes_of(views: Sequence[memoryview]) -> int:
    return sum([view.nbytes for view in views]) + FRAME_BYTES * len(views)
