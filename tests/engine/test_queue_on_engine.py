"""A busy engine: 32 prompts that the server holds, four at a time, every limit as users have it.

Steps are as they come and stretched. The pool holds five of the prompts, so they are loaded in
turn, and what is loaded too soon would be evicted by the next.
"""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import BLOCK, POOL_ROWS, connector

from benchmarks.engine.slow_engine import SlowEngine
from examples.engine import Completion
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import TierStats

AT_A_TIME = 4
ROWS = 20
PROMPT_TOKENS = ROWS * BLOCK + 3
ANSWER_TOKENS = 4
# Each of four running prompts needs 21 blocks and a block more for 32 tokens of its answer: four
# answers of this length do not fit, so requests are preempted.
ENGINE_BLOCKS = 92
LONG_ANSWER_TOKENS = 120

PROMPTS = range(1_000, 1_032)


class Scene:
    """A server, and an engine that takes four at a time. Nothing of the test is on the way."""

    def __init__(self, server: RemoteServer, engine: SlowEngine) -> None:
        self.server, self.engine = server, engine
        self.expected: dict[int, Completion] = {}
        self.client = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
        while not self.client.ready:
            time.sleep(0.01)

    def hold(self, seeds: range, answer_tokens: int = ANSWER_TOKENS) -> None:
        """These prompts are on the server and nowhere else; what is not yet known is computed,
        one prompt at a time."""
        for seed in seeds:
            if seed not in self.expected:
                self.expected[seed] = self.ask(seed, answer_tokens)
        fillers = range(9_000, 9_000 + 2 * POOL_ROWS // ROWS)
        for seed in fillers:
            self.ask(seed, 1)
        self.engine.reset_prefix_cache(timeout_s=30)
        wanted = ROWS * (len(self.expected) + len(fillers))
        deadline = time.monotonic() + 30
        while (memory := self._memory()).blocks < wanted or memory.pending:
            assert time.monotonic() < deadline, "the server does not hold the prompts"
            self.engine.complete(prompt_tokens(8, seed=1), 1)  # backfill goes with steps

    def _memory(self) -> TierStats:
        return self.client.stats(timeout_s=10).result().tiers["memory"]

    def ask(self, seed: int, answer_tokens: int) -> Completion:
        return self.engine.complete(prompt_tokens(PROMPT_TOKENS, seed), answer_tokens)

    def ask_at_once(self, seeds: range, answer_tokens: int = ANSWER_TOKENS) -> dict[str, float]:
        """All of these together. The answers are right; gives what the engine counted."""
        before = self._counted()
        with ThreadPoolExecutor(len(seeds)) as askers:
            answers = list(askers.map(lambda seed: self.ask(seed, answer_tokens), seeds))
        after = self._counted()
        assert all(a.agrees_with(self.expected[s]) for s, a in zip(seeds, answers, strict=True))
        return {name: value - before.get(name, 0) for name, value in after.items()}

    def _counted(self) -> dict[str, float]:
        self.engine.complete(prompt_tokens(8, seed=1), 1)  # counters move with the engine's steps
        samples = self.engine.metrics()
        return samples | {
            "from server": self.engine.cached_by_level()["server"],
            "preempted": self.engine.metric("vllm:num_preemptions_total"),
        }


@pytest.fixture(scope="module")
def scene(model: Path, logs: Path) -> Iterator[Scene]:
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


ATTEMPTS = 3

LATE = ("lookup_late", "lookup_paused", "unavailable", "load_failed")
"""Reasons for which a prompt is computed because the machine, or the server, was slow."""


def check_shares(
    scene: Scene, seeds: range, ask: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """All complete rows came from the server, but for prompts that met a deadline of the server:
    with default limits a host that stands still has some. Then they are asked once more. A wait
    for the engine is no reason. Gives what was counted."""
    for _ in range(ATTEMPTS):
        scene.hold(seeds)
        counted = ask()
        reasons = by_reason(counted, "kvferry_missed_blocks_total")
        late = sum(reasons.pop(reason, 0) for reason in LATE)
        reasons.pop("absent", 0)  # of the short prompts in between
        assert not any(reasons.values()), reasons
        assert counted["from server"] >= 0.99 * (len(seeds) - late) * ROWS * BLOCK
        if not late:
            return counted
    raise AssertionError(f"{late} of {len(seeds)} were late, {ATTEMPTS} times: {reasons}")


def by_reason(counted: dict[str, float], metric: str) -> dict[str, float]:
    return {
        name.partition('reason="')[2].partition('"')[0]: value
        for name, value in counted.items()
        if name.startswith(metric)
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("step_ms", "prompts"),
    [(0, 32), (50, 32), (500, 8)],
)
def test_all_that_the_server_holds_comes_from_it(scene: Scene, step_ms: float, prompts: int):
    seeds = PROMPTS[:prompts]

    def ask() -> dict[str, float]:
        scene.engine.stretch(step_ms)
        try:
            return scene.ask_at_once(seeds)
        finally:
            scene.engine.stretch(0)

    check_shares(scene, seeds, ask)


@pytest.mark.timeout(600)
def test_preempted_prompts_come_from_the_server_and_their_answers_are_right(scene: Scene):
    seeds = range(2_000, 2_010)
    scene.hold(seeds, LONG_ANSWER_TOKENS)
    counted = check_shares(scene, seeds, lambda: scene.ask_at_once(seeds, LONG_ANSWER_TOKENS))
    assert counted["preempted"] > 0


# 50 ms for the lookup and then the step that is under way, which a busy host stretches. A bucket of
# the histogram.
LATEST_S = 1.0


@pytest.mark.timeout(600)
def test_a_server_that_stands_still_delays_no_request_for_longer_than_its_limits(scene: Scene):
    """A lookup has 50 ms; then its prompt is computed, and soon no other prompt waits at all.
    More outages of this kind are in `tests/chaos`."""
    seeds = PROMPTS[:16]
    scene.hold(seeds)
    scene.server.send_signal(signal.SIGSTOP)
    try:
        counted = scene.ask_at_once(seeds)
    finally:
        scene.server.send_signal(signal.SIGCONT)
        _until_ready(scene.engine)
    assert counted["from server"] == 0
    (in_time,) = (
        value
        for sample, value in counted.items()
        if sample.startswith("kvferry_wait_seconds_bucket") and f'le="{LATEST_S}"' in sample
    )
    assert in_time == counted_of(counted, "kvferry_wait_seconds_count") > 0


def counted_of(counted: dict[str, float], name: str) -> float:
    return sum(value for sample, value in counted.items() if sample.partition("{")[0] == name)


def _until_ready(engine: SlowEngine) -> None:
    """Until lookups are answered again, so that the next test begins with a healthy server."""
    deadline = time.monotonic() + 20
    while engine.metric("kvferry_server_ready") != 1 or engine.metric("kvferry_lookups_paused"):
        assert time.monotonic() < deadline
        engine.complete(prompt_tokens(PROMPT_TOKENS, seed=int(time.monotonic() * 1e3)), 1)
        time.sleep(0.1)
