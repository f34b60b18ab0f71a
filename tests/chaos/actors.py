"""One client of the random run: seeded requests, a few under way at a time, each one judged."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_client import ChaosClient, Request
from oracle import LARGE, MEDIUM, NAMESPACES, SMALL, Namespace

_OPS = {"lookup": 25, "get": 38, "put": 24, "touch": 6, "force": 5, "stats": 2, "clear": 0.05}

_WEIGHTS = {SMALL: 6, MEDIUM: 3, LARGE: 1}
"""So that each size moves about as many bytes."""

_MOST_UNDER_WAY = 4

_WAIT_WHEN_AWAY_S = 0.1
"""A client whose server is away answers at once; without a pause such answers would be most of
what is counted."""

_CANCEL_ONCE_IN = 2000
_REOPEN_ONCE_IN = 2500


@dataclass
class Totals:
    """What became of the requests of some clients, and what these counted themselves."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    worst_overrun_s: float = 0.0

    def add(self, other: "ChaosClient | Totals") -> None:
        counters = other.counters if isinstance(other, Totals) else other.client.counters()
        self.outcomes.update(other.outcomes)
        self.blocks.update(other.blocks)
        self.counters.update(counters)
        self.worst_overrun_s = max(self.worst_overrun_s, other.worst_overrun_s)


class Actor:
    """Runs requests until it is stopped. One thread calls it."""

    def __init__(self, name: str, seed: int, endpoint: str, transport: str) -> None:
        self.name = name
        self._rng = random.Random(f"{seed}/{name}")
        self._endpoint, self._transport = endpoint, transport
        self._past = Totals()
        self._client = self._open()
        self._under_way: deque[Request] = deque()

    def run(self, take_turn: Callable[[], bool]) -> None:
        """Request after request, each once `take_turn` has returned true."""
        while take_turn():
            self._wait_a_little_for_the_server()
            while len(self._under_way) >= self._rng.randint(1, _MOST_UNDER_WAY):
                self._client.finish(self._under_way.popleft())
            self._under_way.append(self._next())
            if self._rng.randrange(_CANCEL_ONCE_IN) == 0:
                assert self._client.client.cancel_all(10.0), "cancel_all took too long"
            if self._rng.randrange(_REOPEN_ONCE_IN) == 0:
                self._finish_all()
                self._close()
                self._client = self._open()
        self._finish_all()

    def end(self) -> None:
        """Check its books and leave. Every request has ended."""
        self._client.check()
        self._client.close()

    def totals(self) -> Totals:
        """Of all its clients so far."""
        totals = Totals()
        totals.add(self._past)
        totals.add(self._client)
        return totals

    @property
    def ready(self) -> bool:
        return self._client.client.ready

    # ── its own ──────────────────────────────────────────────────────────────────────────

    def _open(self) -> ChaosClient:
        return ChaosClient(self._endpoint, self._transport, num_pieces=_MOST_UNDER_WAY)

    def _close(self) -> None:
        self._client.close()
        self._past.add(self._client)

    def _finish_all(self) -> None:
        while self._under_way:
            self._client.finish(self._under_way.popleft())

    def _wait_a_little_for_the_server(self) -> None:
        until = time.monotonic() + _WAIT_WHEN_AWAY_S
        while not self._client.client.ready and time.monotonic() < until:
            time.sleep(0.005)

    def _next(self) -> Request:
        rng, client = self._rng, self._client
        op = rng.choices(list(_OPS), list(_OPS.values()))[0]
        ns = rng.choices(NAMESPACES, [_WEIGHTS[ns] for ns in NAMESPACES])[0]
        numbers = self._numbers(ns)
        patience_s = rng.choice([0.05, 0.5, 2.0])
        match op:
            case "lookup":
                return client.lookup(ns, numbers, patience_s)
            case "touch":
                return client.touch(ns, numbers, patience_s)
            case "stats":
                return client.stats(patience_s)
            case "clear":
                return client.clear(ns, patience_s)
            case "get":
                return client.get(ns, numbers, patience_s, rng.choice([0.05, 0.5, 2.0]))
            case _:
                deferred = rng.random() < 0.5
                return client.put(
                    ns, numbers, patience_s, force=op == "force", deferred=deferred
                )  # fmt: skip

    def _numbers(self, ns: Namespace) -> list[int]:
        """A run of keys, as of a prefix: most from a popular few, some anywhere; now and then
        one key twice."""
        rng = self._rng
        width = ns.num_keys // 10 if rng.random() < 0.7 else ns.num_keys
        length = rng.randint(1, ns.most_at_once)
        first = rng.randrange(max(1, width - length))
        numbers = [*range(first, first + length)]
        if rng.random() < 0.03:
            numbers[-1] = numbers[0]
        return numbers
