"""Faults of lanes, so many that nearly every operation meets one: cuts at each byte of a block,
damage, stalls, and tokens in wrong hands."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from fault_proxy import FaultProxy
from fault_threads import FaultThreads
from faults import BOTH, CLEAR, TO_CLIENT, TO_SERVER, Direction, Faults
from sky import Sky
from tampering import CUT, Output, flip_at
from token_thief import TokenThief
from zmtp import Kind, Unit

_SHARES = (0.02, 0.1, 0.4)
"""Of the blocks on a lane, those that are hurt."""

_PREAMBLES = 0.1
"""Of the beginnings that a share has chosen. A token that was not used takes the place of a lane
for ten seconds."""

_KINDS = {"cut": 50, "flip": 30, "drop": 5, "repeat": 5, "lose the end": 5, "insert": 5}


class LaneHurts:
    """A tamper of one direction. Cuts go through the bytes of the blocks of each length in turn, so
    that each byte is hit as often as the others."""

    def __init__(self, direction: Direction, struck: Callable[[], None]) -> None:
        """`struck` is called with each block that is hurt."""
        self.done: Counter[str] = Counter()
        self.cuts: Counter[tuple[str, int, int]] = Counter()
        """By direction, bytes of the block's frame, and the byte before which it was cut."""
        self._direction = direction.name.lower()
        self._struck = struck
        self._next: Counter[int] = Counter()

    def __call__(self, rng: random.Random, unit: Unit) -> list[Output] | None:
        if unit.kind is Kind.PREAMBLE and rng.random() < _PREAMBLES:
            name = rng.choice(("cut", "flip"))
            self.done[f"{name} as a lane begins"] += 1
        elif unit.kind is Kind.BLOCK:
            (name,) = rng.choices(list(_KINDS), list(_KINDS.values()))
            self.done[name] += 1
        else:
            return None
        self._struck()
        raw, size = unit.raw, len(unit.raw)
        match name:
            case "cut":
                return [raw[: self._cut_at(unit)], CUT]
            case "flip":
                return [flip_at(raw, rng.randrange(size), rng.randrange(8))]
            case "drop":
                return []
            case "repeat":
                return [raw, raw]
            case "lose the end":
                return [raw[: rng.randrange(size)]]
            case _:
                at = rng.randrange(size)
                return [raw[:at] + rng.randbytes(rng.randrange(1, 40)) + raw[at:]]

    def _cut_at(self, unit: Unit) -> int:
        size = len(unit.raw)
        at = self._next[size] % size
        self._next[size] += 1
        if unit.kind is Kind.BLOCK:
            self.cuts[self._direction, size, at] += 1
        return at


class LaneStorm:
    """Threads that make faults until `stop`, as those of `Weather`."""

    def __init__(
        self, seed: object, proxies: Sequence[FaultProxy], skies: Sequence[Sky],
    ) -> None:  # fmt: skip
        self.faults: Counter[str] = Counter()
        self.cuts: Counter[tuple[str, int, int]] = Counter()
        """See `LaneHurts`. Complete after `stop`."""
        self._seed, self._proxies = seed, proxies
        self._over = threading.Event()
        self._hurts: list[LaneHurts] = []
        self._thief = TokenThief(seed, proxies)
        runs: list[Callable[[], None]] = [partial(self._thief.run, self._over)]
        for number, (proxy, sky) in enumerate(zip(proxies, skies, strict=True)):
            runs.append(partial(self._blow, proxy, sky, number))
        self._threads = FaultThreads(self._over, runs)
        self.start = self._threads.start

    def stop(self) -> None:
        """No fault is left when this returns. Raises the first error."""
        self._threads.stop(self._clear_up)

    def _clear_up(self) -> None:
        for proxy in self._proxies:
            proxy.clear()
        self.faults.update(self._thief.done)
        for hurts in self._hurts:
            self.faults.update(hurts.done)
            self.cuts.update(hurts.cuts)

    def _blow(self, proxy: FaultProxy, sky: Sky, number: int) -> None:
        rng = random.Random(f"{self._seed}/lanes {number}")
        hurts = {one: LaneHurts(one, sky.strike) for one in (TO_SERVER, TO_CLIENT)}
        self._hurts += hurts.values()
        while not self._over.is_set():
            direction = rng.choice([TO_SERVER, TO_CLIENT])
            if rng.random() < 0.8:
                share, only = rng.choice(_SHARES), frozenset({direction})
                proxy.set(Faults(tamper=hurts[direction], share=share, tampered=only))
                self._over.wait(rng.uniform(0.05, 0.3))
                continue
            name, faults = rng.choice(_stalls(direction))
            self.faults[name] += 1
            with sky.fault():
                proxy.set(faults)
                self._over.wait(rng.uniform(0.005, 0.05))
                proxy.set(CLEAR)


def _stalls(direction: Direction) -> list[tuple[str, Faults]]:
    only = frozenset({direction})
    return [
        (f"frozen {direction.name.lower()}", Faults(frozen=only)),
        ("frozen", Faults(frozen=BOTH)),
        (f"swallowed {direction.name.lower()}", Faults(swallowed=only)),
        ("20 ms", Faults(latency_s=0.01)),
        ("1 MB/s", Faults(bytes_per_s=1e6)),
        ("refuse", Faults(refuse=True)),
    ]
