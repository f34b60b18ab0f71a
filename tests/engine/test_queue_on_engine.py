"""A busy engine: 32 prompts that the server holds, four at a time, every limit as users have it.

Steps are as they come and stretched. The pool holds five of the prompts, so they are loaded in
turn, and what is loaded too soon would be evicted by the next. The server is healthy, or stops, or
the network between the two swallows everything or delays it by seconds.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import BLOCK, POOL_ROWS, connector
from fault_proxy import BOTH, Faults
from proxy_process import ProxyProcess

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
    """A server, and an engine that takes four at a time. The way between them is a process of its
    own: nothing of the test can make the server slow."""

    def __init__(self, server: RemoteServer, proxy: ProxyProcess, engine: SlowEngine) -> None:
        self.server, self.proxy, self.engine = server, proxy, engine
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

    def ask(
        self, seed: int, answer_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> Completion:
        return self.engine.complete(
            prompt_tokens(PROMPT_TOKENS, seed), answer_tokens, extra=extra, timeout_s=120
        )

    def ask_all(
        self,
        seeds: range,
        answer_tokens: int = ANSWER_TOKENS,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """The answers to all of these together. They are right."""
        with ThreadPoolExecutor(len(seeds)) as askers:
            answers = list(askers.map(lambda seed: self.ask(seed, answer_tokens, extra), seeds))
        assert all(a.agrees_with(self.expected[s]) for s, a in zip(seeds, answers, strict=True))
        return answers

    def ask_at_once(self, seeds: range, answer_tokens: int = ANSWER_TOKENS) -> dict[str, float]:
        """Ask all of these together. Gives what the engine counted."""
        with self.counting() as counted:
            self.ask_all(seeds, answer_tokens)
        return counted

    @contextmanager
    def counting(self) -> Iterator[dict[str, float]]:
        """What the engine counts in the block, complete at its end."""
        before, counted = self._counted(), dict[str, float]()
        yield counted
        for name, value in self._counted().items():
            counted[name] = value - before.get(name, 0)

    def _counted(self) -> dict[str, float]:
        self.engine.complete(prompt_tokens(8, seed=1), 1)  # counters move with the engine's steps
        samples = self.engine.metrics()
        return samples | {
            "from server": self.engine.cached_by_level()["server"],
            "preempted": self.engine.metric("vllm:num_preemptions_total"),
        }


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, model: Path, logs: Path) -> Iterator[Scene]:
    """One for all tests of this file. The whole suite has another with `transport` tcp."""
    transport = getattr(request, "param", "auto")
    args = [
        *("--max-model-len", "1024"),
        *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
        *("--max-num-seqs", str(AT_A_TIME)),
    ]
    with (
        RemoteServer("512MiB", log=logs / f"busy-server-{transport}.log") as server,
        ProxyProcess(server.endpoint) as proxy,
        SlowEngine(
            model,
            connector=connector(proxy.endpoint, transport=transport),
            args=args,
            log=logs / f"busy-engine-{transport}.log",
        ) as engine,
    ):
        scene = Scene(server, proxy, engine)
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


def by_reason(counted: Mapping[str, float], metric: str) -> dict[str, float]:
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


Strike = Callable[[Scene], None]

OUTAGES: dict[str, Strike] = {
    "stopped": lambda scene: scene.server.send_signal(signal.SIGSTOP),
    "black hole": lambda scene: scene.proxy.set(Faults(swallowed=BOTH)),
    "2 s away": lambda scene: scene.proxy.set(Faults(latency_s=1.0)),
}
"""By name. More outages, and all at full length, are in `tests/chaos`."""

OPT_OUT: Mapping[str, Any] = {"kv_transfer_params": {"kvferry": {"load": False, "store": False}}}

STEP_MS = 50.0

# The lookup's 50 ms, and the step that is under way then, which a busy host stretches. A bucket of
# the histogram.
LATEST_S = 1.0
# What the server announced has its load as well: two seconds.
LATEST_LOAD_S = 2.0 + LATEST_S

EVERY_OUTAGE = [
    ("auto", "stopped"),
    ("auto", "black hole"),
    ("auto", "2 s away"),
    *(pytest.param("tcp", name, marks=pytest.mark.whole) for name in OUTAGES),
]


@contextmanager
def away(scene: Scene, strike: Strike) -> Iterator[None]:
    """The server is away in the block, and lookups are answered again when it is over."""
    try:
        strike(scene)
        yield
    finally:
        scene.proxy.clear()
        scene.server.send_signal(signal.SIGCONT)
        _until_ready(scene.engine)


@contextmanager
def stretched(engine: SlowEngine) -> Iterator[None]:
    """Steps of a known length: the machine's own noise is then small beside them."""
    engine.stretch(STEP_MS)
    try:
        yield
    finally:
        engine.stretch(0)


def first_tokens(answers: Sequence[Completion]) -> list[float]:
    """Seconds until the first token, the soonest first."""
    return sorted(answer.ttft_s for answer in answers)


def later_by(answers: Sequence[Completion], computed: Sequence[Completion]) -> float:
    """How much later the queue had its nth answer than the same queue without a server, at most."""
    pairs = zip(first_tokens(answers), first_tokens(computed), strict=True)
    return max(mine - theirs for mine, theirs in pairs)


def most_waited(counted: Mapping[str, float]) -> float:
    """The upper bound of the histogram's bucket that the longest wait of a request is in."""
    name = "kvferry_wait_seconds"
    asked = counted_of(counted, f"{name}_count")
    assert asked > 0
    bounds = sorted(
        float(sample.partition('le="')[2].partition('"')[0])
        for sample, value in counted.items()
        if sample.startswith(f"{name}_bucket") and value == asked
    )
    return bounds[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scene", "name"), EVERY_OUTAGE, indirect=["scene"])
def test_a_server_that_is_away_delays_no_request_of_a_queue_for_longer_than_its_limits(
    scene: Scene, name: str
):
    """A lookup has 50 ms; then its prompt is computed, and soon no other prompt waits at all. What
    the server holds comes from it again afterwards."""
    scene.hold(PROMPTS)
    with stretched(scene.engine):
        computed = scene.ask_all(PROMPTS, extra=OPT_OUT)
        scene.engine.reset_prefix_cache(timeout_s=30)
        with away(scene, OUTAGES[name]), scene.counting() as counted:
            answers = scene.ask_all(PROMPTS)
    assert counted["from server"] == 0
    assert counted_of(counted, "kvferry_wait_seconds_count") == len(PROMPTS)
    assert most_waited(counted) <= LATEST_S
    assert later_by(answers, computed) <= LATEST_S
    reasons = by_reason(counted, "kvferry_missed_blocks_total")
    late = {reason: reasons.pop(reason, 0) for reason in LATE}
    assert sum(late.values()) == len(PROMPTS), "one for each prompt, at its first block"
    assert late["lookup_late"] > 0 and not any(reasons.values()), (late, reasons)
    check_shares(scene, PROMPTS, lambda: scene.ask_at_once(PROMPTS))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scene", "name"), EVERY_OUTAGE, indirect=["scene"])
def test_a_server_that_goes_away_in_the_middle_of_a_queue_delays_no_request_beyond_its_load(
    scene: Scene, name: str
):
    """Some prompts have come from it, the next are on their way, and of the others the engine
    knows that the server holds them."""
    scene.hold(PROMPTS)
    with stretched(scene.engine):
        computed = scene.ask_all(PROMPTS, extra=OPT_OUT)
        scene.engine.reset_prefix_cache(timeout_s=30)
        with ThreadPoolExecutor(1) as asker, scene.counting() as counted:
            loaded = scene.engine.metric("kvferry_loaded_blocks_total")
            asked = asker.submit(scene.ask_all, PROMPTS)
            while scene.engine.metric("kvferry_loaded_blocks_total") < loaded + 3 * ROWS:
                assert not asked.done(), "the queue was over before anything was loaded"
                time.sleep(0.02)
            with away(scene, OUTAGES[name]):
                answers = asked.result()
    assert most_waited(counted) <= LATEST_LOAD_S
    assert later_by(answers, computed) <= LATEST_LOAD_S
    reasons = by_reason(counted, "kvferry_missed_blocks_total")
    lost = sum(reasons.pop(reason, 0) for reason in LATE)
    reasons.pop("absent", 0)
    assert not any(reasons.values()), reasons
    assert 0 < lost < len(PROMPTS)
    assert counted["from server"] >= 0.99 * (len(PROMPTS) - lost) * ROWS * BLOCK
    check_shares(scene, PROMPTS, lambda: scene.ask_at_once(PROMPTS))


def counted_of(counted: Mapping[str, float], name: str) -> float:
    return sum(value for sample, value in counted.items() if sample.partition("{")[0] == name)


def _until_ready(engine: SlowEngine) -> None:
    """Until lookups are answered again, so that the next test begins with a healthy server."""
    deadline = time.monotonic() + 20
    while engine.metric("kvferry_server_ready") != 1 or engine.metric("kvferry_lookups_paused"):
        assert time.monotonic() < deadline
        engine.complete(prompt_tokens(PROMPT_TOKENS, seed=int(time.monotonic() * 1e3)), 1)
        time.sleep(0.1)
