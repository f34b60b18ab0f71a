"""The decision to fetch or to compute, by measured speeds: of the link, of the server's object
store, and of the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kv_connector.tier.speeds import Chunk, EngineSpeed, LinkSpeed

# While prefixes are declined, one is fetched all the same after a pause of so many times of what
# that costs: probes cost 1 % at most. Five of them can turn the median around. A load that falls
# behind is ended, so one costs its replies, this time and this share of the shorter way.
PROBE_COSTS = 100
COST_S, COST_SHARE = 0.1, 0.2


class Costs(NamedTuple):
    """In seconds, as far as they are known."""

    takes_s: float
    computes_s: float
    replies_s: float = 0.0
    """Of the first, the time that replies take."""

    @property
    def probe_pause_s(self) -> float:
        """How long no such prefix is fetched to measure again."""
        shorter_s = min(self.takes_s, self.computes_s)
        return PROBE_COSTS * (COST_S + self.replies_s + COST_SHARE * shorter_s)

    @property
    def is_worth(self) -> bool:
        """Whether loading is at least as fast as computing."""
        return self.takes_s <= self.computes_s


def costs_of(
    num_bytes: int, num_tokens: int, link: LinkSpeed, engine: EngineSpeed, *, round_trips: int
) -> Costs:
    """Of loading `num_bytes`, and of computing `num_tokens`.

    `round_trips` is the number still to be made: 2 before the lookup, 1 after it. Loading takes no
    time as far as it is unknown, and computing for ever: only a fetch can measure it.
    """
    takes_s = replies_s = round_trips * (link.round_trip_s or 0.0)
    if link.bytes_per_s is not None:
        takes_s += num_bytes / link.bytes_per_s if link.bytes_per_s else inf
    computes_s = engine.compute_s(Chunk(num_tokens))
    return Costs(takes_s, inf if computes_s is None else computes_s, replies_s)


@dataclass
class Probes:
    """Which of the prefixes that break-even declines are fetched all the same, to measure again."""

    clock: Callable[[], float]
    _last_probe_s: float | None = None

    def is_due(self, costs: Costs) -> bool:
        """Whether this one is to be fetched."""
        now_s = self.clock()
        if self._last_probe_s is None:
            self._last_probe_s = now_s
        if now_s - self._last_probe_s < costs.probe_pause_s:
            return False
        self._last_probe_s = now_s
        return True


@dataclass
class BreakEven:
    """The decision of one engine. Only the scheduler thread calls it.

    Blocks in the server's object store have a speed of their own, all the way from there: the
    server reads them while it sends them.
    """

    clock: Callable[[], float]
    enabled: bool = True
    link: LinkSpeed = field(default_factory=LinkSpeed)
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    bucket: LinkSpeed = field(init=False)
    _probes: Probes = field(init=False)
    _bucket_probes: Probes = field(init=False)
    _servers: dict[str, tuple[LinkSpeed, Probes]] = field(default_factory=dict)
    """Of several servers, by name: the link of each. `link` is then that of all together."""

    def __post_init__(self) -> None:
        self.bucket = self.link.beyond()
        self._probes, self._bucket_probes = Probes(self.clock), Probes(self.clock)

    def costs(
        self, num_bytes: int, num_tokens: int, name: str | None = None, *, round_trips: int
    ) -> Costs:
        """Of fetching this prefix from the server, or from one of several."""
        link = self.link if name is None else self._server(name)[0]
        return self._costs_over(link, num_bytes, num_tokens, round_trips)

    def _costs_over(
        self, link: LinkSpeed, num_bytes: int, num_tokens: int, round_trips: int
    ) -> Costs:
        if not self.enabled:
            return Costs(0.0, inf)
        return costs_of(num_bytes, num_tokens, link, self.engine, round_trips=round_trips)

    def is_probe_due(self, costs: Costs, name: str | None = None) -> bool:
        """Whether a prefix that costs too much is fetched all the same. To be called once for each
        such prefix."""
        probes = self._probes if name is None else self._server(name)[1]
        return probes.is_due(costs)

    def admits_bucket(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether to fetch blocks in the server's object store, which a lookup has found: fetching
        is faster, or a probe is due."""
        costs = self._costs_over(self.bucket, num_bytes, num_tokens, 1)
        return costs.is_worth or self._bucket_probes.is_due(costs)

    def admits_server(self, name: str, num_bytes: int, num_tokens: int) -> bool:
        """The same for blocks that one of several servers has."""
        costs = self.costs(num_bytes, num_tokens, name, round_trips=1)
        return costs.is_worth or self.is_probe_due(costs, name)

    def seconds_from(self, name: str | None, num_bytes: int) -> float:
        """How long `num_bytes` take from the server, or from one of several; 0 if that is not
        known."""
        bytes_per_s = (self.link if name is None else self._server(name)[0]).bytes_per_s
        return 0.0 if bytes_per_s is None else num_bytes / max(bytes_per_s, 1.0)

    def server_speed(self, name: str) -> float | None:
        """Bytes a second from one of several servers, once that is known."""
        return self._server(name)[0].bytes_per_s

    def server_took(self, name: str, num_bytes: int, seconds: float) -> None:
        """The part of one of several servers in a load without blocks of the object store."""
        self._server(name)[0].load_took(num_bytes, seconds)

    def server_came_back(self, name: str) -> None:
        """One of several servers was away: drop its speed."""
        self._servers.pop(name, None)

    def _server(self, name: str) -> tuple[LinkSpeed, Probes]:
        if (known := self._servers.get(name)) is None:
            known = self._servers[name] = self.link.beyond(), Probes(self.clock)
        return known

    def load_took(self, num_bytes: int, seconds: float, *, bucket_share: float) -> None:
        """A load ended. `bucket_share` of its blocks came from the object store: it measures that
        from one half on, and the link without any."""
        if bucket_share >= 0.5:
            self.bucket.load_took(num_bytes, seconds)
        elif not bucket_share:
            self.link.load_took(num_bytes, seconds)

    def forget(self) -> None:
        """Drop all speeds of the server after an outage: another one may answer now."""
        self.link.forget()
        self.bucket.forget()
        self._servers.clear()
