"""Seeded faults, one after another: on the way to each client, and in the server itself."""

import random
import threading
from collections import Counter
from collections.abc import Callable

from chaos_server import ChaosServer
from fault_proxy import BOTH, CLEAR, TO_CLIENT, TO_SERVER, FaultProxy, Faults
from tampering import TAMPERS, ReorderMessages

MB = 1_000_000

LATENCIES_S = (0.1, 1.0)
"""One way: round trips of 200 ms and 2 s."""


def _on_the_way(rng: random.Random) -> tuple[str, Faults, float]:
    """A fault for one client's connections, and for how long."""
    short_s = rng.uniform(0.05, 0.4)
    if rng.random() < 0.5:
        name = rng.choice(list(TAMPERS))
        share = 0.02 if name == "cut mid-message" else rng.choice([0.01, 0.1, 1.0])
        return name, Faults(tamper=TAMPERS[name], share=share), short_s
    side = rng.choice([TO_SERVER, TO_CLIENT])
    return rng.choice(
        [
            ("200 ms", Faults(latency_s=LATENCIES_S[0]), 2 * short_s),
            ("2 s", Faults(latency_s=LATENCIES_S[1]), 4 * short_s),
            ("1 MB/s", Faults(bytes_per_s=MB), 2 * short_s),
            ("black hole", Faults(swallowed=BOTH), short_s),
            (f"half-open {side.name.lower()}", Faults(swallowed=frozenset({side})), short_s),
            (f"frozen {side.name.lower()}", Faults(frozen=frozenset({side})), short_s),
            ("frozen", Faults(frozen=BOTH), short_s),
            ("refuse", Faults(refuse=True), short_s),
            ("reorder messages", Faults(tamper=ReorderMessages()), short_s),
        ]
    )


class Weather:
    """Threads that make faults until `stop`. A fault that cannot be made is an error."""

    def __init__(
        self,
        seed: int,
        server: ChaosServer,
        proxies: list[FaultProxy],
        *,
        restarts: bool = True,
        pause_s: tuple[float, float] = (0.1, 0.5),
    ) -> None:
        """`restarts`: whether the server is killed now and then. `pause_s`: how long nothing
        happens on the way to one client, between two faults."""
        self.faults: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._seed, self._server, self._proxies = seed, server, proxies
        self._restarts, self._pause_s = restarts, pause_s
        self._over = threading.Event()
        runs = [
            lambda proxy=proxy, number=number: self._blow(proxy, number)
            for number, proxy in enumerate(proxies)
        ]
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), daemon=True)
            for run in (*runs, self._trouble_the_server)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No fault is left when this returns, and the server runs."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._clear_up()
        if self.errors:
            raise self.errors[0]

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(error)

    def _clear_up(self) -> None:
        """A thread that failed may have failed between a fault and its end."""
        self._server.revive()
        for proxy in self._proxies:
            proxy.clear()
            proxy.target = self._server.endpoint

    def _blow(self, proxy: FaultProxy, number: int) -> None:
        rng = random.Random(f"{self._seed}/proxy {number}")
        while not self._over.wait(rng.uniform(*self._pause_s)):
            name, faults, seconds = _on_the_way(rng)
            self.faults[name] += 1
            proxy.set(faults)
            self._over.wait(seconds)
            proxy.set(CLEAR)

    def _trouble_the_server(self) -> None:
        rng = random.Random(f"{self._seed}/server")
        while not self._over.wait(rng.uniform(0.5, 2.0)):
            kinds = ["freeze", "flip in memory", "flip in memory"]
            kind = rng.choice([*kinds, "kill"] if self._restarts else kinds)
            self.faults[f"server: {kind}"] += 1
            match kind:
                case "freeze":
                    with self._server.frozen():
                        self._over.wait(rng.uniform(0.05, 0.6))
                case "flip in memory":
                    self._server.flip_some(rng, rng.choice([1, 30, 300]))
                case "kill":
                    self._kill_and_restart(rng)

    def _kill_and_restart(self, rng: random.Random) -> None:
        self._server.kill()
        self._over.wait(rng.uniform(0.0, 0.3))
        self._server.restart()
        for proxy in self._proxies:
            proxy.target = self._server.endpoint
