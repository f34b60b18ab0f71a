"""A busy engine: 32 prompts that the server holds, four at a time, every limit as users have it.

Steps are as they come and stretched. The pool has room for seven of the prompts, so they are loaded
in turn, and what is loaded too soon would be evicted by the next. The server is healthy, or stops.
How many prompts meet a default limit is up to the host, and so is a queue's length in seconds:
these are for the whole suite. What a queue on patient limits gets is in `test_exactness`.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from busy_scene import AT_A_TIME, ATTEMPTS, LATE, MISSED, ROWS, Scene, counted_of, longest
from cluster import BLOCK, by_reason

from benchmarks.engine.slow_engine import SlowEngine
from examples.engine import Completion
from kv_connector.config import RemoteConfig
from kv_connector.tier.patience import MOST_FLOOR_S

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]

PROMPTS = range(1_000, 1_032)


def check_shares(
    scene: Scene, seeds: range, ask: Callable[[], dict[str, float]], in_time_share: float = 0.9
) -> None:
    """All complete rows came from the server, but for prompts that met a deadline of the server:
    with default limits a host that stands still has some. Where fewer than `in_time_share` met
    none, all are asked once more. A wait for the engine is no reason."""
    for _ in range(ATTEMPTS):
        scene.hold(seeds)
        counted = ask()
        reasons = by_reason(counted, MISSED)
        late = {reason: reasons.pop(reason, 0) for reason in LATE}
        reasons.pop("absent", 0)  # of the short prompts in between
        assert not any(reasons.values()), reasons
        in_time = len(seeds) - sum(late.values())
        assert counted["from server"] >= 0.99 * in_time * ROWS * BLOCK
        if in_time >= in_time_share * len(seeds):
            return
    raise AssertionError(f"of {len(seeds)} {in_time} were in time, {ATTEMPTS} times: {late}")


@pytest.mark.parametrize(("step_ms", "prompts"), [(0, 32), (50, 32), (500, 8)])
def test_all_that_the_server_holds_comes_from_it(scene: Scene, step_ms: float, prompts: int):
    seeds = PROMPTS[:prompts]

    def ask() -> dict[str, float]:
        with stretched(scene.engine, step_ms):
            return scene.ask_at_once(seeds)

    check_shares(scene, seeds, ask)


def check_hits_return(scene: Scene) -> None:
    """Most of the prompts come from the server again."""
    check_shares(scene, PROMPTS, lambda: scene.ask_at_once(PROMPTS), 0.5)


def stop(scene: Scene) -> None:
    """The server stands still. Other outages are in `tests/chaos`."""
    scene.server.send_signal(signal.SIGSTOP)


OPT_OUT: Mapping[str, Any] = {"kv_transfer_params": {"kvferry": {"load": False, "store": False}}}

STEP_MS = 50.0

STEPS = "vllm:inter_token_latency_seconds"


@contextmanager
def healed(scene: Scene) -> Iterator[None]:
    """Whatever the block did to the server, lookups are answered again when it is over."""
    try:
        yield
    finally:
        scene.server.send_signal(signal.SIGCONT)
        scene.until_ready()


@contextmanager
def stretched(engine: SlowEngine, step_ms: float = STEP_MS) -> Iterator[None]:
    """Steps of a known length: the machine's own noise is then small beside them."""
    engine.stretch(step_ms)
    try:
        yield
    finally:
        engine.stretch(0)


class Run(NamedTuple):
    """A queue that was asked."""

    answers: Sequence[Completion]
    counted: Mapping[str, float]

    @property
    def first_tokens_s(self) -> list[float]:
        """Seconds until the first token, the soonest first."""
        return sorted(answer.ttft_s for answer in self.answers)

    @property
    def step_s(self) -> float:
        """The mean step: a token a step."""
        total, count = (counted_of(self.counted, f"{STEPS}_{what}") for what in ("sum", "count"))
        return total / count


def compute(scene: Scene) -> Run:
    """The same queue as if there were no server. Nothing of it is in the engine afterwards."""
    with scene.counting() as counted:
        answers = scene.ask_all(PROMPTS, extra=OPT_OUT)
    scene.engine.reset_prefix_cache(30)
    return Run(answers, counted)


def check_waits(run: Run, computed: Run) -> None:
    """No request waited in vain for longer than its share of what computing the queue takes, for
    its lookup and its load, and the steps that were under way at their ends. Nor was the queue late
    for a reason that the connector does not count."""
    waited, step = longest(run.counted, "kvferry_wait_seconds"), longest(run.counted, STEPS)
    pairs = zip(run.first_tokens_s, computed.first_tokens_s, strict=True)
    later_s = max(mine - theirs for mine, theirs in pairs)
    queue_s, slower = computed.first_tokens_s[-1], run.step_s / computed.step_s
    patience_s = max(MOST_FLOOR_S, RemoteConfig().patience * queue_s)
    assert waited.more_than <= patience_s + 2 * step.at_most
    # A busy host makes one queue of two by itself as much longer as its steps, or twice as long.
    assert later_s <= patience_s + 2 * step.at_most + max(1.0, slower) * queue_s


def test_a_server_that_is_away_delays_no_request_of_a_queue_for_longer_than_its_limits(
    scene: Scene,
):
    """A lookup has the request's share; then its prompt is computed, and soon no other prompt waits
    at all. What the server holds comes from it again afterwards."""
    scene.hold(PROMPTS)
    with stretched(scene.engine):
        computed = compute(scene)
        with healed(scene), scene.counting() as counted:
            stop(scene)
            answers = scene.ask_all(PROMPTS)
    assert counted["from server"] == 0
    assert counted_of(counted, "kvferry_wait_seconds_count") == len(PROMPTS)
    check_waits(Run(answers, counted), computed)
    reasons = by_reason(counted, MISSED)
    late = {reason: reasons.pop(reason, 0) for reason in LATE}
    assert sum(late.values()) == len(PROMPTS), "one for each prompt, at its first block"
    assert late["lookup_late"] > 0 and not any(reasons.values()), (late, reasons)
    check_hits_return(scene)


def go_away_in_the_middle(scene: Scene) -> tuple[float, float]:
    """One queue in whose middle the server goes away: prompts that missed it, tokens from it."""
    scene.hold(PROMPTS)
    with stretched(scene.engine):
        computed = compute(scene)
        with healed(scene), scene.counting() as counted, ThreadPoolExecutor(1) as asker:
            loaded = scene.engine.metric("kvferry_loaded_blocks_total")
            asked = asker.submit(scene.ask_all, PROMPTS)
            while scene.engine.metric("kvferry_loaded_blocks_total") < loaded + 3 * ROWS:
                assert not asked.done(), "the queue was over before anything was loaded"
                time.sleep(0.02)
            stop(scene)
            answers = asked.result()
    check_waits(Run(answers, counted), computed)
    reasons = by_reason(counted, MISSED)
    lost = sum(reasons.pop(reason, 0) for reason in LATE)
    reasons.pop("absent", 0)
    assert not any(reasons.values()), reasons
    return lost, counted["from server"]


def test_a_server_that_goes_away_in_the_middle_of_a_queue_delays_no_request_beyond_its_share(
    scene: Scene,
):
    """Some prompts have come from it, the next are on their way, and of the others the engine
    knows that the server holds them."""
    for _ in range(ATTEMPTS):
        lost, tokens = go_away_in_the_middle(scene)
        check_hits_return(scene)
        if lost < len(PROMPTS):
            break
    else:  # on a busy host a step can be so slow that what has come is asked for once more
        raise AssertionError("nothing that had come before the outage was of use")
    assert lost > 0
    assert tokens >= 0.99 * (len(PROMPTS) - lost) * ROWS * BLOCK


def test_a_queue_that_came_while_the_server_stood_still_for_a_moment_is_served_by_it(scene: Scene):
    """Every lookup of the queue is late. What the engine has not admitted when the server goes on
    comes from it, but for the prompts of the steps until the first reply."""
    engine = scene.engine

    def late() -> float:
        reasons = by_reason(engine.metrics(), MISSED)
        return sum(reasons.get(reason, 0) for reason in LATE)

    def admitted() -> float:
        return counted_of(engine.metrics(), "kvferry_wait_seconds_count")

    for _ in range(ATTEMPTS):
        scene.hold(PROMPTS)
        scene.until_ready()
        late_before, admitted_before = late(), admitted()
        with (
            # Long steps: the queue outlasts what a busy host needs to see the first late lookup.
            stretched(engine, 4 * STEP_MS),
            healed(scene),
            scene.counting() as counted,
            ThreadPoolExecutor(1) as asker,
        ):
            stop(scene)
            asked = asker.submit(scene.ask_all, PROMPTS)
            while late() == late_before and not asked.done():
                time.sleep(0.02)
            scene.server.send_signal(signal.SIGCONT)
            left = len(PROMPTS) - (admitted() - admitted_before)
            asked.result()
        reasons = by_reason(counted, MISSED)
        print(f"\n{left:g} were left", {why: count for why, count in reasons.items() if count})
        assert counted["from server"] >= (left - 2 * AT_A_TIME) * ROWS * BLOCK, (left, reasons)
        if left >= len(PROMPTS) / 2:
            return
    raise AssertionError(f"only {left:g} were left, {ATTEMPTS} times")
