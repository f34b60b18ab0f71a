"""One client of the random run: seeded requests, a few under way at a time, each one judged."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_client import ChaosClient, Request
from chaos_server import PATIENCE_S, eventually
from detaching import detach_one
from oracle import NAMESPACES, Namespace
from sky import Sky

from remote_server.client import RemoteClient

_OPS = {"lookup": 25, "get": 38, "put": 24, "touch": 6, "force": 5, "stats": 2}

_PATIENCE_S = (0.005, 0.05, 0.5, 2.0)


SETTLE_S = 60.0
"""The longest pause before something is tried again, and what a busy machine adds."""

_LOOKS_WHEN_AWAY = 50
"""A client whose server is away answers at once; without a pause such answers would be most of
what is counted."""

_CANCEL_ONCE_IN = 500
_REOPEN_ONCE_IN = 1500
_DETACH_ONCE_IN = 1500

ENDED_BY_A_FAULT = {"late", "unavailable", "refused", "corrupt"}
"""Words for the end of an operation that a healthy server and a patient client do not give."""


@dataclass(frozen=True)
class Habits:
    """What a client asks for."""

    namespaces: tuple[Namespace, ...] = NAMESPACES
    clears_percent: float = 0.05
    """Of all operations, those that remove every block of a namespace."""

    most_under_way: int = 4
    """At a time."""

    operations: Mapping[str, float] = field(default_factory=lambda: _OPS)
    """The others, with their weights."""

    deadlines_s: tuple[float, ...] = _PATIENCE_S
    """Each as often as the others. A short one ends a request in the middle of what it does."""

    detaches: bool = True
    """It loses its attachment to the server's memory now and then, for five seconds."""

    @property
    def ops(self) -> dict[str, float]:
        """Operations, with their weights."""
        return {**self.operations, "clear": self.clears_percent}

    @property
    def sizes(self) -> list[float]:
        """Weights of the namespaces: each moves about as many bytes."""
        return [1 / (one.block_bytes * one.most_at_once) for one in self.namespaces]


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
    """Runs operations until it is stopped. One thread calls it.

    An operation is one call of the client with one end: a request, the cancellation of all requests
    under way, or a close of the client in the middle of its transfers.
    """

    def __init__(
        self, name: str, seed: int, endpoint: str, transport: str,
        habits: Habits = Habits(), skies: Sequence[Sky] = (),
    ) -> None:  # fmt: skip
        """`skies`: the faults on the way to the server, and those of the server."""
        self.name = name
        self.num_operations = 0
        self.num_faulted = 0
        """Those that overlapped a fault of `skies` or ended by one (`ENDED_BY_A_FAULT`), and all
        cancellations and closes."""
        self._rng = random.Random(f"{seed}/{name}")
        self._endpoint, self._transport = endpoint, transport
        self._habits, self._skies = habits, skies
        self._ops = list(habits.ops), list(habits.ops.values())
        self._sizes = habits.sizes
        self.num_detached = 0
        """Attachments to the server's memory that it has broken, its own or a neighbour's."""
        self._past = Totals()
        self._client = self._open()
        self._under_way: deque[Request] = deque()

    def run(self, take_turn: Callable[[], bool]) -> None:
        """Operation after operation, each once `take_turn` has returned true. All have ended when
        this returns. May be called again."""
        while take_turn():
            self._wait_a_little_for_the_server()
            while len(self._under_way) >= self._rng.randint(1, self._habits.most_under_way):
                self._finish_one()
            self._under_way.append(self._next())
            self._interfere()
        self._finish_all()

    def warm_up(self) -> None:
        """Use everything that stays open once it has been used."""
        self._wait_until_complete(SETTLE_S)
        for namespace in self._habits.namespaces:
            numbers = range(namespace.most_at_once)
            self._client.finish(self._client.put(namespace, numbers, force=True))
            self._client.finish(self._client.get(namespace, numbers))
        self._client.outcomes.clear()
        self._client.blocks.clear()

    def settle(self, patience_s: float) -> None:
        """At rest, without faults: it is ready again, its books balance, and it holds nothing."""
        self._wait_until_complete(patience_s)
        self._client.check()

    def end(self) -> None:
        """Check its books and leave. Every request has ended."""
        try:
            self._client.check()
        finally:
            self._client.close()

    def totals(self) -> Totals:
        """Of all its clients so far."""
        totals = Totals()
        totals.add(self._past)
        totals.add(self._client)
        return totals

    @property
    def client(self) -> RemoteClient:
        """Until it is closed and opened again."""
        return self._client.client

    # ── its own ──────────────────────────────────────────────────────────────────────────

    def _open(self) -> ChaosClient:
        return ChaosClient(
            self._endpoint, self._transport, num_pieces=self._habits.most_under_way,
            namespaces=self._habits.namespaces,
        )  # fmt: skip

    def _reopen(self) -> None:
        """Close the client with what is under way, and go on with another one."""
        self._client.client.close(PATIENCE_S)
        self._finish_all()
        self._client.close()
        self._count("close", "done", faulted=True)
        self._past.add(self._client)
        self._client = self._open()

    def _wait_until_complete(self, patience_s: float) -> None:
        """Ready, and attached to the server's memory unless it uses tcp alone."""
        wanted = "tcp" if self._transport in ("tcp", "lanes") else "shm"
        eventually(
            lambda: (
                self.client.ready and self.client.transport == wanted and self._client.has_all_lanes
            ),
            f"{self.name} is ready over {wanted}",
            patience_s,
        )

    def _interfere(self) -> None:
        """Now and then, with what is under way."""
        if self._rng.random() < 1 / _CANCEL_ONCE_IN:
            assert self.client.cancel_all(PATIENCE_S), "cancel_all took too long"
            self._count("cancel", "done", faulted=True)
        if self._rng.random() < 1 / _REOPEN_ONCE_IN:
            self._reopen()
        if self._rng.random() < 1 / _DETACH_ONCE_IN and self._habits.detaches:
            self.num_detached += self.client.transport == "shm" and detach_one(self._rng)

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_one()

    def _finish_one(self) -> None:
        request = self._under_way.popleft()
        word = self._client.finish(request)
        faulted = word in ENDED_BY_A_FAULT or any(
            sky.overlaps(request.began, request.ended) for sky in self._skies
        )
        self._count("", word, faulted=faulted)

    def _count(self, op: str, word: str, *, faulted: bool) -> None:
        """`op` is empty where the client has counted it itself."""
        self.num_operations += 1
        self.num_faulted += faulted
        if op:
            self._client.outcomes[op, word] += 1

    def _wait_a_little_for_the_server(self) -> None:
        looks = 0
        while not (self.client.ready and self._client.has_lanes) and looks < _LOOKS_WHEN_AWAY:
            time.sleep(0.002)
            looks += 1

    def _next(self) -> Request:
        rng, client = self._rng, self._client
        op = rng.choices(*self._ops)[0]
        ns = rng.choices(self._habits.namespaces, self._sizes)[0]
        numbers = self._numbers(ns)
        patience_s = rng.choice(self._habits.deadlines_s)
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
