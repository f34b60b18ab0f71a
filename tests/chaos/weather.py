"""Seeded faults, one after another: on the way to each client, and in the server itself."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from chaos_server import ChaosServer
from fault_proxy import FaultProxy
from fault_threads import FaultThreads
from faults import BOTH, CLEAR, TO_CLIENT, TO_SERVER, Faults
from sky import Sky
from tampering import TAMPERS, ReorderMessages

MB = 1_000_000

LATENCIES_S = (0.1, 1.0)
"""One way: round trips of 200 ms and 2 s."""

UNDYING = ("freeze", "flip in memory", "flip in memory")
"""Faults of a server whose memory has one history."""

MORTAL = (*UNDYING, "kill")
"""A kill every five seconds."""

LONG_LIVED = (*UNDYING * 5, "kill")
"""A kill every twenty seconds: the server fills its memory and its disk meanwhile."""


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
        seed: object,
        server: ChaosServer | None,
        proxies: Sequence[FaultProxy],
        *,
        kinds: Sequence[str] = MORTAL,
        pause_s: tuple[float, float] = (0.1, 0.5),
        server_sky: Sky | None = None,
        skies: Sequence[Sky] = (),
        before_kill: Callable[[], None] = lambda: None,
        moved: Callable[[str], None] | None = None,
    ) -> None:
        """`server`: None for faults on the way alone. `kinds`: the faults of the server, each as
        likely as the others. `pause_s`: how long nothing happens on the way to one client, between
        two faults. `server_sky` and `skies`, one for each proxy, log the faults. `moved` is called
        with the address of a server that was started in place of another one; by default it becomes
        the target of `proxies`."""
        self.faults: Counter[str] = Counter()
        self._seed, self._server, self._proxies = seed, server, proxies
        self._kinds, self._pause_s = kinds, pause_s
        self._sky = server_sky or Sky()
        self._before_kill, self._moved = before_kill, moved or self._aim
        self._over = threading.Event()
        skies = skies or [Sky() for _ in proxies]
        runs: list[Callable[[], None]] = [
            partial(self._blow, proxy, sky, number)
            for number, (proxy, sky) in enumerate(zip(proxies, skies, strict=True))
        ]
        if server is not None:
            runs.append(partial(self._trouble_the_server, server))
        self._threads = FaultThreads(self._over, runs)
        self.start = self._threads.start

    @property
    def errors(self) -> Sequence[BaseException]:
        """What its threads have raised so far."""
        return self._threads.errors

    def stop(self) -> None:
        """No fault is left when this returns, and the server runs. Raises the first error."""
        self._threads.stop(self._clear_up)

    def _clear_up(self) -> None:
        for proxy in self._proxies:
            proxy.clear()
        if self._server is not None:
            self._server.revive()
            self._moved(self._server.endpoint)

    def _aim(self, endpoint: str) -> None:
        for proxy in self._proxies:
            proxy.target = endpoint

    def _blow(self, proxy: FaultProxy, sky: Sky, number: int) -> None:
        rng = random.Random(f"{self._seed}/proxy {number}")
        while not self._over.wait(rng.uniform(*self._pause_s)):
            name, faults, seconds = _on_the_way(rng)
            self.faults[name] += 1
            with sky.fault():
                proxy.set(faults)
                self._over.wait(seconds)
                proxy.set(CLEAR)

    def _trouble_the_server(self, server: ChaosServer) -> None:
        rng = random.Random(f"{self._seed}/server")
        while not self._over.wait(rng.uniform(0.5, 2.0)):
            kind = rng.choice(self._kinds)
            self.faults[f"server: {kind}"] += 1
            if kind == "kill":
                self._before_kill()
            with self._sky.fault():
                match kind:
                    case "freeze":
                        with server.frozen():
                            self._over.wait(rng.uniform(0.05, 0.6))
                    case "flip in memory":
                        server.flip_some(rng, rng.choice([1, 30, 300]))
                    case "kill":
                        server.kill()
                        self._over.wait(rng.uniform(0.0, 0.3))
                        server.restart()
                        self._moved(server.endpoint)
