"""Requests that wait for their turn: how many there may be, and the turns that they get.

The server reads on while requests wait, because libzmq has no receive mark here (see `receiving`).
So what waits is bounded in number and bytes, for each connection and for each tenant, and what is
beyond that is refused. A request of few keys that nobody is in front of waits for nothing.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.server.tenant import Quarters
from remote_server.sizes import MiB, format_bytes
from remote_server.turns import Steps, Turns

# What requests may take of each turn of the loop; a step that was begun is gone through.
TURN_S = 0.001

# Of one connection. A client has far fewer requests unanswered, and 32 MiB of puts.
MAX_REQUESTS = 1024
MAX_BYTES = 64 * MiB

# Of all connections together; each tenant may have its part, and what one connection may.
MAX_REQUESTS_IN_TOTAL = 16_384
MAX_BYTES_IN_TOTAL = 512 * MiB

# What a message takes beside its bytes, in Python and in libzmq.
FRAME_BYTES = 512

# A header up to here has few keys: some 200 of 36 bytes.
SMALL_BYTES = 8 << 10
SMALL_FRAMES = 64


class Waiting:
    """One message, or what is left of a request."""

    __slots__ = ("arrived", "client", "quarters", "refusal", "steps", "views")

    def __init__(
        self,
        quarters: Quarters,
        client: bytes,
        views: Sequence[memoryview] = (),
        arrived: float = 0.0,
        refusal: RequestRefused | None = None,
        steps: Steps[None] | None = None,
    ) -> None:
        self.quarters = quarters
        self.client = client
        self.views = views
        self.arrived = arrived
        self.refusal = refusal
        self.steps = steps

    def step(self) -> bool:
        """The next step of it. True when it is done."""
        if self.steps is None:
            views, self.views = self.views, ()
            self.steps = _begin(self.quarters, self.client, views, self.refusal, self.arrived)
            return self.steps is None
        try:
            next(self.steps)
        except StopIteration:
            return True
        return False

    def close(self) -> None:
        """Its client has gone: give back what it holds."""
        if self.steps is not None:
            self.steps.close()


class Serving:
    """All requests of a server. One thread."""

    def __init__(self, num_tenants: int, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._turns: Turns[Waiting] = Turns()
        # libzmq hands over a message of each connection in turn. That is fair to connections, and
        # not to tenants, of which one may have many.
        self._is_fair_already = num_tenants == 1
        self._max_requests = max(MAX_REQUESTS, MAX_REQUESTS_IN_TOTAL // num_tenants)
        self._max_bytes = max(MAX_BYTES, MAX_BYTES_IN_TOTAL // num_tenants)

    @property
    def num_waiting(self) -> int:
        """Requests that were read and are not done."""
        return self._turns.num_waiting

    @property
    def num_bytes(self) -> int:
        """What they hold of memory."""
        return self._turns.num_bytes

    def take(
        self,
        quarters: Quarters,
        client: bytes,
        views: Sequence[memoryview],
        refusal: RequestRefused | None = None,
    ) -> bool:
        """A message of `client`: its frames without the routing id. `refusal` is what it is to be
        answered with. True when it has been answered at once, False when it waits."""
        if self._is_fair_already and not self._turns.num_waiting and _is_small(views):
            steps = _begin(quarters, client, views, refusal)
            if steps is None:
                return True
            # It is longer than it looked.
            request = Waiting(quarters, client, steps=steps)
            self._turns.add(quarters.tenant.name, client, request, _bytes_of(views))
            return False
        num_bytes = _bytes_of(views)
        too_much = self._too_much(quarters.tenant.name, client, num_bytes)
        if too_much is not None:
            # Answered at once, so before what waits of this connection.
            quarters.store.counters["requests_refused_waiting"] += 1
            _begin(quarters, client, views, too_much)
            return True
        request = Waiting(quarters, client, views, self._clock(), refusal)
        self._turns.add(quarters.tenant.name, client, request, num_bytes)
        return False

    def go_on_later(self, quarters: Quarters, client: bytes, steps: Steps[None]) -> None:
        """What is left of a request that waited for the disk: behind what `client` has waiting."""
        self._turns.add(quarters.tenant.name, client, Waiting(quarters, client, steps=steps))

    def serve(self) -> bool:
        """Give turns for as long as requests may take of a turn of the loop. True when more of them
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
        """`client` has gone: nothing of it is done any more."""
        for request in self._turns.drop(client):
            request.close()
            request.quarters.store.counters["requests_dropped_gone"] += 1

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
                f"{self._max_requests} and {format_bytes(self._max_bytes)}: ask again in a moment",
            )
        return None


def _begin(
    quarters: Quarters,
    client: bytes,
    views: Sequence[memoryview],
    refusal: RequestRefused | None,
    arrived: float | None = None,
) -> Steps[None] | None:
    """What is left of a request when its first step is over; None when it is done."""
    if not quarters.outboxes.accepts(client):
        quarters.store.counters["bad_messages_unread"] += 1
        return None
    if refusal is not None:
        quarters.handlers.refuse(client, views, refusal)
        return None
    return quarters.handlers.handle(client, views, arrived)


def _is_small(views: Sequence[memoryview]) -> bool:
    """So few keys that it is over in a step."""
    if len(views) == 2:
        return views[1].nbytes <= SMALL_BYTES
    return len(views) < 2 or (len(views) <= SMALL_FRAMES and views[1].nbytes <= SMALL_BYTES)


def _bytes_of(views: Sequence[memoryview]) -> int:
    return sum([view.nbytes for view in views]) + FRAME_BYTES * len(views)
