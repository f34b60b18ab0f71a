"""A chaos client of a fleet, and engine requests: prompts that are looked up, loaded and stored.

A prompt has 32 rows of 256 tokens, which are runs of 4, 4, 8 and 16 rows. Its rows are blocks of
one namespace of the oracle, so every row that lands is compared with what was put.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from chaos_client import ChaosClient, Request
from chaos_server import PATIENCE_S, eventually
from oracle import KiB, Namespace, key

from remote_server.client import BreakerState, ClientConfig, RemoteClient
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList
from remote_server.protocol import Stretch
from remote_server.runs import begins_run

ROW_TOKENS = 256
ROWS = 32
PROMPTS = Namespace("prompts", 4 * KiB, 10_000 * ROWS, ROWS)

MOST_PUTS = 6
"""Under way at a time."""

WAITED = 0.9
"""Of its deadline: a lookup that took longer waited for a server in vain."""


class Limits(NamedTuple):
    """What the requests for one prompt may wait for."""

    lookup_s: float
    get_s: float
    stall_s: float
    put_s: float


IMPATIENT = Limits(1.0, 4.0, 1.0, 4.0)
"""More than an engine's: healthy servers are hardly late beside other work."""

PATIENT = Limits(60.0, 60.0, 60.0, 60.0)


class Served(NamedTuple):
    """One request of an engine."""

    prompt: int
    began: float
    hits: int
    """Rows of the prefix that landed; the others were computed."""

    word: str
    """How its lookup ended."""

    lookup_s: float
    waited: bool
    """For its deadline, or most of it."""


def rows_of(prompt: int) -> range:
    """The numbers of its rows."""
    return range(prompt * ROWS, (prompt + 1) * ROWS)


def anchor_of(number: int) -> int:
    """The number of the first row of a row's run."""
    while not begins_run(number % ROWS * ROW_TOKENS, (number % ROWS + 1) * ROW_TOKENS):
        number -= 1
    return number


def chain_of(numbers: Sequence[int]) -> list[Stretch]:
    """Neighbouring rows of one prompt."""
    return [Stretch(len(numbers), 0, numbers[0] % ROWS * ROW_TOKENS, ROW_TOKENS)]


class FleetClient(ChaosClient):
    """A `ChaosClient` whose servers are those of a list."""

    def __init__(
        self, servers: str | Sequence[str], transport: str = "lanes", **settings: object
    ) -> None:
        self._servers = servers
        self._puts: deque[Request] = deque()
        super().__init__(
            "tcp://127.0.0.1:1", transport, num_pieces=MOST_PUTS + 2, namespaces=(PROMPTS,),
            **settings,  # type: ignore[arg-type]
        )  # fmt: skip

    def _connect(self, config: ClientConfig, clock: Callable[[], float]) -> RemoteClient:
        # The calls of a chaos client are those that both have.
        return cast(RemoteClient, Fleet(WatchedList(self._servers), config, clock=clock))

    def _connections(self) -> list[RemoteClient]:
        return [*self.fleet.clients.values()]

    def _anchors(self, ns: Namespace, numbers: Sequence[int]) -> Sequence[bytes]:
        return [key(ns, anchor_of(number)) for number in numbers]

    @property
    def fleet(self) -> Fleet:
        return cast(Fleet, self.client)

    @property
    def complete(self) -> bool:
        """Whether it uses every server, and over the transport that it prefers. Lanes are opened
        for the transfer after the first."""
        wanted = "tcp" if self.transport in ("tcp", "lanes") else "shm"
        return all(
            one.ready and one.breaker is BreakerState.CLOSED and one.transport == wanted
            for one in self.fleet.clients.values()
        )

    def wait_until_complete(self, patience_s: float = PATIENCE_S) -> None:
        eventually(lambda: self.complete, "all servers are used", patience_s)

    def opened(self) -> dict[str, int]:
        """How often the breaker of each server has opened."""
        clients = self.fleet.clients.items()
        return {name: client.counters()["breaker_opened"] for name, client in clients}

    def serve(self, prompt: int, limits: Limits = PATIENT) -> Served:
        """Load what the servers have of a prompt's beginning, and put the rest. As an engine does,
        it does not wait for the put, but for an earlier one when there are many."""
        while self._puts and (len(self._puts) == MOST_PUTS or self._puts[0].future.done()):
            self.finish(self._puts.popleft())
        numbers, began, hits = rows_of(prompt), time.monotonic(), 0
        asked = self.lookup(PROMPTS, numbers, limits.lookup_s, chain=chain_of(numbers))
        word = self.finish(asked)
        prefix = asked.future.result().prefix if word == "answered" else 0
        if prefix:
            get = self.get(PROMPTS, numbers[:prefix], limits.get_s, limits.stall_s)
            self.finish(get)
            landed = {*get.future.result().landed}
            hits = next((row for row in range(prefix) if row not in landed), prefix)
        if rest := numbers[hits:]:
            put = self.put(PROMPTS, rest, limits.put_s, deferred=True, chain=chain_of(rest))
            self._puts.append(put)
        took = asked.ended - asked.began
        return Served(prompt, began, hits, word, took, took >= WAITED * limits.lookup_s)

    def finish_puts(self) -> None:
        """None is under way after this."""
        while self._puts:
            self.finish(self._puts.popleft())
