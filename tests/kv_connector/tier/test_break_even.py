"""What loads slower than it computes is not fetched, and a link that recovers is found out."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from scripted_client import BLOCK_BYTES, TOKENS_PER_BLOCK, Clock, Engine

from kv_connector.request_options import PREFETCH_KEY
from kv_connector.tier import metrics
from kv_connector.tier.break_even import PROBE_COSTS, BreakEven, costs_of
from kv_connector.tier.speeds import (
    KEPT_SAMPLES,
    LEAST_SAMPLES,
    Chunk,
    EngineSpeed,
    LinkSpeed,
    Recent,
)
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState
MiB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens", "link", "round_trip", "prefill", "round_trips", "worth"),
    [
        # the link is as fast as the engine, to the byte
        (100, 100, 1.0, 0.0, 1.0, 2, True),
        (101, 100, 1.0, 0.0, 1.0, 2, False),
        # 1 MiB for 16 tokens: 1 ms on the link, 2 ms of computing
        (MiB, 16, 1000 * MiB, 0.0, 8000.0, 2, True),
        # round trips are part of it, and the ones already made are not
        (MiB, 16, 1000 * MiB, 0.0006, 8000.0, 2, False),
        (MiB, 16, 1000 * MiB, 0.0006, 8000.0, 1, True),
        # and matter less, the longer the prefix
        (64 * MiB, 64 * 16, 1000 * MiB, 0.0006, 8000.0, 2, True),
        # what is not known takes no time
        (MiB, 16, None, 0.01, 8000.0, 2, False),
        (MiB, 16, None, 0.0009, 8000.0, 2, True),
        (MiB, 16, 1000 * MiB, None, 8000.0, 2, True),
        (MiB, 16, 1.0, 0.01, None, 2, True),
        # nothing came at all, or nothing computes
        (MiB, 16, 0.0, 0.0, 8000.0, 2, False),
        (MiB, 16, 1.0, 0.0, 0.0, 2, True),
    ],
)
def test_what_is_worth_loading(
    num_bytes: int, num_tokens: int, link: float | None, round_trip: float | None,
    prefill: float | None, round_trips: int, worth: bool,
):  # fmt: skip
    speeds: Any = (
        SimpleNamespace(bytes_per_s=link, round_trip_s=round_trip),
        SimpleNamespace(compute_s=lambda chunk: chunk.tokens / prefill if prefill else None),
    )
    assert worth is costs_of(num_bytes, num_tokens, *speeds, round_trips=round_trips).is_worth


def gate(
    clock: Clock, *, bytes_per_s: float, tokens_per_s: float, enabled: bool = True
) -> BreakEven:
    gate = BreakEven(clock, enabled=enabled)
    for _ in range(LEAST_SAMPLES):
        gate.link.lookup_took(0.001)
    for _ in range(LEAST_SAMPLES):
        gate.link.load_took(int(bytes_per_s * 1.0), 1.001)
        gate.engine.step_began([Chunk(int(tokens_per_s))], clock.now)
        clock.now += 1.0
        gate.engine.step_ended(clock.now)
    return gate


def admits(gate: BreakEven, num_bytes: int, num_tokens: int) -> bool:
    costs = gate.costs(num_bytes, num_tokens, round_trips=2)
    return costs.is_worth or gate.is_probe_due(costs)


def test_while_it_declines_the_first_one_after_a_while_is_fetched_all_the_same():
    clock = Clock()
    slow = gate(clock, bytes_per_s=1000, tokens_per_s=1000)
    assert not admits(slow, MiB, 16)
    pause_s = slow.costs(MiB, 16, round_trips=2).probe_pause_s
    clock.now += pause_s - 0.1
    assert not admits(slow, MiB, 16)
    clock.now += 0.2
    assert admits(slow, MiB, 16)
    assert not admits(slow, MiB, 16), "one, and then it waits again"


def test_a_link_that_recovers_is_believed_after_a_few_probes_and_one_that_does_not_is_not():
    clock = Clock()
    slow = gate(clock, bytes_per_s=1000, tokens_per_s=1000)
    assert not admits(slow, MiB, 16)
    probes = 0
    while slow.link.bytes_per_s < 100 * MiB:
        clock.now += 1.01 * slow.costs(MiB, 16, round_trips=2).probe_pause_s
        assert admits(slow, MiB, 16)
        slow.link.load_took(MiB, 0.005)
        probes += 1
    assert probes == LEAST_SAMPLES
    assert all(admits(slow, MiB, 16) for _ in range(100))

    still = gate(clock, bytes_per_s=1000, tokens_per_s=1000)
    admitted = 0
    pause_s = still.costs(MiB, 16, round_trips=2).probe_pause_s
    assert not admits(still, MiB, 16)
    for _ in range(100):
        clock.now += pause_s / 10
        if admits(still, MiB, 16):
            still.link.load_took(1000, 1.0)
            admitted += 1
    assert admitted == pytest.approx(10, abs=1)


def test_one_stall_and_one_slow_step_decide_nothing():
    recent = Recent()
    for sample in [100.0] * LEAST_SAMPLES:
        assert recent.value is None
        recent.add(sample)
    for sample in (0.0, 1e9):
        recent.add(sample)
        assert recent.value == 100.0


def test_the_gate_can_be_turned_off():
    off = gate(Clock(), bytes_per_s=1000, tokens_per_s=1000, enabled=False)
    assert off.costs(MiB, 16, round_trips=2).is_worth


# ── what is measured ─────────────────────────────────────────────────────────────────────


def test_a_load_is_measured_without_its_round_trip_but_never_as_twice_as_fast():
    link = LinkSpeed()
    for _ in range(LEAST_SAMPLES):
        link.lookup_took(0.010)
    for _ in range(LEAST_SAMPLES):
        link.load_took(MiB, 0.110)
    assert link.bytes_per_s == pytest.approx(10 * MiB)
    for _ in range(KEPT_SAMPLES):
        link.load_took(MiB, 0.008)
    assert link.bytes_per_s == pytest.approx(MiB / 0.004)
    link.forget()
    assert link.bytes_per_s is None and link.round_trip_s is None


def steps(speed: EngineSpeed, *counts: list[int], step_s: float = 0.1, pause_s: float = 0.0):
    now = max(speed._last_end_s, 0.0)
    for tokens in counts:
        prompts = [Chunk(number) for number in tokens if number > 1]
        speed.step_began(prompts, now, others=tokens.count(1))
        speed.step_ended(now + step_s)
        now += step_s + pause_s


def test_an_idle_engine_between_two_steps_is_not_a_slow_one():
    speed = EngineSpeed()
    steps(speed, *[[512]] * LEAST_SAMPLES, pause_s=60.0)
    assert speed.tokens_per_s == pytest.approx(5120)


@pytest.mark.parametrize("tokens", [[1] * 200, [63], [64] + [1] * 65, []])
def test_steps_that_say_little_about_prefill_are_left_out(tokens: list[int]):
    speed = EngineSpeed()
    steps(speed, *[tokens] * 20)
    assert speed.tokens_per_s is None
    steps(speed, *[[512, *tokens]] * LEAST_SAMPLES)
    assert speed.tokens_per_s is not None


def test_a_pipelined_step_is_measured_from_the_end_of_the_one_before():
    """Planned 0.1 s ahead: from plan to end it takes two steps' time."""
    speed = EngineSpeed()
    speed.step_began([Chunk(512)], 0.0)
    for i in range(LEAST_SAMPLES + 1):
        speed.step_began([Chunk(512)], i * 0.1)
        speed.step_ended((i + 1) * 0.1)
    assert speed.tokens_per_s == pytest.approx(5120)


def test_ends_that_never_come_do_not_pile_up():
    speed = EngineSpeed()
    for i in range(1000):
        speed.step_began([Chunk(512)], float(i))
    steps(speed, *[[512]] * 40)
    assert len(speed._under_way) <= 8


# ── in the tier ──────────────────────────────────────────────────────────────────────────


def measured(engine: Engine, *, load_s: float, prefill_tokens_per_s: float = 1000.0) -> None:
    """Loads of one block that take `load_s`, each for a request of its own."""
    for i in range(LEAST_SAMPLES):
        context, keys = engine.ask(f"measure {i}", 1)
        engine.clock.now += 0.0001
        engine.client.last("lookup").found(READABLE)
        assert engine.lookup(context, keys) == ["HIT"]
        engine.tier.submit_load(engine.job(context, keys, [0]))
        engine.clock.now += load_s
        engine.client.last("get").landed(0)
        engine.finished()
        engine.step()
        prefill = engine.tier.break_even.engine
        prefill.step_began([Chunk(1000)], engine.clock.now)
        engine.clock.now += 1000 / prefill_tokens_per_s
        prefill.step_ended(engine.clock.now)


def test_a_prefix_that_would_load_slower_than_it_computes_is_not_asked_for(engine: Engine):
    """32 tokens a block: 32 ms to compute, 100 ms to load."""
    measured(engine, load_s=0.1)
    context, keys = engine.request("r", 8)
    asked = engine.client.count("lookup")
    assert engine.lookup(context, keys) == ["RETRY"] * 8
    engine.step()
    assert engine.lookup(context, keys) == ["MISS"] * 8
    assert engine.client.count("lookup") == asked
    assert engine.counted(metrics.MISSED_BLOCKS, "break_even") == 8


def test_a_whole_prompt_that_is_slower_to_load_costs_the_engine_no_step(engine: Engine):
    """32 tokens a block: 32 ms to compute, 100 ms to load."""
    measured(engine, load_s=0.1)
    context, keys = engine.request("r", 8)
    engine.tier.lookups.prompt_is("r", 8 * 32)
    assert engine.lookup(context, keys) == ["MISS"] * 8
    assert engine.counted(metrics.MISSED_BLOCKS, "break_even") == 8


def test_a_probe_is_loaded_and_not_only_looked_up(engine: Engine):
    measured(engine, load_s=0.1)
    for _ in range(2):  # the first one begins the time between probes
        engine.clock.now += PROBE_COSTS
        context, keys = engine.request("probe", 8)
        engine.tier.lookups.prompt_is("probe", 8 * 32)
        engine.lookup(context, keys)
        engine.step()
    engine.client.last("lookup").found(*[READABLE] * 8)
    assert engine.lookup(context, keys) == ["HIT"] * 8


def test_a_request_that_prefetches_loads_what_is_slower_than_computing(engine: Engine):
    """32 ms to compute, 50 ms to load: no request waits for its answer."""
    measured(engine, load_s=0.05)
    context, keys = engine.request("r", 8, **{PREFETCH_KEY: True})
    assert engine.lookup(context, keys) == ["RETRY"] * 8
    engine.step()
    engine.client.last("lookup").found(*[READABLE] * 8)
    assert engine.lookup(context, keys) == ["HIT"] * 8


def test_an_answer_that_leaves_too_little_to_be_worth_it_is_not_loaded(engine: Engine):
    """Twenty blocks were worth two round trips of 40 ms; the one that is there not even one."""
    measured(engine, load_s=0.0001)
    for _ in range(KEPT_SAMPLES):
        engine.tier.break_even.link.lookup_took(0.040)
    context, keys = engine.ask("r", 20, READABLE, *[ABSENT] * 19)
    assert engine.lookup(context, keys) == ["MISS"] * 20
    assert engine.counted(metrics.MISSED_BLOCKS, "break_even") == 1


def test_a_server_that_comes_back_is_measured_anew(engine: Engine):
    measured(engine, load_s=0.1)
    for ready in (False, True):
        engine.client.ready = ready
        engine.tier.serve_external_requests(MagicMock())
    context, keys = engine.ask("r", 1, READABLE)
    assert engine.lookup(context, keys) == ["HIT"]


def test_loads_that_were_cancelled_or_found_nobody_measure_nothing(engine: Engine):
    context, keys = engine.request("r", 1)
    for _ in range(LEAST_SAMPLES):
        engine.tier.submit_load(engine.job(context, keys, [0]))
        engine.tier.transfers.drain(1.0)
        engine.finished()
    assert engine.tier.break_even.link.bytes_per_s is None


def test_the_speeds_are_gauges_once_they_are_known(engine: Engine):
    speeds = {metrics.LINK_SPEED, metrics.LOOKUP_SECONDS, metrics.PREFILL_SPEED}
    assert speeds.isdisjoint(engine.collect())
    measured(engine, load_s=0.1)
    gauges = {name: values for name, values in engine.collect().items() if name in speeds}
    gauges = {name: of_name.get((), of_name.get(("",))) for name, of_name in gauges.items()}
    assert gauges[metrics.LINK_SPEED] == pytest.approx(BLOCK_BYTES / 0.1, rel=0.01)
    assert gauges[metrics.PREFILL_SPEED] == pytest.approx(1000)
    assert TOKENS_PER_BLOCK / gauges[metrics.PREFILL_SPEED] < 0.1


# ── how long a request waited ────────────────────────────────────────────────────────────


def waits(engine: Engine) -> list[tuple[float, float]]:
    stats = engine.collect()
    seconds, steps = (
        stats.get(name, {}).get((), []) for name in (metrics.WAIT_SECONDS, metrics.WAIT_STEPS)
    )
    return [(pytest.approx(s), n) for s, n in zip(seconds, steps, strict=True)]


def test_the_wait_of_a_request_is_observed_once_from_first_lookup_to_admission(engine: Engine):
    context, keys = engine.request("r", 2)
    engine.clock.now += 5.0
    engine.lookup(context, keys)
    engine.tier.deferred("r", keys)
    engine.step()
    engine.clock.now += 0.030
    engine.client.last("lookup").found(READABLE, READABLE)
    engine.lookup(context, keys)
    engine.tier.deferred("r", keys)
    engine.step()
    assert waits(engine) == []
    engine.clock.now += 0.012
    engine.tier.admitted("r", [])
    assert waits(engine) == [(0.042, 2)]
    engine.clock.now += 1.0
    engine.tier.admitted("r", [])
    assert waits(engine) == []


def test_requests_that_never_asked_and_bare_tiers_are_told_apart(engine: Engine):
    engine.request("all in the pool", 2)
    engine.tier.admitted("all in the pool", [])
    engine.tier.admitted("a stranger", [])
    assert waits(engine) == []
    engine.ask("bare", 1)
    engine.clock.now += 0.02
    engine.tier.on_schedule_end(engine.scheduled("bare"))
    assert waits(engine) == [(0.02, 2)]
