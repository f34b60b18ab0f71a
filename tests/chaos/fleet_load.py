"""Engines on one fleet: clients that serve prompts, each on a thread, and what became of them."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chaos_client import Hung
from fleet_client import LOOKUP_S, ROWS, FleetClient, Served

LATEST_S = 1.0
"""What a busy machine may add to the deadline of a lookup."""


class FleetLoad:
    """Clients and the prompts that they serve. One thread calls it."""

    def __init__(self, clients: Sequence[FleetClient], prompts: range, seed: object) -> None:
        self.clients = clients
        self.prompts = prompts
        self.served: list[Served] = []
        """All requests so far."""
        self._rngs = [random.Random(f"{seed}/client {number}") for number in range(len(clients))]
        self._errors: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[list[Served]]:
        """All clients serve prompts at random in the block, and have ended after it. The list has
        the requests of this block then."""
        over, served = threading.Event(), list[Served]()

        def work(client: FleetClient, rng: random.Random) -> None:
            while not over.is_set() and not self._errors:
                self._guard(client, rng.choice(self.prompts), served)
            self._guard_end(client)

        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip(self.clients, self._rngs, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield served
        finally:
            over.set()
            for thread in threads:
                thread.join()
        self._take(served)

    def sweep(self, clients: Sequence[FleetClient] = ()) -> float:
        """Serve each prompt once, by one client or another; the part of all rows that hit."""
        clients, served = clients or self.clients, list[Served]()

        def work(number: int) -> None:
            for prompt in self.prompts[number :: len(clients)]:
                if not self._errors:
                    self._guard(clients[number], prompt, served)
            self._guard_end(clients[number])

        threads = [threading.Thread(target=work, args=(at,)) for at in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._take(served)
        return hit_rate(served)

    def _guard(self, client: FleetClient, prompt: int, served: list[Served]) -> None:
        try:
            served.append(client.serve(prompt))
        except BaseException as error:
            self._errors.append(error)

    def _guard_end(self, client: FleetClient) -> None:
        try:
            client.finish_puts()
        except BaseException as error:
            self._errors.append(error)

    def _take(self, served: list[Served]) -> None:
        """Raise what was wrong with bytes or deadlines of these requests."""
        self.served += served
        if self._errors:
            raise self._errors[0]
        latest = max((one.lookup_s for one in served), default=0.0)
        if latest > LOOKUP_S + LATEST_S:
            raise Hung(f"a lookup took {latest:.2f} s, and had {LOOKUP_S} s")


def hit_rate(served: Sequence[Served]) -> float:
    return sum(one.hits for one in served) / max(1, len(served) * ROWS)


def failed(served: Sequence[Served]) -> list[Served]:
    """Those whose lookup had no reply from any server, which is all that an engine can notice of a
    request but its hits."""
    return [one for one in served if one.word != "answered"]
