"""How long a request waits: a share of what computing would take, by the engine's own speed."""

from typing import Any

import pytest
from modelless_engine import Make
from scripted_client import BLOCK_BYTES, TOKENS_PER_BLOCK, Engine
from test_break_even import steps
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from examples.tiny_model import PRESETS
from kv_connector.config import RemoteConfig
from kv_connector.hooks.prefills import Prefills
from kv_connector.tier import lookups
from kv_connector.tier.patience import (
    LEAST_FLOOR_S,
    LONGEST_STEP_S,
    MOST_FLOOR_S,
    PRIOR_COMPUTE_S,
    ROUND_TRIPS,
    Patience,
)
from kv_connector.tier.speeds import (
    KEPT_SAMPLES,
    LEAST_PRIOR_S,
    LEAST_SAMPLES,
    Chunk,
    EngineSpeed,
    LinkSpeed,
)
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import KeyState

READABLE = KeyState.READABLE


def patience(
    engine: EngineSpeed | None = None, link: LinkSpeed | None = None, **settings: Any
) -> Patience:
    config = RemoteConfig(**settings)
    return Patience(config, engine or EngineSpeed(), link or LinkSpeed())


def computes(tokens_per_s: float) -> EngineSpeed:
    """An engine that was seen to compute so fast, in steps of 100 ms."""
    speed = EngineSpeed()
    steps(speed, *[[int(tokens_per_s / 10)]] * LEAST_SAMPLES, step_s=0.1)
    return speed


# ── the rule ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("compute_s", "wait_s"), [(0.05, 0.1), (1.0, 0.1), (4.0, 0.4), (30.0, 3.0), (120.0, 5.0)]
)
def test_a_request_waits_for_a_share_of_what_computing_takes(compute_s: float, wait_s: float):
    assert patience().wait_s(compute_s) == pytest.approx(wait_s)


def test_before_the_engine_has_computed_anything_the_prior_holds():
    assert patience().compute_s(10_000) == PRIOR_COMPUTE_S
    assert patience().wait_s() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("device", "workers", "tokens", "least_s", "most_s"),
    [
        ("cuda", 1, 1_000, 0.05, 0.5),
        ("cuda", 4, 8_000, 0.1, 1.5),
        ("cuda", 1, 100_000, 20, 200),
        ("cpu", 1, 10, 3, 3),
        ("cpu", 1, 1_000, 30, 500),
    ],
)
def test_before_that_a_model_of_known_size_is_taken_for_about_as_fast_as_its_device(
    device: str, workers: int, tokens: int, least_s: float, most_s: float
):
    """A model of 8 billion weights. What it has computed once counts instead."""
    speed = EngineSpeed()
    speed.expect(hidden_size=4096, num_layers=32, device=device, num_workers=workers)
    assert least_s <= patience(speed).compute_s(tokens) <= most_s
    steps(speed, [1000], step_s=1.0)
    assert 1.0 <= patience(speed).compute_s(1000) < 1.05


def test_an_engine_takes_its_model_for_so_fast(make: Make):
    connector = make().connector
    assert connector._remote is not None
    speed, as_expected = connector._remote.break_even.engine, EngineSpeed()
    as_expected.expect(PRESETS["small"].hidden_size, PRESETS["small"].layers, "cpu", 1)
    many = Chunk(1_000_000)
    assert speed.compute_s(many) == as_expected.compute_s(many) > LEAST_PRIOR_S["cpu"]
    assert not connector._remote.counters.totals()


def test_share_and_upper_limit_are_settings():
    assert patience(patience=0.5, max_wait_ms=2_000).wait_s(3.0) == pytest.approx(1.5)
    assert patience(patience=0.5, max_wait_ms=2_000).wait_s(60.0) == pytest.approx(2.0)
    assert patience(patience=0).wait_s(60.0) == MOST_FLOOR_S


@pytest.mark.parametrize(
    ("trip_s", "floor_s"),
    [(0.0001, LEAST_FLOOR_S), (0.005, ROUND_TRIPS * 0.005), (1.0, MOST_FLOOR_S)],
)
def test_the_floor_is_a_few_round_trips(trip_s: float, floor_s: float):
    link = LinkSpeed()
    for _ in range(LEAST_SAMPLES):
        link.lookup_took(trip_s)
    assert patience(link=link).floor_s == pytest.approx(floor_s)


@pytest.mark.parametrize(("step_s", "floor_s"), [(0.002, MOST_FLOOR_S), (0.5, 0.4), (60.0, 1.0)])
def test_no_wait_is_shorter_than_most_of_a_step_of_up_to_a_second(step_s: float, floor_s: float):
    speed = EngineSpeed()
    steps(speed, *[[1]] * LEAST_SAMPLES, step_s=step_s)
    assert patience(speed).floor_s == pytest.approx(floor_s)
    assert floor_s <= LONGEST_STEP_S
    steps(speed, *[[]] * (KEPT_SAMPLES // 2 + 1), step_s=0.002)
    assert patience(speed).floor_s == MOST_FLOOR_S, "an engine that only waits is soon impatient"


@pytest.mark.parametrize(
    ("compute_s", "wait_s"), [(0.3, 0.1), (1.2, 0.12), (1.6, 0.16), (30.0, 3.0)]
)
def test_a_wait_of_a_busy_engine_ends_with_the_last_step_that_its_share_has(
    compute_s: float, wait_s: float
):
    """Its end shows at the end of a step, so one more step would be beyond the share."""
    speed, step_s = EngineSpeed(), 0.05
    steps(speed, *[[1]] * LEAST_SAMPLES, step_s=step_s)
    link = LinkSpeed()
    link.lookup_took(0.0001)
    ends_s = patience(speed, link).wait_s(compute_s)
    assert wait_s - 1.5 * step_s < ends_s <= wait_s
    assert -(-ends_s // step_s) * step_s <= wait_s


def test_the_long_steps_of_prompts_lengthen_no_wait_between_prompts():
    speed = EngineSpeed()
    steps(speed, *[[512]] * KEPT_SAMPLES, step_s=0.8)
    assert patience(speed).floor_s == pytest.approx(0.64), "the next step may have a prompt too"
    speed.step_began([], 100.0, others=32)
    speed.step_ended(100.05)
    assert patience(speed).floor_s == MOST_FLOOR_S
    speed.step_began([], 101.0, others=32, unfinished=[Chunk(1)])
    assert patience(speed).floor_s == pytest.approx(0.64)


# ── the time to compute ──────────────────────────────────────────────────────────────────


def test_one_step_is_enough_to_know_about_how_fast_the_engine_is():
    speed = EngineSpeed()
    steps(speed, [1000], step_s=1.0)
    assert speed.tokens_per_s is None, "not enough for break-even"
    assert patience(speed).compute_s(4000) == pytest.approx(4.0)


def test_what_the_engine_has_begun_is_computed_before():
    speed = computes(1000)
    speed.step_began([Chunk(100)], 0.0, unfinished=[Chunk(2_000, 100), Chunk(1_000)])
    assert patience(speed).compute_s(500) == pytest.approx(3.5)


@pytest.mark.parametrize("position", [0, 30_000, 90_000])
def test_tokens_behind_many_others_take_longer(position: int):
    """An engine with attention as expensive as all else at 30,000 tokens. It was measured at the
    beginning of prompts, and is asked about their ends."""

    def seconds(chunk: Chunk) -> float:
        return sum(1 + (chunk.position + n) / 30_000 for n in range(chunk.tokens)) / 10_000

    speed, now = EngineSpeed(even_at=30_000), 0.0
    for number in range(LEAST_SAMPLES):
        chunk = Chunk(2_000, 2_000 * number)
        speed.step_began([chunk], now)
        speed.step_ended(now := now + seconds(chunk))
    asked = Chunk(8_000, position)
    assert patience(speed).compute_s(*asked) == pytest.approx(seconds(asked), rel=0.01)


# ── requests ─────────────────────────────────────────────────────────────────────────────


def slow_engine(engine: Engine, tokens_per_s: float) -> None:
    steps(engine.tier.break_even.engine, *[[int(tokens_per_s)]] * LEAST_SAMPLES, step_s=1.0)
    steps(engine.tier.break_even.engine, *[[]] * KEPT_SAMPLES, step_s=0.001)


def waited(engine: Engine, name: str, num_blocks: int) -> float:
    """How long a request looks its blocks up before it is computed, to a silent server."""
    context, keys = engine.request(name, num_blocks)
    engine.tier.lookups.prompt_is(name, num_blocks * TOKENS_PER_BLOCK)
    began = engine.clock.now
    while "RETRY" in engine.lookup(context, keys):
        engine.step()
        engine.clock.now += 0.01
        for asked in engine.client.asked:
            is_ours = asked.operation == "lookup" and asked.keys == keys
            if is_ours and engine.clock.now - began >= asked.timeout_s and not asked.reply.done():
                asked.reply.set_exception(DeadlineExceeded("late"))
    return engine.clock.now - began


def test_a_long_prompt_waits_longer_for_a_silent_server_than_a_short_one(engine: Engine):
    slow_engine(engine, 100)
    assert waited(engine, "long", 30) == pytest.approx(0.96, abs=0.05)


def test_a_silent_server_costs_an_outage_the_longest_wait_and_not_the_sum(engine: Engine):
    slow_engine(engine, 100)
    assert waited(engine, "first", 10) == pytest.approx(0.32, abs=0.05)
    engine.step()
    assert waited(engine, "second", 10) == waited(engine, "short", 1) == 0.0
    assert waited(engine, "longer", 30) == pytest.approx(0.96 - 0.32, abs=0.05)


def test_a_server_that_is_slow_and_alive_is_waited_for_once_that_is_known(engine: Engine):
    slow_engine(engine, 64)
    for number in range(2):
        context, keys = engine.ask(f"r{number}", 10)
        asked_s, asked = engine.clock.now, engine.client.last("lookup")
        engine.clock.now += 0.65
        if number == 0:  # it may wait 0.5 s
            asked.reply.set_exception(DeadlineExceeded("late"))
        engine.step()
        engine.clock.now = asked_s + 1.0
        asked.found(*[READABLE] * 10)
        found = engine.lookup(context, keys)
    assert found == ["HIT"] * 10


def test_prompts_over_a_slow_link_hold_half_of_the_room_for_loads(engine: Engine):
    """Of 30 rows. A row of theirs takes a quarter of a second; to compute it takes a third."""
    slow_engine(engine, 96)
    for _ in range(LEAST_SAMPLES):
        engine.tier.break_even.link.load_took(4 * BLOCK_BYTES, 1.0)
    found = {
        name: engine.lookup(*engine.ask(name, num_blocks, *[READABLE] * num_blocks))
        for name, num_blocks in (("long", 10), ("next", 10), ("short", 3))
    }
    assert found == {"long": ["HIT"] * 10, "next": ["RETRY"] * 10, "short": ["HIT"] * 3}


@pytest.mark.parametrize(("replies_s", "in_vain_s"), [(0.001, 0.499), (0.5, 0.0)])
def test_a_load_may_fall_behind_by_what_its_request_has_not_waited_in_vain(
    engine: Engine, replies_s: float, in_vain_s: float
):
    """A reply that comes after half a second, of a server whose replies take `replies_s`."""
    slow_engine(engine, 100)
    for _ in range(LEAST_SAMPLES):
        engine.tier.break_even.link.lookup_took(replies_s)
    context, keys = engine.ask("r", 30)
    engine.clock.now += 0.5
    engine.client.last("lookup").found(*[READABLE] * 30)
    engine.lookup(context, keys)
    engine.tier.submit_load(engine.job(context, keys, range(30)))
    load = engine.client.last("get")
    assert load.worth_s == pytest.approx(9.6)
    assert load.stall_s == pytest.approx(0.96 - in_vain_s + replies_s)
    assert load.timeout_s == pytest.approx(load.worth_s + load.stall_s)


def test_the_log_has_what_a_request_could_wait_and_what_it_waited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    monkeypatch.setattr(lookups.logger, "isEnabledFor", lambda _: True)
    monkeypatch.setattr(lookups.logger, "debug", lines.append)
    slow_engine(engine, 100)
    context, keys = engine.ask("r", 20)
    engine.clock.now += 0.25
    engine.client.last("lookup").found(*[READABLE] * 8, *[KeyState.ABSENT] * 12)
    engine.lookup(context, keys)
    engine.tier.admitted("r", keys[:8])
    assert lines == [
        "request r: computing takes 6.4 s, so it may wait 0.64 s; it waited 0.25 s for replies, "
        "0 s in 0 steps in all; 8 of 20 blocks from the server, 12 absent"
    ]


# ── the engine's plans ───────────────────────────────────────────────────────────────────


def planned(
    new: dict[str, tuple[int, int]], cached: dict[str, int], counts: dict[str, int]
) -> SchedulerOutput:
    """A step: of new requests the prompt's tokens and those computed before, of others only the
    latter; and the tokens of each in this step."""
    plan = SchedulerOutput.make_empty()
    for name, (num_tokens, computed) in new.items():
        prompt = [0] * num_tokens
        plan.scheduled_new_reqs.append(
            NewRequestData(name, prompt, [], None, None, ([],), computed, None)
        )
    plan.scheduled_cached_reqs.req_ids = [*cached]
    plan.scheduled_cached_reqs.num_computed_tokens = [*cached.values()]
    plan.num_scheduled_tokens = counts
    plan.total_num_scheduled_tokens = sum(counts.values())
    return plan


def test_chunks_have_their_positions_and_what_is_left_of_prompts_is_known():
    prefills = Prefills()
    plan = planned({"long": (5_000, 1_000), "short": (100, 0)}, {}, {"long": 900, "short": 100})
    assert prefills.chunks_of(plan) == ([Chunk(900, 1_000), Chunk(100, 0)], 0)
    assert prefills.unfinished() == [Chunk(3_100, 1_900)]
    plan = planned({}, {"long": 1_900, "short": 100}, {"long": 1_000, "short": 1})
    assert prefills.chunks_of(plan) == ([Chunk(1_000, 1_900)], 1)
    assert prefills.unfinished() == [Chunk(2_100, 2_900)]
    plan = planned({}, {"short": 101}, {"short": 1})
    plan.finished_req_ids = {"long"}
    assert prefills.chunks_of(plan) == ([], 1)
    assert not prefills.unfinished(), "it was ended in the middle of its prompt"
