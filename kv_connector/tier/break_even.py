"""Break-even: whether to fetch the blocks of a request or to compute them, by measured speeds: of
the link, of the server's object store, and of the engine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kv_connector.pool.rows import PoolRows
from kv_connector.tier.lookup_state import LookupState, Missed
from kv_connector.tier.speeds import Chunk, EngineSpeed, LinkSpeed
from remote_server.client import CacheClient
from remote_server.protocol import KeyState

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
        return self._costs_over(self._server(name)[0], num_bytes, num_tokens, round_trips)

    def _costs_over(
        self, link: LinkSpeed, num_bytes: int, num_tokens: int, round_trips: int
    ) -> Costs:
        if not self.enabled:
            return Costs(0.0, inf)
        return costs_of(num_bytes, num_tokens, link, self.engine, round_trips=round_trips)

    def is_probe_due(self, costs: Costs, name: str | None = None) -> bool:
        """Whether a prefix that costs too much is fetched all the same. To be called once for each
        such prefix."""
        return self._server(name)[1].is_due(costs)

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
        bytes_per_s = self._server(name)[0].bytes_per_s
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

    def _server(self, name: str | None) -> tuple[LinkSpeed, Probes]:
        """Of the server, or of one of several."""
        if name is None:
            return self.link, self._probes
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


# Most loads are over long before, and those behind them do not notice.
LONG_LOAD_S = 1.0


class Judge(NamedTuple):
    """Applies break-even to the rows of requests. Only the scheduler thread calls it."""

    client: CacheClient
    rows: PoolRows
    break_even: BreakEven

    def is_worth(self, wait: LookupState, keys: list[bytes], *, round_trips: int) -> bool:
        """Whether to fetch `keys`, with so many round trips still to be made. Of several servers
        `without_slow` judges each, so only a query to none but slow ones is not worth it here."""
        if wait.prefetch or wait.is_probe or (self.client.places_by_run and round_trips == 1):
            return True
        costs = self._costs(len(keys), round_trips)
        return any(cost.is_worth for _, cost in costs) or self._is_probe(wait, costs)

    def declines(self, wait: LookupState) -> bool:
        """Whether nothing of this prompt is worth fetching, however few of its blocks the levels
        above lack: then the engine loses no step to a query. Decided once."""
        if not wait.weighed and wait.prompt_tokens and not wait.prefetch:
            wait.weighed = True
            whole = self._costs(self.rows.rows_of(wait.prompt_tokens), 2)
            # Costs grow in a straight line with the number of rows.
            some_are_worth = any(cost.is_worth for _, cost in whole + self._costs(1, 2))
            wait.declined = not some_are_worth and not self._is_probe(wait, whole)
        return wait.declined

    def _costs(self, num_rows: int, round_trips: int) -> list[tuple[str | None, Costs]]:
        """Of so many rows from the server, or from each of several."""
        size = self._size(num_rows)
        names = self.client.names if self.client.places_by_run else (None,)
        return [
            (name, self.break_even.costs(*size, name, round_trips=round_trips)) for name in names
        ]

    def _is_probe(self, wait: LookupState, costs: list[tuple[str | None, Costs]]) -> bool:
        """Whether the request is to measure a server again that was too slow."""
        wait.is_probe = any(self.break_even.is_probe_due(cost, name) for name, cost in costs)
        return wait.is_probe

    def without_slow(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """`readable` without the blocks that are in the server's object store, and without those
        of slow servers among several, if computing them is faster than fetching them: they are
        misses then. Of several servers also without those behind a miss."""
        in_bucket = [key for key in readable if key in wait.in_bucket]
        if in_bucket and not wait.bucket_judged:
            wait.bucket_judged = True
            size = self._size(len(in_bucket))
            if not wait.prefetch and not self.break_even.admits_bucket(*size):
                wait.give_up(in_bucket, Missed.BUCKET_SLOW)
                readable = wait.readable()
        if self.client.places_by_run:
            readable = self._in_prefix(wait, readable)
            if not (wait.judged or wait.prefetch or wait.is_probe):
                readable = self._of_fast_servers(wait, readable)
        return readable

    def is_slow(self, wait: LookupState, readable: list[bytes]) -> bool:
        """Whether the load of `readable` keeps its rows for long: blocks are in the server's object
        store, or one server needs more than `LONG_LOAD_S` for its share."""
        if not wait.in_bucket.isdisjoint(readable):
            return True
        shares: Counter[str | None] = Counter()
        if self.client.places_by_run:
            names = self.client.names
            shares.update(name_of(names, self.client.server_of(key)) for key in readable)
        else:
            shares[None] = len(readable)
        return any(
            self.break_even.seconds_from(name, self._size(num_rows)[0]) > LONG_LOAD_S
            for name, num_rows in shares.items()
        )

    def _of_fast_servers(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """The servers send at the same time, so the share of each is compared with computing all of
        `readable`. Without the share of a slow one less is left to be compared with."""
        by_server: dict[int, list[bytes]] = {}
        for key in readable:
            by_server.setdefault(self.client.server_of(key), []).append(key)
        names, undecided = self.client.names, set(by_server)
        while undecided and readable:
            num_tokens = self._size(len(readable))[1]
            # The slowest share first: others are compared with what is left without it.
            server = max(
                undecided,
                key=lambda number: self.break_even.seconds_from(
                    name_of(names, number), self._size(len(by_server[number]))[0]
                ),
            )
            undecided.discard(server)
            num_bytes = self._size(len(by_server[server]))[0]
            name = name_of(names, server)
            if not self.break_even.admits_server(name, num_bytes, num_tokens):
                wait.give_up(by_server[server], Missed.BREAK_EVEN)
                readable = self._in_prefix(wait, wait.readable())
        return readable

    def _in_prefix(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """Those of `readable` before the first miss: vLLM uses no block of a prefix behind it.
        With sliding windows or several groups it may use any."""
        if not self.rows.is_one_chain:
            return readable
        found: list[bytes] = []
        for key, state in wait.states.items():
            if isinstance(state, Missed):
                break
            if state is KeyState.READABLE:
                found.append(key)
        return found

    def _size(self, num_rows: int) -> tuple[int, int]:
        """In bytes and in tokens."""
        return num_rows * self.rows.block_bytes, self.rows.tokens_of(num_rows)


def name_of(names: tuple[str, ...], number: int) -> str:
    """The name of a server, "" when the list has become shorter meanwhile."""
    return names[number] if number < len(names) else ""
