"""One server of a fleet, as this client sees it: its client, and whether its lookups are late."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from remote_server.client import RemoteClient
from remote_server.client.connection.lookup_breaker import LookupBreaker
from remote_server.protocol import ServerLoad

# A server that has joined others that evict, and has not evicted any block, counts as if it kept
# blocks for a second, and each minute for twice as long, so often: it is not given all new blocks
# at once.
MOST_DOUBLINGS = 20


@dataclass(eq=False)
class FleetServer:
    """Any thread may use it, but for `lookups` and `can_be_looked_up`, whose calls are serialised
    by the fleet's lock."""

    name: str
    client: RemoteClient
    clock: Callable[[], float]
    lookups: LookupBreaker = field(init=False)
    excluded: str = ""
    """Why this client does not use it; empty when it does."""
    _boot: str | None = None
    """That of the last lookup; None if it was away then."""

    def __post_init__(self) -> None:
        self.lookups = LookupBreaker(self.clock)

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to it now."""
        return not self.excluded and self.client.ready

    def can_be_looked_up(self) -> bool:
        """`ready`, for a lookup now. One that was away at the last lookup, or was another process,
        has no late lookups any more."""
        ready = self.ready
        boot = self.client.epoch if ready else None
        if boot != self._boot:
            self._boot = boot
            self.lookups.forget()
        return ready

    @property
    def takes_puts(self) -> bool:
        load = self.client.load
        return self.ready and not (load is not None and load.draining)


def roomier(first: FleetServer, second: FleetServer) -> FleetServer:
    """Which of a run's two homes has more room for it: the one that evicts older blocks, or the one
    that is less full while neither evicts. The first if they are equal."""
    one, other = first.client.load, second.client.load
    if one is None or other is None:
        return first
    if one.evicted_age_s < 0 and other.evicted_age_s < 0:
        return second if other.fill < one.fill else first
    return second if _age_s(other, beside=one) > _age_s(one, beside=other) else first


def _age_s(load: ServerLoad, beside: ServerLoad) -> float:
    """How long a block stays unused on a server, one of which evicts."""
    if load.evicted_age_s >= 0:
        return load.evicted_age_s
    # It has kept all it got, for longer than the other one keeps a block.
    if load.up_s >= beside.evicted_age_s:
        return inf
    return float(2 ** min(load.up_s / 60, MOST_DOUBLINGS))
