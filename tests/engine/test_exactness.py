"""An answer does not depend on where the prompt's KV blocks came from.

Hits of equal length give bit-equal tokens and logprobs whether they came from the engine's own
cache, the CPU pool or the server. A cold run, an engine without a connector and a queue of other
requests run other batch shapes than a hit, and a processor rounds those differently. Against them
the tokens are equal, or two candidates were tied (`examples.engine.TIED`); logprobs differ at most
as much as vLLM's own prefix hit makes them differ, or by a rounding of one logit.
"""

import threading

import pytest
from cluster import BLOCK, ROW_BYTES, SMALL_BLOCKS, SMALL_POOL_ROWS, Cluster, Engine

from examples.engine import Completion
from examples.tiny_model import prompt_tokens

ROUNDING = 1 / 64
"""Nats between neighbouring bfloat16 logits of 2 to 4. On some processors the batch shapes of
vLLM's own hit and of a cold run round alike, and those of another hit do not (0.0001 seen)."""

REFUSED_BY_POOL = "vllm:kv_offload_allocation_failure_total"

# Before, on and after a block boundary; below one block; more than one prefill chunk of 512.
LENGTHS = [31, 32, 33, 10 * BLOCK + 1, 1500]
PROMPTS = {length: prompt_tokens(length, seed=length) for length in LENGTHS}

Answers = dict[int, dict[str, Completion]]


@pytest.fixture(scope="module")
def without_connector(plain: Engine) -> Answers:
    """Each prompt cold, and from vLLM's own prefix cache."""
    return {n: {"cold": plain.ask(p), "engine": plain.ask(p)} for n, p in PROMPTS.items()}


@pytest.fixture(scope="module")
def with_connector(engine: Engine) -> Answers:
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
    engine.leave_to_server()
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


def are_bit_equal(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_pool_and_server_give_bit_equal_answers(with_connector: Answers):
    wrong = [n for n, a in with_connector.items() if not are_bit_equal(a["server"], a["pool"])]
    assert wrong == []


def test_a_hit_below_the_engine_equals_the_engines_own(with_connector: Answers):
    hits = {n: a for n, a in with_connector.items() if n % BLOCK}
    assert [n for n, a in hits.items() if not are_bit_equal(a["pool"], a["engine"])] == []


def test_every_level_gives_the_tokens_of_an_engine_without_a_connector(
    with_connector: Answers, without_connector: Answers
):
    wrong = [
        (length, level)
        for length, answers in with_connector.items()
        for level, answer in answers.items()
        if not answer.agrees_with(without_connector[length]["cold"])
    ]
    assert wrong == []


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
        assert are_bit_equal(first, with_connector[length]["server"])
        assert are_bit_equal(again, with_connector[length]["server"])
    blocks = sum(length // BLOCK for length in LENGTHS)
    assert cluster.counter("shared_bytes_out") - shared_before == blocks * ROW_BYTES


def wrong_of(answers: list[Completion], expected: list[Completion]) -> list[int]:
    pairs = enumerate(zip(answers, expected, strict=True))
    return [number for number, (answer, other) in pairs if not answer.agrees_with(other)]


def test_concurrent_requests_that_share_prefixes_are_answered_as_alone(
    engine: Engine, uncached: Engine, plain: Engine
):
    common = prompt_tokens(320, seed=77)
    prompts = [common + prompt_tokens(40 + 50 * i, seed=100 + i) for i in range(4)]
    alone = [plain.ask(prompt) for prompt in prompts]
    assert wrong_of(engine.ask_together(prompts), alone) == [], "cold and sharing"
    engine.leave_to_server()
    assert wrong_of(engine.ask_together(prompts), alone) == [], "from the server"
    assert wrong_of(uncached.ask_together(prompts), alone) == [], "a second engine, at once"


def test_a_queue_that_the_server_holds_comes_from_it_while_the_pool_is_too_small(engine: Engine):
    """Eight at a time. What is loaded too soon would be evicted by the next."""
    rows = 10
    prompts = [prompt_tokens(rows * BLOCK + 3, seed=250 + i) for i in range(16)]
    assert rows * len(prompts) > SMALL_POOL_ROWS
    cold = []
    for first in (0, 8):  # the pool holds so many of them until they are on the server
        cold += engine.ask_together(prompts[first : first + 8])
        engine.settle()
    engine.leave_to_server()
    for _ in range(2):  # the second time most have been evicted from the pool again
        refused_before = engine.metric(REFUSED_BY_POOL)
        with engine.counting() as tokens:
            answers = engine.ask_together(prompts)
        # vLLM computes a prompt whose next block finds every row of the pool in use.
        refused = int(engine.metric(REFUSED_BY_POOL) - refused_before)
        assert 0 <= rows * len(prompts) * BLOCK - sum(tokens.values()) <= refused * rows * BLOCK
        assert tokens["server"] > sum(tokens.values()) / 3
        assert wrong_of(answers, cold) == []
        engine.forget()


def test_preempted_requests_are_answered_as_alone(engine: Engine, plain: Engine):
    """Eight prompts just fit the engine's blocks; their answers do not. The prompts come from the
    server, and what is preempted does so again."""
    prompts = [prompt_tokens(12 * BLOCK - 4, seed=200 + i) for i in range(8)]
    answer_tokens = 40
    assert 8 * 12 < SMALL_BLOCKS < 8 * 14
    alone = [plain.ask(prompt, answer_tokens) for prompt in prompts]
    before = engine.metric("vllm:num_preemptions_total")
    # What a preempted request computes again, it computes in another batch.
    assert wrong_of(engine.ask_together(prompts, answer_tokens), alone) == [], "cold"
    # Together they fill the pool faster than it is put: a block may leave it before its put.
    for prompt in prompts:
        engine.ask(prompt, 1)
        engine.settle()
    engine.leave_to_server()
    with engine.counting() as tokens:
        answers = engine.ask_together(prompts, answer_tokens)
    assert wrong_of(answers, alone) == [], "from the server"
    assert tokens["server"] >= 8 * 11 * BLOCK
    assert engine.metric("vllm:num_preemptions_total") > before


def test_an_abort_in_the_middle_of_a_load_harms_nobody(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(1100, seed=300)
    cold = engine.ask(prompt)
    engine.leave_to_server()
    with cluster.proxy.held(after_bytes=300_000) as blocked:
        given_up = threading.Thread(target=engine.start_and_abort, args=(prompt, blocked))
        given_up.start()
        given_up.join()
        assert blocked.is_set(), "the load never reached the gate"
    # Of this request alone: the engine may still count the aborted one as admitted.
    answer = engine.ask(prompt)
    assert answer.agrees_with(cold)
    assert answer.cached_tokens == 1100 // BLOCK * BLOCK
    assert engine.when_idle("vllm:kv_offload_cpu_cache_usage_perc") == 0, "a row stays pinned"


def test_only_the_blocks_that_the_server_holds_are_loaded(engine: Engine):
    prompt = prompt_tokens(30 * BLOCK + 7, seed=400)
    held = 11
    engine.ask(prompt[: held * BLOCK + 5], 1)
    engine.leave_to_server()
    answer, tokens = engine.ask_from(prompt)
    assert tokens == {"engine": 0, "pool": 0, "server": held * BLOCK}
    engine.forget()
    again, tokens = engine.ask_from(prompt)
    assert tokens["pool"] == 30 * BLOCK
    assert again.agrees_with(answer)
