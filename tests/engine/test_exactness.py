"""An answer does not depend on where the prompt's KV blocks came from.

Hits of equal length give bit-equal tokens and logprobs whether they came from the engine's own
cache, the CPU pool or the server. A cold run, an engine without a connector and a queue of other
requests run other batch shapes than a hit, and a processor rounds those differently. Against them
the tokens are equal, or two candidates were tied (`examples.engine.TIED`); logprobs differ at most
as much as vLLM's own prefix hit makes them differ, or by a rounding of one logit.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import (
    BLOCK,
    ENGINE_ARGS,
    ENGINE_BLOCKS,
    PATIENT,
    ROW_BYTES,
    Cluster,
    Engine,
    connector,
    running,
)

from examples.engine import Completion
from examples.tiny_model import prompt_tokens

ROUNDING = 1 / 64
"""Nats between neighbouring bfloat16 logits of 2 to 4. On some processors the batch shapes of
vLLM's own hit and of a cold run round alike, and those of another hit do not (0.0001 seen)."""

# Before, on and after block boundaries; below one block; more than one prefill chunk of 512.
LENGTHS = [31, 32, 33, 10 * BLOCK - 1, 10 * BLOCK, 10 * BLOCK + 1, 1000, 1500]
PROMPTS = {length: prompt_tokens(length, seed=length) for length in LENGTHS}

Answers = dict[int, dict[str, Completion]]


@pytest.fixture(scope="module")
def others(cluster: Cluster, model: Path, logs: Path) -> Iterator[tuple[Engine, Engine]]:
    """The engines of the two fixtures below."""
    by_module = {"kv_connector_module_path": "kv_connector.connector"}
    plain = Engine(model, args=ENGINE_ARGS, log=logs / "plain.log")
    uncached = Engine(
        model,
        connector=connector(cluster.server.endpoint, transport="shm", **PATIENT) | by_module,
        args=[*ENGINE_ARGS, "--no-enable-prefix-caching"],
        log=logs / "uncached.log",
    )
    with running(plain, uncached):
        yield plain, uncached


@pytest.fixture(scope="module")
def plain(others: tuple[Engine, Engine]) -> Engine:
    """vLLM as it is, without a connector."""
    return others[0]


@pytest.fixture(scope="module")
def uncached(others: tuple[Engine, Engine]) -> Engine:
    """A second engine on the server, over shared memory, with vLLM's own prefix caching off. It
    names the connector by its module instead of relying on the plugin."""
    return others[1]


@pytest.fixture(scope="module")
def without_connector(plain: Engine) -> Answers:
    """Each prompt cold, and from vLLM's own prefix cache."""
    return {n: {"cold": plain.ask(p), "engine": plain.ask(p)} for n, p in PROMPTS.items()}


@pytest.fixture(scope="module")
def with_connector(engine: Engine, cluster: Cluster) -> Answers:
    """Each prompt cold, then from each of the three levels, checked to be from there."""
    answers: Answers = {}
    for length, prompt in PROMPTS.items():
        full = length // BLOCK * BLOCK
        engine_full = (length - 1) // BLOCK * BLOCK
        cold, _ = engine.ask_from(prompt)
        hit, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": engine_full, "pool": full - engine_full, "server": 0}
        engine.forget()
        pooled, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": full, "server": 0}
        answers[length] = {"cold": cold, "engine": hit, "pool": pooled}
    engine.push_out_of_pool(seed=1)
    cluster.settled()
    for length, prompt in PROMPTS.items():
        answers[length]["server"], tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": length // BLOCK * BLOCK}
    return answers


def difference(one: Completion, other: Completion) -> float:
    """The largest difference of a logprob that both report, as far as both texts are the same."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
    return max(
        abs(a[token] - b[token])
        for a, b in zip(one.logprobs[: same + 1], other.logprobs, strict=False)
        for token in a.keys() & b.keys()
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_pool_and_server_give_bit_equal_answers(with_connector: Answers, length: int):
    answers = with_connector[length]
    assert answers["server"].token_ids == answers["pool"].token_ids
    assert answers["server"].logprobs == answers["pool"].logprobs


@pytest.mark.parametrize("length", [n for n in LENGTHS if n % BLOCK])
def test_a_hit_below_the_engine_equals_the_engines_own(with_connector: Answers, length: int):
    answers = with_connector[length]
    assert answers["pool"].token_ids == answers["engine"].token_ids
    assert answers["pool"].logprobs == answers["engine"].logprobs


@pytest.mark.parametrize("length", LENGTHS)
def test_every_level_gives_the_tokens_of_an_engine_without_a_connector(
    with_connector: Answers, without_connector: Answers, length: int
):
    expected = without_connector[length]["cold"]
    assert {
        level: answer.agrees_with(expected) for level, answer in with_connector[length].items()
    } == dict.fromkeys(("cold", "engine", "pool", "server"), True)


def test_a_hit_changes_logprobs_no_more_than_vllms_own_hit_does(
    with_connector: Answers, without_connector: Answers
):
    own = max(difference(a["cold"], a["engine"]) for a in without_connector.values())
    for level in ("pool", "server"):
        ours = max(
            difference(without_connector[n]["cold"], with_connector[n][level]) for n in LENGTHS
        )
        assert ours <= max(own, ROUNDING), level


def test_a_second_engine_without_prefix_caching_gets_the_same_from_the_server(
    with_connector: Answers, uncached: Engine, cluster: Cluster
):
    """Its blocks were made by the first engine; then they come from its own pool. One engine
    speaks TCP, the other shares the server's memory: the bytes are the same."""
    uncached.when_ready()
    shared_before = cluster.counter("shared_bytes_out")
    for length, prompt in PROMPTS.items():
        full = length // BLOCK * BLOCK
        first, tokens = uncached.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": full}
        again, tokens = uncached.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": full, "server": 0}
        for answer in (first, again):
            assert answer.token_ids == with_connector[length]["server"].token_ids
            assert answer.logprobs == with_connector[length]["server"].logprobs
    blocks = sum(length // BLOCK for length in LENGTHS)
    assert cluster.counter("shared_bytes_out") - shared_before == blocks * ROW_BYTES


def test_concurrent_requests_that_share_prefixes_are_answered_as_alone(
    engine: Engine, uncached: Engine, plain: Engine
):
    common = prompt_tokens(640, seed=77)
    prompts = [common + prompt_tokens(40 + 50 * i, seed=100 + i) for i in range(6)]
    alone = [plain.ask(prompt) for prompt in prompts]

    def wrong_at_once(target: Engine) -> list[int]:
        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(target.ask, prompts))
        return [i for i, answer in enumerate(together) if not answer.agrees_with(alone[i])]

    assert wrong_at_once(engine) == [], "cold and sharing"
    engine.push_out_of_pool(seed=2)
    assert wrong_at_once(engine) == [], "from the server"
    assert wrong_at_once(uncached) == [], "a second engine, at once"


def test_preempted_requests_are_answered_as_alone(engine: Engine, plain: Engine):
    """Eight prompts just fit the engine's blocks; their answers do not."""
    prompts = [prompt_tokens(792 + i, seed=200 + i) for i in range(8)]
    assert 8 * 25 < ENGINE_BLOCKS < 8 * 27
    alone = [plain.ask(prompt, 72) for prompt in prompts]
    before = engine.metric("vllm:num_preemptions_total")
    for _ in range(5):  # on a busy machine the first have ended before the last have come
        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(lambda p: engine.ask(p, 72), prompts))
        # What a preempted request computes again, it computes in another batch.
        assert all(a.agrees_with(b) for a, b in zip(together, alone, strict=True))
        if engine.metric("vllm:num_preemptions_total") > before:
            return
    raise AssertionError("nothing was preempted")


def test_an_abort_in_the_middle_of_a_load_harms_nobody(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(1100, seed=300)
    cold = engine.ask(prompt)
    engine.push_out_of_pool(seed=3)
    cluster.settled()
    with cluster.proxy.held(after_bytes=300_000) as blocked:
        given_up = threading.Thread(target=engine.start_and_abort, args=(prompt, blocked))
        given_up.start()
        given_up.join(30)
        assert not given_up.is_alive()
        assert blocked.is_set(), "the load never reached the gate"
    # Of this request alone: the engine may still count the aborted one as admitted.
    answer = engine.ask(prompt)
    assert answer.agrees_with(cold)
    assert answer.cached_tokens == 1100 // BLOCK * BLOCK
    assert engine.when_idle("vllm:kv_offload_cpu_cache_usage_perc") == 0, "a row stays pinned"


def test_only_the_blocks_that_the_server_holds_are_loaded(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(30 * BLOCK + 7, seed=400)
    held = 11
    engine.ask(prompt[: held * BLOCK + 5], 1)
    engine.push_out_of_pool(seed=4)
    cluster.settled()
    answer, tokens = engine.ask_from(prompt)
    assert tokens == {"engine": 0, "pool": 0, "server": held * BLOCK}
    engine.forget()
    again, tokens = engine.ask_from(prompt)
    assert tokens["pool"] == 30 * BLOCK
    assert again.agrees_with(answer)
