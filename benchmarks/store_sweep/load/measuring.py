"""The rounds of a sweep: those of an earlier run are kept, the others measured."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.harness.journal import Journal
from benchmarks.harness.runner import Runner
from benchmarks.store_sweep.load import blob, conversation, network, sweep
from benchmarks.store_sweep.load.servers import Servers, Wanted
from benchmarks.store_sweep.points import Point, in_rounds

Rounds = dict[Point, list[sweep.Round]]


class Measured(NamedTuple):
    """Of all rounds together."""

    raw_gb_per_s: float | None
    """The best speed of two raw connections before any of them."""

    objects: Counter[str]
    """As of `blob.object_counts`, during the rounds."""

    blocks_read: int


NOTHING = Measured(None, Counter(), 0)


def measure(
    rounds: Rounds, num_rounds: int, load: sweep.Load, servers: Servers, runner: Runner,
    wanted: Wanted, clock: Callable[[], float] = time.monotonic,
) -> Measured:  # fmt: skip
    """Fill `rounds`, and return what is of all of them. An interruption ends it."""
    raw: list[float] = []
    objects: Counter[str] = Counter()
    total, num_kept = num_rounds * len(rounds), 0
    of_run = _Rounds(servers, load, wanted)
    began = clock()
    try:
        for done, (number, point) in enumerate(in_rounds([*rounds], num_rounds)):
            where = f"round {number + 1} of {num_rounds}: {point}"
            runner.show(where + _left(clock() - began, done - num_kept, total - done))
            found = runner.journal.get("round", number, point)
            if found is None:
                found = of_run.measure(number, point)
                runner.journal.put(("round", number, point), found)
            else:
                num_kept += 1
            measured = sweep.Round(**found["round"])
            rounds[point].append(measured)
            raw += [found["raw"]] if found["raw"] is not None else []
            objects.update(found["objects"])
            for error in dict.fromkeys(measured.errors):
                print(f"{where}: {measured.errors.count(error)} x {error}", file=sys.stderr)
    except KeyboardInterrupt:
        runner.interrupted = True
    runner.show("")
    blocks = sum(turn.known for turn in conversation.TURNS)
    talks = [talk for some in rounds.values() for one in some for talk in one.talks]
    read = round(sum(talk["conversations"] for talk in talks) * blocks)
    return Measured(max(raw, default=None), objects, read)


def kept(journal: Journal, key: tuple[str, ...], measured: Callable[[], Any]) -> Any:
    """The value in the journal, or a new one, which is then in it."""
    if (found := journal.get(*key)) is None:
        found = measured()
        journal.put(key, found)
    return found


class _Rounds:
    """Measures rounds, each with the objects of the store since the round before."""

    def __init__(self, servers: Servers, load: sweep.Load, wanted: Wanted) -> None:
        self._servers, self._load, self._has_bucket = servers, load, wanted.bucket is not None
        self._before = self._counts()

    def measure(self, number: int, point: Point) -> dict[str, Any]:
        raw = network.raw_gb_per_s() if self._servers.here else None
        measured = sweep.run_round(self._servers, point, self._load, f"{number} {point}")
        now = self._counts()
        objects = {name: count - self._before[name] for name, count in now.items()}
        self._before = now
        return {"round": measured._asdict(), "raw": raw, "objects": objects}

    def _counts(self) -> Counter[str]:
        if not self._has_bucket:
            return Counter()
        return blob.object_counts(self._servers, self._load.block_bytes)


def _left(seconds: float, fresh: int, rest: int) -> str:
    """An estimate by what was measured now; empty without a basis."""
    if not fresh:
        return ""
    minutes, left_s = divmod(round(seconds / fresh * rest), 60)
    return f", about {minutes} min {left_s} s left" if minutes else f", about {left_s} s left"
