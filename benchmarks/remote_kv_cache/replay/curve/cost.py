"""The cost of the live curve: CPU a key beside the learner's, and the memory of its models.

Prompts are conversations: half of them are one of the latest prompts and more keys behind it, up to
a length at which only its beginning returns. No cache is beside them, only the learner and the
follower of one of `num_blocks` places.
"""

import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from benchmarks.harness import table
from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner
from remote_server.protocol import KeyState, Stretch
from remote_server.store.curve.curve import TIMES, Curve
from remote_server.store.curve.follower import Follower
from remote_server.store.eviction.learner import Learner
from remote_server.turns import to_end
from remote_server.values import MiB

NAMESPACE = "cost"
TIER = "memory"
BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = 16
KEY_BYTES = 36
AT_ONCE = 2
"""A prompt that is no continuation has so many parts of new keys, and a continuation one more."""

MOST_PARTS = 4
LATEST = 5_000
"""A conversation that goes on had one of so many prompts before."""

PAUSE_S = 0.2
"""From prompt to prompt."""

LOOKUP, PUT, MEMORY = "a key looked up", "a key put", "memory of the models"
CURVE, LEARNER = "curve", "learner"
CASES = (LOOKUP, LEARNER), (LOOKUP, CURVE), (PUT, LEARNER), (PUT, CURVE)
"""In the order in which a server runs them."""

MEASURED, ACCOUNT = "measured", "own account"


@dataclass
class Cost:
    """With a cache of `num_blocks`. Microseconds of CPU a key are in each chunk, by what was done
    and by whom."""

    num_blocks: int
    us: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    model_bytes: int = 0
    account_bytes: int = 0


_READABLE = bytes([KeyState.READABLE])


class Load:
    """Prompts one after another, and the seconds that learner and follower took for them."""

    def __init__(self, num_blocks: int, prompt_keys: int) -> None:
        self._now = 0.0
        self.learner = Learner(self._clock)
        self.learner.num_blocks = num_blocks
        budgets = {TIER: num_blocks * BLOCK_BYTES}
        self.curve = Curve(self._clock, budgets, self.learner.hazards)
        self.follower = Follower(self.curve, self._clock, self.learner)
        self._prompts = _prompts(random.Random(1), prompt_keys // AT_ONCE)
        self.num_new = 0
        """Keys that no prompt had before."""

    def _clock(self) -> float:
        return self._now

    def run(self, num_prompts: int) -> dict[str, dict[str, float]]:
        """Microseconds a key of the next prompts, which bring all of their new keys."""
        seconds: dict[tuple[str, str], float] = dict.fromkeys(CASES, 0.0)
        keys_of = Counter[str]()
        learner, follower, clock = self.learner, self.follower, time.process_time
        for _ in range(num_prompts):
            self._now += PAUSE_S
            keys, held = next(self._prompts)
            new = keys[held:]
            chain, rest = _stretch(keys, 0), _stretch(new, held)
            found, states = {TIER: held}, _READABLE * held + bytes(len(new))
            times = [clock()]
            learner.looked_up(NAMESPACE, keys, chain, held)
            times.append(clock())
            to_end(follower.looked_up(NAMESPACE, keys, chain, BLOCK_BYTES, states, found))
            times.append(clock())
            learner.arriving(NAMESPACE, new, rest)
            times.append(clock())
            follower.arriving(NAMESPACE, new, rest, BLOCK_BYTES)
            follower.catch_up()
            times.append(clock())
            for case, (began, ended) in zip(CASES, pairwise(times), strict=True):
                seconds[case] += ended - began
            keys_of[LOOKUP] += len(keys)
            keys_of[PUT] += len(new)
            self.num_new += len(new)
        return {
            what: {who: 1e6 * seconds[what, who] / number for who in (CURVE, LEARNER)}
            for what, number in keys_of.items()
        }


def measure(num_blocks: int, prompt_keys: int, chunks: int, prompts: int, runner: Runner) -> Cost:
    """The cost in `chunks` chunks of so many prompts, once the largest size is full."""
    load, cost = Load(num_blocks, prompt_keys), Cost(num_blocks)
    full = max(TIMES) * num_blocks
    try:
        while load.num_new < full:
            done = 100 * load.num_new / full
            runner.show(f"cost, {num_blocks:,} blocks: {done:.0f} % of the largest size filled")
            load.run(prompts)
        for number in range(1, chunks + 1):
            runner.show(f"cost, {num_blocks:,} blocks: chunk {number} of {chunks}")
            for what, us_of in load.run(prompts).items():
                for who, us in us_of.items():
                    cost.us.setdefault(what, {}).setdefault(who, []).append(us)
    except KeyboardInterrupt:
        runner.interrupted = True
    cost.account_bytes = load.curve.num_bytes
    cost.model_bytes = bytes_of(load.follower, without=[load.learner, load.learner.hazards])
    return cost


def bytes_of(root: object, without: Sequence[object] = ()) -> int:
    """Memory of all objects that are reached from `root`, but not those of code, nor those that are
    reached through `without` alone."""
    code = type, ModuleType, FunctionType, MethodType, BuiltinFunctionType
    seen, total, waiting = {id(each) for each in without}, 0, [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, code):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray) and one.base is not None:
            waiting.append(one.base)
        waiting.extend(gc.get_referents(one))
    return total


def figures(costs: Sequence[Cost]) -> list[Figure]:
    """The medians over the chunks, with their range for an interval, and the memory."""
    made = []
    for cost in costs:
        where = f"{cost.num_blocks:,} blocks"
        for what, us_of in cost.us.items():
            values: dict[str, float] = {"rounds": len(us_of[CURVE])}
            for who, us in us_of.items():
                values |= {who: median(us), f"{who}, low": min(us), f"{who}, high": max(us)}
            made.append(Figure(f"{what}, {where}", "us", values, rounds=us_of))
        memory = {MEASURED: cost.model_bytes / MiB, ACCOUNT: cost.account_bytes / MiB}
        made.append(Figure(f"{MEMORY}, {where}", "MiB", memory))
    return made


def describe(costs: Sequence[Cost]) -> str:
    """A line for lookups and one for puts, and the memory."""
    lines: list[list[table.Cell]] = [
        [f"{cost.num_blocks:,}", what, *(median(us_of[who]) for who in (CURVE, LEARNER)),
         f"{min(us_of[CURVE]):.3f} to {max(us_of[CURVE]):.3f}"]
        for cost in costs
        for what, us_of in cost.us.items()
    ]  # fmt: skip
    heads = ["blocks", "us of CPU", CURVE, LEARNER, "range of the curve's"]
    memory = (
        f"{MEMORY}, {cost.num_blocks:,} blocks: {cost.model_bytes / MiB:.1f} MiB; by their own "
        f"account {cost.account_bytes / MiB:.1f} MiB"
        for cost in costs
    )
    return "\n".join([*([table.render(heads, lines)] if lines else []), *memory])


def _stretch(keys: Sequence[bytes], start: int) -> list[Stretch]:
    return [Stretch(len(keys), 0, start * BLOCK_TOKENS, BLOCK_TOKENS)]


def _prompts(chance: random.Random, part: int) -> Iterator[tuple[list[bytes], int]]:
    """Keys of prompts, and how many of the first ones a prompt before had too."""
    latest: list[list[bytes]] = []
    while True:
        goes_on = bool(latest) and chance.random() < 0.5
        before = chance.choice(latest)[: (MOST_PARTS - 1) * part] if goes_on else []
        num_new = part if before else AT_ONCE * part
        keys = [*before, *(chance.randbytes(KEY_BYTES) for _ in range(num_new))]
        if len(latest) < LATEST:
            latest.append(keys)
        else:
            latest[chance.randrange(LATEST)] = keys
        yield keys, len(before)
