"""What is used above the server stays on the server, and reporting it costs next to nothing."""

import pytest
from modelless_engine import Make
from modelless_runner import TOKENS
from scripted_client import BLOCK_BYTES, Clock, Engine
from tiered_engine import ready, real_engine, serve

from kv_connector.request_options import BYPASS_KEY, Bypass
from kv_connector.tier import metrics
from kv_connector.tier import recency as recency_module
from kv_connector.tier.recency import BATCH_S, REST_S, Recency
from remote_server.protocol import KeyState
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


@pytest.fixture
def recency(clock: Clock) -> Recency:
    return Recency(clock)


def test_a_prefix_of_many_requests_is_touched_once_in_a_while(recency: Recency, clock: Clock):
    batches = []
    for _ in range(100):
        recency.used(keys(1, 2, 3))
        batches.append(recency.take_batch())
        clock.now += REST_S / 50
    assert [batch for batch in batches if batch] == [keys(1, 2, 3)] * 2


def test_only_what_is_new_of_a_longer_prefix_is_touched(recency: Recency, clock: Clock):
    recency.used(keys(1, 2, 3))
    recency.used(keys(1, 2, 3, 4, 5))
    assert recency.take_batch() == keys(1, 2, 3, 4, 5)
    clock.now += BATCH_S
    recency.used(keys(1, 2, 3, 6))
    assert recency.take_batch() == keys(6)


def test_a_batch_waits_for_the_one_before_it(recency: Recency, clock: Clock):
    recency.used(keys(1))
    assert recency.take_batch() == keys(1)
    recency.used(keys(2))
    assert recency.take_batch() == []
    recency.used(keys(3))
    clock.now += BATCH_S
    assert recency.take_batch() == keys(2, 3)
    assert recency.take_batch() == []


def test_what_the_server_itself_supplied_is_not_reported_to_it(recency: Recency):
    recency.used(keys(1, 2, 3), dict.fromkeys(keys(2, 3), KeyState.READABLE))
    assert recency.take_batch() == keys(1)


def test_batch_and_memory_are_bounded(
    recency: Recency, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recency_module, "MOST_KEYS_OF_A_BATCH", 8)
    monkeypatch.setattr(recency_module, "MOST_REMEMBERED", 100)
    for first in range(0, 300, 8):
        recency.used(keys(*range(first, first + 16)))
        clock.now += REST_S
        assert len(recency.take_batch()) == 8
    assert len(recency._touched_s) == 100


def test_the_tier_reports_a_reused_prefix_at_the_end_of_the_step():
    engine = Engine()
    _, prefix = engine.request("r", 3)
    engine.tier.admitted("r", prefix)
    assert engine.client.count("touch") == 0
    engine.step()
    assert engine.client.last("touch").keys == prefix
    assert engine.counted(metrics.TOUCHED_BLOCKS, "") == 3
    engine.tier.admitted("r", prefix)
    engine.clock.now += 1.0
    engine.step()
    assert engine.client.count("touch") == 1


def test_what_an_engine_uses_of_its_own_cache_and_of_its_pool_is_reported(make: Make, clock: Clock):
    engine = make()
    for name in ("computed", "from the engine", "from the pool"):
        request = engine.add(name, list(range(4 * TOKENS + 1)))
        engine.start(name)
        engine.finish(name)
        reported = [asked.keys for asked in engine.client.asked if asked.operation == "touch"]
        if name == "from the engine":
            assert reported == [engine.keys(request)[:4]]
            engine.scheduler.reset_prefix_cache()
            clock.now += REST_S
    assert reported == [engine.keys(request)[:4]] * 2


def test_requests_that_keep_away_from_the_server_report_nothing():
    engine = Engine()
    _, prefix = engine.request("r", 3, **{BYPASS_KEY: Bypass.LORA})
    engine.tier.admitted("r", prefix)
    engine.step()
    assert engine.client.count("touch") == 0


@pytest.mark.parametrize("used", [True, False])
def test_a_prompt_that_only_levels_above_serve_outlives_a_scan_of_the_server(used: bool):
    """The scan puts three times what the server's memory holds. `used` False proves that the
    scan is one that the prompt would not survive by itself."""
    clock = Clock()
    with serve(memory=MiB) as server:
        engine = ready(real_engine(server.endpoint, num_rows=400, clock=clock))
        prompt = engine.compute("system prompt", range(20))
        engine.idle()
        for first in range(1000, 1000 + 3 * MiB // BLOCK_BYTES, 40):
            if used:
                clock.now += REST_S
                context, _ = engine.request("user", range(20))
                engine.tier.admitted("user", prompt)
                engine.step()
                engine.manager.on_request_finished(context)
                engine.client.stats(timeout_s=60).result()  # behind the touch, on its connection
            engine.compute(f"scan {first}", range(first, first + 40))
            engine.idle()
        found = engine.client.lookup(engine.tier._namespace, prompt, timeout_s=60).result()
        engine.tier.shutdown()
    assert (found.prefix == len(prompt)) is used
