"""A prompt is never stuck: not for being long, not for a full pool, not for a silent server."""

import signal
from concurrent.futures import ThreadPoolExecutor

from busy_scene import LATE, MISSED
from cluster import BLOCK, SMALL_MODEL_LEN, SMALL_POOL_ROWS, Cluster, Engine, by_reason

from examples.tiny_model import prompt_tokens


def test_a_prompt_that_does_not_fit_the_pool_is_served(engine: Engine):
    prompt = prompt_tokens(SMALL_MODEL_LEN - 100, seed=600)
    assert len(prompt) // BLOCK > SMALL_POOL_ROWS * 3 // 4
    cold = engine.ask(prompt)
    engine.leave_to_server()
    answer, tokens = engine.ask_from(prompt)
    assert answer.agrees_with(cold)
    assert tokens["server"] == SMALL_POOL_ROWS * 3 // 4 * BLOCK, "as much as fits"


def test_a_prompt_as_long_as_the_engine_allows_is_served_while_rows_are_pinned(
    engine: Engine, cluster: Cluster
):
    """The server is frozen: puts pin rows until their deadline, lookups go unanswered."""
    long = prompt_tokens(SMALL_MODEL_LEN - 8, seed=610)
    others = [prompt_tokens(800, seed=611 + i) for i in range(4)]
    engine.leave_to_server()
    engine.when_ready()
    before = by_reason(engine.metrics(), MISSED)
    cluster.server.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(5) as threads:
            frozen = list(threads.map(engine.ask, [*others, long]))
    finally:
        cluster.server.send_signal(signal.SIGCONT)
    after = by_reason(engine.metrics(), MISSED)
    late = sum(after.get(reason, 0) - before.get(reason, 0) for reason in LATE)
    assert late == len(frozen), "one for each prompt, at its first block"
    engine.forget()
    for prompt, answer in zip([*others, long], frozen, strict=True):
        assert answer.agrees_with(engine.ask(prompt))
    assert engine.when_idle("vllm:kv_offload_cpu_cache_usage_perc") == 0, "a row stays pinned"
    engine.when_ready()
    engine.ask(others[0], 1)
    engine.leave_to_server()
    _, tokens = engine.ask_from(others[0], 1)
    assert tokens["server"] == 800, "hits resume by themselves"
