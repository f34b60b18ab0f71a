"""Blocks in the server's object store have a speed of their own, and are computed where that is
faster."""

from unittest.mock import MagicMock

import pytest
from scripted_client import BLOCK_BYTES, Engine
from test_break_even import measured
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kv_connector.request_options import PREFETCH_KEY
from kv_connector.tier import metrics
from kv_connector.tier.break_even import PROBE_COSTS
from kv_connector.tier.speeds import LEAST_SAMPLES, Chunk
from kv_connector.tier.transfers import BUCKET_PRIOR_S
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState


@pytest.fixture
def engine() -> Engine:
    """32 ms to compute a block, 10 ms to load it from the server's memory."""
    engine = Engine()
    measured(engine, load_s=0.010)
    return engine


def look(
    engine: Engine, name: str, num: int, *remote: int, **params: object
) -> tuple[ReqContext, list[OffloadKey]]:
    """The lookup of a request of `num` blocks, which the server has: those of the runs `remote` in
    its object store."""
    context, keys = engine.request(name, num, **params)
    engine.lookup(context, keys)
    engine.step()
    engine.client.last("lookup").found(*[READABLE] * num, remote=remote)
    return context, keys


def load(engine: Engine, name: str, seconds: float, *remote: int) -> None:
    """A load of two blocks."""
    context, keys = look(engine, name, 2, *remote)
    assert engine.lookup(context, keys) == ["HIT"] * 2
    engine.tier.submit_load(engine.job(context, keys, [0, 1]))
    engine.clock.now += seconds
    engine.client.last("get").landed(0, 1)
    engine.finished()
    engine.step()


def measure_bucket(engine: Engine, seconds: float) -> None:
    """Loads of two blocks in the object store take `seconds`."""
    for number in range(LEAST_SAMPLES):
        load(engine, f"bucket {number}", seconds, 0, 2)


def test_a_prompt_that_would_come_more_slowly_from_the_bucket_is_computed(engine: Engine):
    measure_bucket(engine, 0.200)
    context, keys = look(engine, "r", 8, 0, 8)
    assert engine.lookup(context, keys) == ["MISS"] * 8
    assert engine.counted(metrics.MISSED_BLOCKS, "bucket_slow") == 8
    assert engine.counted(metrics.MISSED_BLOCKS, "break_even") == 0
    context, keys = look(engine, "in memory", 8)
    assert engine.lookup(context, keys) == ["HIT"] * 8


def test_the_blocks_before_the_bucket_s_are_loaded_all_the_same(engine: Engine):
    measure_bucket(engine, 0.200)
    context, keys = look(engine, "r", 8, 5, 3)
    assert engine.lookup(context, keys) == ["HIT"] * 5 + ["MISS"] * 3
    assert engine.counted(metrics.MISSED_BLOCKS, "bucket_slow") == 3


def test_a_bucket_that_is_faster_than_computing_is_read(engine: Engine):
    measure_bucket(engine, 0.040)
    context, keys = look(engine, "r", 8, 0, 8)
    assert engine.lookup(context, keys) == ["HIT"] * 8


def test_a_prompt_now_and_then_is_read_all_the_same_to_measure_again(engine: Engine):
    measure_bucket(engine, 0.200)
    states = []
    for number in range(32):
        context, keys = look(engine, f"probe {number}", 2, 0, 2)
        states.append(engine.lookup(context, keys)[0])
        engine.step()
        engine.clock.now += PROBE_COSTS * 0.1 / 10  # a tenth of the pause, and a little less
    assert states.count("HIT") == 2


def test_a_request_that_prefetches_reads_a_slow_bucket(engine: Engine):
    measure_bucket(engine, 0.200)
    context, keys = look(engine, "r", 8, 0, 8, **{PREFETCH_KEY: True})
    assert engine.lookup(context, keys) == ["HIT"] * 8


def test_loads_from_the_bucket_do_not_slow_the_link_and_mixed_ones_measure_neither(engine: Engine):
    link = engine.tier.break_even.link.bytes_per_s
    measure_bucket(engine, 0.200)
    assert engine.tier.break_even.link.bytes_per_s == link
    bucket = engine.tier.break_even.bucket.bytes_per_s
    assert bucket == pytest.approx(2 * BLOCK_BYTES / 0.2, rel=0.01)
    context, keys = look(engine, "mixed", 3, 2, 1)
    assert engine.lookup(context, keys) == ["HIT"] * 2 + ["MISS"]
    assert engine.tier.break_even.bucket.bytes_per_s == bucket


def test_a_load_beside_one_from_the_bucket_does_not_measure_the_link(engine: Engine):
    slow = look(engine, "slow", 2, 0, 2)
    assert engine.lookup(*slow) == ["HIT"] * 2
    engine.tier.submit_load(engine.job(*slow, [0, 1]))
    from_bucket = engine.client.last("get")
    link = engine.tier.break_even.link
    samples = len(link._bytes_per_s._samples)
    fast = look(engine, "fast", 2)
    engine.tier.submit_load(engine.job(*fast, [2, 3]))
    engine.clock.now += 1.0
    engine.client.last("get").landed(0, 1)
    from_bucket.landed(0, 1)
    engine.finished()
    assert len(link._bytes_per_s._samples) == samples


def test_a_load_from_a_bucket_that_is_not_measured_may_be_silent_while_computing_takes(
    engine: Engine,
):
    load(engine, "memory", 0.01)
    stall_s = engine.client.last("get").stall_s
    load(engine, "bucket", 0.01, 0, 2)
    asked = engine.client.last("get")
    assert asked.stall_s == pytest.approx(stall_s + asked.worth_s)


def test_no_load_from_a_bucket_that_is_not_measured_is_silent_for_longer_than_its_prior():
    engine = Engine()
    for _ in range(LEAST_SAMPLES):
        engine.tier.break_even.engine.step_began([Chunk(1000)], engine.clock.now)
        engine.clock.now += 1000.0
        engine.tier.break_even.engine.step_ended(engine.clock.now)
    load(engine, "bucket", 0.01, 0, 2)
    asked = engine.client.last("get")
    assert asked.worth_s > 10 * BUCKET_PRIOR_S
    assert BUCKET_PRIOR_S < asked.stall_s < BUCKET_PRIOR_S + 0.2 * asked.worth_s


def test_blocks_that_turn_up_in_the_bucket_later_are_judged_then(engine: Engine):
    """Their pack's header was being read at the first lookup."""
    measure_bucket(engine, 0.200)
    context, keys = engine.ask("r", 4, READABLE, READABLE, PENDING, PENDING)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "RETRY", "RETRY"]
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE, remote=[0, 2])
    assert engine.lookup(context, keys)[2:] == ["MISS", "MISS"]


def test_a_server_that_comes_back_has_another_bucket(engine: Engine):
    measure_bucket(engine, 0.200)
    for ready in (False, True):
        engine.client.ready = ready
        engine.tier.serve_external_requests(MagicMock())
    context, keys = look(engine, "r", 2, 0, 2)
    assert engine.lookup(context, keys) == ["HIT", "HIT"]


def test_the_speed_of_the_bucket_is_a_gauge_once_it_is_known(engine: Engine):
    assert metrics.BUCKET_SPEED not in engine.collect()
    measure_bucket(engine, 0.200)
    speed = engine.collect()[metrics.BUCKET_SPEED][()]
    assert speed == pytest.approx(2 * BLOCK_BYTES / 0.2, rel=0.01)
