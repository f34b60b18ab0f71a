"""One server of a fleet, as this client sees it: its client, and whether its lookups are late."""

from collections.abc import Callable
from dataclasses import dataclass, field

from remote_server.client import RemoteClient
from remote_server.client.lookup_breaker import LookupBreaker

# The age that a server counts as, which has not evicted any block, is one second at its start and
# doubles each minute, so often: a server that joins is not given all new blocks at once.
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

    @property
    def age_of_evictions_s(self) -> float:
        """How long a block stays there unused; of a server that has evicted none, see above."""
        load = self.client.load
        if load is None:
            return 0.0
        if load.evicted_age_s >= 0:
            return load.evicted_age_s
        return float(2 ** min(load.up_s / 60, MOST_DOUBLINGS))

    @property
    def evicts(self) -> bool:
        load = self.client.load
        return load is not None and load.evicted_age_s >= 0

    @property
    def fill(self) -> int:
        """The part of its memory and disk that is used, in thousandths."""
        load = self.client.load
        return 0 if load is None else load.fill


def roomier(first: FleetServer, second: FleetServer) -> FleetServer:
    """Which of a run's two homes has more room for it: the one that evicts older blocks, or the one
    that is less full while neither evicts. The first if they are equal."""
    if first.evicts or second.evicts:
        return second if second.age_of_evictions_s > first.age_of_evictions_s else first
    return second if second.fill < first.fill else first
