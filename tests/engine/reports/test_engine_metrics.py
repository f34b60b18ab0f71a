"""The engine's `/metrics` against what happened: vLLM's own counters of what our tier moved, and
ours beside the server's. Nothing is counted twice by a preemption, an abort or a request that comes
again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import BLOCK, ROW_BYTES, SMALL_BLOCKS, Cluster, Engine, declared

from examples.tiny_model import prompt_tokens

ROWS = 20
TOKENS = ROWS * BLOCK + 9
BYTES = ROWS * ROW_BYTES

Moved = dict[str, float]
"""By name without labels, how much the samples of a metric have grown in all."""


@contextmanager
def moving(engine: Engine) -> Iterator[Moved]:
    """What is counted in the block, complete at its end."""
    before, moved = _sums(engine), Moved()
    yield moved
    moved |= {name: value - before.get(name, 0) for name, value in _sums(engine).items()}


def _sums(engine: Engine) -> Moved:
    sums = Moved()
    for sample, value in engine.metrics().items():
        name = sample.partition("{")[0]
        sums[name] = sums.get(name, 0) + value
    return sums


def of(moved: Moved, *names: str) -> list[float]:
    return [moved.get(f"vllm:kv_offload_{name}_total", 0) for name in names]


def test_bytes_of_every_level_are_those_of_its_blocks(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(TOKENS, seed=4000)
    names = ("store_bytes", "tiering_write_bytes", "load_bytes", "tiering_read_bytes")
    engine.settle()
    created = cluster.counter("put_created")
    with moving(engine) as cold:
        engine.ask(prompt, 1)
        engine.leave_to_server()
    tick = BYTES  # `settle` and `tick` ask for prompts of less than a block
    assert of(cold, *names) == [tick, BYTES, 0, 0]
    assert cluster.counter("put_created") - created == ROWS
    with moving(engine) as from_server:
        engine.ask(prompt, 1)
    assert of(from_server, *names) == [0, 0, BYTES, BYTES]
    assert from_server["kvferry_loaded_bytes_total"] == BYTES
    assert from_server["kvferry_loaded_blocks_total"] == ROWS
    engine.forget()
    with moving(engine) as from_pool:
        engine.ask(prompt, 1)
    assert of(from_pool, *names) == [0, 0, BYTES, 0]


def test_times_of_transfers_are_counted_and_no_longer_than_the_request(engine: Engine):
    prompt = prompt_tokens(TOKENS, seed=4010)
    engine.ask(prompt, 1)
    engine.leave_to_server()
    with moving(engine) as moved:
        answer = engine.ask(prompt, 1)
    for seconds in of(moved, "tiering_read_time", "load_time"):
        assert 0 < seconds <= answer.total_s
    latency = "vllm:kv_offload_tiering_promotion_latency_seconds"
    if latency in moved or f"{latency}_count" in moved:  # vLLM 0.33 and newer
        assert moved[f"{latency}_count"] >= 1
        assert moved[f"{latency}_sum"] <= answer.total_s * moved[f"{latency}_count"]


def test_every_token_of_a_preempted_prompt_has_one_source(engine: Engine):
    prompts = [prompt_tokens(12 * BLOCK - 4, seed=4100 + i) for i in range(8)]
    assert 8 * 12 < SMALL_BLOCKS < 8 * 14
    for prompt in prompts:
        engine.ask(prompt, 1)
        engine.settle()
    engine.leave_to_server()
    before, rounds = engine.metric("vllm:num_preemptions_total"), 0
    with moving(engine) as moved, engine.counting() as tokens:
        # Some may end before the last ones have begun, where the server is slow.
        while engine.metric("vllm:num_preemptions_total") == before:
            rounds += 1
            assert rounds <= 5, "none was preempted in any of five rounds"
            engine.ask_together(prompts, 40)
    everything = rounds * sum(map(len, prompts))
    assert moved["vllm:prompt_tokens_total"] == everything
    assert moved["vllm:prompt_tokens_by_source_total"] == everything
    assert moved["vllm:prompt_tokens_cached_total"] == sum(tokens.values()) <= everything


def test_a_load_that_was_aborted_is_not_counted_for_the_request_that_comes_again(
    engine: Engine, cluster: Cluster
):
    prompt = prompt_tokens(1100, seed=4200)
    engine.ask(prompt, 1)
    engine.leave_to_server()
    with cluster.proxy.held(after_bytes=300_000) as blocked:
        given_up = threading.Thread(target=engine.start_and_abort, args=(prompt, blocked))
        given_up.start()
        given_up.join()
        assert blocked.is_set(), "the load never reached the gate"
    with moving(engine) as moved:
        answer = engine.ask(prompt, 1)
    assert answer.cached_tokens == 1100 // BLOCK * BLOCK
    assert moved["vllm:prompt_tokens_cached_total"] <= 1100
    assert moved["kvferry_loaded_blocks_total"] <= 1100 // BLOCK, "each block once"


def test_vllms_metric_of_its_configuration_names_server_and_namespace(
    engine: Engine, cluster: Cluster
):
    name = "vllm:kv_offload_config_info"
    found = [sample for sample in engine.metrics() if sample.startswith(name)]
    if not found:
        pytest.skip("vLLM before 0.33 has no such metric")
    (tier,) = [sample for sample in found if 'kvferry_server="tcp' in sample]
    assert f'kvferry_server="{cluster.proxy.endpoint}"' in tier
    engine.leave_to_server()
    assert f'kvferry_namespace="{declared(cluster.client, engine)}"' in tier
