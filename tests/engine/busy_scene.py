"""A server, and an engine that takes four prompts at a time; between them nothing of the test.

The engine's pool holds nine prompts and its own cache four, so a queue of them comes from the
server one after the other. Every limit is as users have it.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cluster import BLOCK, PATIENCE_S, POOL_ROWS, connector, observer_of, stats_of

from benchmarks.engine.slow_engine import SlowEngine
from examples.engine import Completion
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.protocol import TierStats

AT_A_TIME = 4
ROWS = 20
PROMPT_TOKENS = ROWS * BLOCK + 3
ANSWER_TOKENS = 4
ENGINE_BLOCKS = 92

FILLERS = range(9_000, 9_000 + 3 * POOL_ROWS // (2 * ROWS))
"""Prompts that push all others out of the pool."""

LATE = ("lookup_late", "lookup_paused", "unavailable", "budget_spent", "load_failed")
"""Reasons for which a prompt is computed because the machine, or the server, was slow."""

MISSED = "kvferry_missed_blocks_total"

ATTEMPTS = 3
"""How often a prompt is given that the server holds, on a machine that may stand still for longer
than a default limit."""


class Scene:
    """A server, and an engine that takes four at a time. Nothing of the test is on the way."""

    def __init__(self, server: RemoteServer, engine: SlowEngine) -> None:
        self.server, self.engine = server, engine
        self.expected: dict[int, Completion] = {}
        self.client = observer_of(server)

    def hold(self, seeds: range) -> None:
        """These prompts are on the server and nowhere else; what is not yet known is computed,
        one prompt at a time. A busy host declines some puts: what they lost is computed again."""
        for seed in seeds:
            if seed not in self.expected:
                self.expected[seed] = self.ask(seed, ANSWER_TOKENS)
        for _ in range(ATTEMPTS):
            for seed in FILLERS:
                self.ask(seed, 1)
            self.engine.reset_prefix_cache(PATIENCE_S)
            if self._all_stored():
                return
            for seed in self.expected:
                self.ask(seed, 1)
        raise AssertionError("the server does not hold the prompts")

    def _all_stored(self) -> bool:
        """Whether backfill, which goes with steps, brings all blocks to the server in time."""
        wanted = ROWS * (len(self.expected) + len(FILLERS))
        deadline = time.monotonic() + PATIENCE_S / ATTEMPTS
        while (memory := self._memory()).blocks < wanted or memory.pending:
            if time.monotonic() > deadline:
                return False
            self.tick()
        return True

    def _memory(self) -> TierStats:
        return stats_of(self.client).tiers["memory"]

    def ask(
        self, seed: int, answer_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> Completion:
        return self.engine.complete(
            prompt_tokens(PROMPT_TOKENS, seed), answer_tokens, extra=extra, timeout_s=120
        )

    def ask_all(self, seeds: range, extra: Mapping[str, Any] | None = None) -> list[Completion]:
        """The answers to all of these together. They are right."""
        with ThreadPoolExecutor(len(seeds)) as askers:
            answers = list(askers.map(lambda seed: self.ask(seed, ANSWER_TOKENS, extra), seeds))
        assert all(a.agrees_with(self.expected[s]) for s, a in zip(seeds, answers, strict=True))
        return answers

    def ask_at_once(self, seeds: range) -> dict[str, float]:
        """Ask all of these together. Gives what the engine counted."""
        with self.counting() as counted:
            self.ask_all(seeds)
        return counted

    @contextmanager
    def counting(self) -> Iterator[dict[str, float]]:
        """What the engine counts in the block, complete at its end."""
        before, counted = self._counted(), dict[str, float]()
        yield counted
        for name, value in self._counted().items():
            counted[name] = value - before.get(name, 0)

    def _counted(self) -> dict[str, float]:
        self.tick()
        samples = self.engine.metrics()
        return samples | {
            "from server": self.engine.cached_by_level()["server"],
            "preempted": self.engine.metric("vllm:num_preemptions_total"),
        }

    def tick(self) -> None:
        """Gauges move, and blocks are offered again, with the engine's steps."""
        self.engine.complete(prompt_tokens(8, seed=1), 1)

    def until_ready(self) -> None:
        """Until lookups are answered again, so that the next test begins with a healthy server."""
        deadline = time.monotonic() + PATIENCE_S
        engine = self.engine
        while engine.metric("kvferry_server_ready") != 1 or engine.metric("kvferry_lookups_paused"):
            assert time.monotonic() < deadline
            # A block that no level above the server holds.
            self.engine.complete(prompt_tokens(BLOCK + 3, int(time.monotonic() * 1e3)), 1)
            time.sleep(0.05)


@contextmanager
def scene_of(model: Path, logs: Path) -> Iterator[Scene]:
    """All of it, until the end of the block."""
    args = [
        *("--max-model-len", "1024"),
        *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
        *("--max-num-seqs", str(AT_A_TIME)),
    ]
    with (
        RemoteServer("512MiB", log=logs / "busy-server.log") as server,
        SlowEngine(
            model, connector=connector(server.endpoint), args=args, log=logs / "busy-engine.log"
        ) as engine,
    ):
        scene = Scene(server, engine)
        yield scene
        scene.client.close()


def counted_of(counted: Mapping[str, float], name: str) -> float:
    return sum(value for sample, value in counted.items() if sample.partition("{")[0] == name)


class Longest(NamedTuple):
    """The bucket of the longest of a histogram's observations."""

    more_than: float
    at_most: float


def longest(counted: Mapping[str, float], histogram: str) -> Longest:
    """As exact as the buckets are."""
    up_to: dict[float, float] = {}
    for sample, value in counted.items():
        if sample.startswith(f"{histogram}_bucket{{"):
            bound = float(sample.partition('le="')[2].partition('"')[0])
            up_to[bound] = up_to.get(bound, 0) + value
    bounds = sorted(up_to)
    assert bounds and up_to[bounds[-1]] > 0, f"nothing was observed of {histogram}"
    last = next(place for place, bound in enumerate(bounds) if up_to[bound] == up_to[bounds[-1]])
    return Longest(bounds[last - 1] if last else 0.0, bounds[last])
