"""A prompt is never stuck: not for being long, not for a full pool, not for a silent server."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

from cluster import BLOCK, MAX_MODEL_LEN, POOL_ROWS, Cluster, Engine

from examples.tiny_model import prompt_tokens

HANG_GUARD_S = 120


def test_a_prompt_that_does_not_fit_the_pool_is_served(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(MAX_MODEL_LEN - 100, seed=600)
    assert len(prompt) // BLOCK > POOL_ROWS * 3 // 4
    cold = engine.ask(prompt)
    engine.push_out_of_pool(seed=20)
    cluster.settled()
    answer, tokens = engine.ask_from(prompt)
    assert answer.agrees_with(cold)
    assert tokens["server"] == POOL_ROWS * 3 // 4 * BLOCK, "as much as fits beside what is in use"


def test_a_prompt_as_long_as_the_engine_allows_is_served_while_rows_are_pinned(
    engine: Engine, cluster: Cluster
):
    """The server is frozen: puts pin rows until their deadline, lookups go unanswered."""
    long = prompt_tokens(MAX_MODEL_LEN - 8, seed=610)
    others = [prompt_tokens(800, seed=611 + i) for i in range(4)]
    cluster.server.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(5) as threads:
            frozen = list(threads.map(engine.ask, [*others, long]))
        assert time.monotonic() - began < HANG_GUARD_S
    finally:
        cluster.server.send_signal(signal.SIGCONT)
    engine.forget()
    for prompt, answer in zip([*others, long], frozen, strict=True):
        assert answer.agrees_with(engine.ask(prompt))
    assert engine.when_idle("vllm:kv_offload_cpu_cache_usage_perc") == 0, "a row stays pinned"


def test_hits_resume_by_themselves_when_the_server_answers_again(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(640 + 1, seed=620)
    engine.when_ready()
    engine.ask(prompt, 1)
    engine.push_out_of_pool(seed=21)
    cluster.settled()
    _, tokens = engine.ask_from(prompt, 1)
    assert tokens["server"] == 640
