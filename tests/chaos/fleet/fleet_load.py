"""Engines on one fleet: clients that serve prompts, each on a thread, and what became of them."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from chaos_server import eventually
from fleet_client import PATIENT, ROWS, FleetClient, Limits, Served


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
    def running(self, limits: Limits) -> Iterator[list[Served]]:
        """All clients serve prompts at random in the block, and have ended after it. The list has
        the requests of this block up to now."""
        over, served = threading.Event(), list[Served]()

        def work(client: FleetClient, rng: random.Random) -> None:
            while not over.is_set() and not self._errors:
                served.append(client.serve(rng.choice(self.prompts), limits))
            client.finish_puts()

        threads = self._begun(work, zip(self.clients, self._rngs, strict=True))
        try:
            yield served
        finally:
            over.set()
            self._end(threads, served)

    def until_served(self, served: Sequence[Served], more: int) -> None:
        """Wait until a list of `running` has grown by so many."""
        wanted = len(served) + more
        eventually(lambda: self._errors or len(served) >= wanted, "requests end")

    def sweep(self, limits: Limits = PATIENT) -> float:
        """Serve each prompt once, by one client or another; the part of all rows that hit."""
        served = list[Served]()

        def work(number: int) -> None:
            for prompt in self.prompts[number :: len(self.clients)]:
                served.append(self.clients[number].serve(prompt, limits))
            self.clients[number].finish_puts()

        self._end(self._begun(work, ((number,) for number in range(len(self.clients)))), served)
        return hit_rate(served)

    def _begun(
        self, work: Callable[..., None], arguments: Iterator[tuple[object, ...]]
    ) -> list[threading.Thread]:
        def guarded(*args: object) -> None:
            try:
                work(*args)
            except BaseException as error:
                self._errors.append(error)

        threads = [threading.Thread(target=guarded, args=args) for args in arguments]
        for thread in threads:
            thread.start()
        return threads

    def _end(self, threads: Sequence[threading.Thread], served: list[Served]) -> None:
        """Raise what was wrong with bytes or deadlines of these requests."""
        for thread in threads:
            thread.join()
        self.served += served
        if self._errors:
            raise self._errors[0]


def hit_rate(served: Sequence[Served]) -> float:
    return sum(one.hits for one in served) / max(1, len(served) * ROWS)


def failed(served: Sequence[Served]) -> list[Served]:
    """Those whose lookup had no reply from any server, which is all that an engine can notice of a
    request but its hits."""
    return [one for one in served if one.word != "answered"]
