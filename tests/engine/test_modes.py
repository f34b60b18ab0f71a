"""Modes of vLLM that change which tokens are computed when, and how requests end: the answers are
those of an engine without a connector, and prompts are found below the engine as in any other mode.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adapter import build_adapter
from cluster import (
    BLOCK,
    PATIENT,
    ROW_BYTES,
    SMALL_ARGS,
    SMALL_POOL_ROWS,
    Cluster,
    Engine,
    QuickEngine,
    aim,
    connector,
    running,
)
from test_exactness import are_bit_equal, wrong_of

from examples.engine import Completion
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]

EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}


@pytest.fixture(scope="module")
def moded(cluster: Cluster, model: Path, logs: Path) -> Iterator[Engine]:
    """An engine with the modes that one engine can have together, on the cluster's proxy."""
    given = connector(
        cluster.proxy.endpoint, transport="tcp", cpu_pool=SMALL_POOL_ROWS * ROW_BYTES, **PATIENT
    )
    args = [
        *SMALL_ARGS,
        *("--scheduling-policy", "priority"),
        *("--kv-events-config", json.dumps(EVENTS)),
    ]
    policy = {"kv_load_failure_policy": "recompute"}
    engine = QuickEngine(model, connector=given | policy, args=args, log=logs / "modes.log")
    with running(engine):
        engine.when_ready()
        yield engine


# ── one engine, many modes ───────────────────────────────────────────────────────────────────


def test_requests_of_different_priority_are_answered_as_alone(moded: Engine, plain: Engine):
    """The engine has blocks for half of them: late ones of a higher priority preempt the others."""
    prompts = [prompt_tokens(12 * BLOCK - 4, seed=3000 + i) for i in range(12)]
    alone = [plain.ask(prompt, 40) for prompt in prompts]
    before = moded.metric("vllm:num_preemptions_total")

    def ask(number: int) -> Completion:
        return moded.ask(prompts[number], 40, priority=len(prompts) - number)

    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(ask, range(len(prompts))))
        assert wrong_of(answers, alone) == []
        moded.leave_to_server()
    assert moded.metric("vllm:num_preemptions_total") > before


def whole_answer(engine: Engine, prompt: list[int], max_tokens: int, **extra: Any) -> Any:
    """The choices of an answer that has several."""
    body = {
        "model": engine.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True,
        "temperature": 0, **extra,
    }  # fmt: skip
    with engine._request("POST", "/v1/completions", body, timeout_s=300) as response:
        return json.load(response)["choices"]


def test_beams_over_a_prompt_from_the_server_are_those_of_vllm(moded: Engine, plain: Engine):
    prompt = prompt_tokens(640 + 3, seed=3100)

    def beams(engine: Engine) -> list[str]:
        found = whole_answer(engine, prompt, 6, use_beam_search=True, n=3)
        return [choice["text"] for choice in found]

    plain.ask(prompt, 1)
    expected = beams(plain)  # with its own hit, as below
    moded.ask(prompt, 1)
    moded.leave_to_server()
    with moded.counting() as tokens:
        assert beams(moded) == expected
    assert tokens["server"] >= 640
    assert len(set(expected)) == 3


def test_several_samples_with_logprobs_equal_those_of_vllms_own_hit(moded: Engine, plain: Engine):
    prompt = prompt_tokens(640 + 3, seed=3110)
    how = {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": 3}
    plain.ask(prompt, 1)
    expected = whole_answer(plain, prompt, 6, **how)
    moded.ask(prompt, 1)
    moded.leave_to_server()
    answers = whole_answer(moded, prompt, 6, **how)
    assert [one["text"] for one in answers] == [one["text"] for one in expected]
    assert len({one["text"] for one in answers}) == 3
    for one, other in zip(answers, expected, strict=True):
        pairs = zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"],
                    strict=True)  # fmt: skip
        assert all(abs(a - b) < 0.1 for a, b in pairs)


def test_logprobs_of_a_prompt_are_computed_and_never_loaded(moded: Engine, plain: Engine):
    """They need every token of the prompt to be computed."""
    prompt = prompt_tokens(320 + 3, seed=3120)
    expected = whole_answer(plain, prompt, 2, prompt_logprobs=1)[0]["prompt_logprobs"]
    moded.ask(prompt, 1)
    moded.leave_to_server()
    with moded.counting() as tokens:
        found = whole_answer(moded, prompt, 2, prompt_logprobs=1)[0]["prompt_logprobs"]
    assert not any(tokens.values())
    assert len(found) == len(expected) == len(prompt)
    ranks = [
        [entry["rank"] for entry in (position or {}).values() if entry["rank"] == 1]
        for position in found
    ]
    assert ranks[1:].count([1]) == len(prompt) - 1
    moded.forget()
    answer, tokens = moded.ask_from(prompt)
    assert tokens["pool"] == 320, "it was stored"
    assert answer.agrees_with(plain.ask(prompt))


def test_two_hundred_aborts_within_loads_leave_nothing_behind(moded: Engine, cluster: Cluster):
    at_a_time, rounds = 8, 25
    prompts = [prompt_tokens(10 * BLOCK + 3, seed=3200 + i) for i in range(at_a_time)]
    expected = [moded.ask(prompt) for prompt in prompts]
    for _ in range(rounds):
        moded.leave_to_server()
        with cluster.proxy.held(after_bytes=ROW_BYTES) as blocked:
            aborted = [
                threading.Thread(target=moded.start_and_abort, args=(prompt, blocked))
                for prompt in prompts
            ]
            for thread in aborted:
                thread.start()
            for thread in aborted:
                thread.join()
            assert blocked.is_set(), "no load reached the gate"
    answers = [moded.ask(prompt) for prompt in prompts]
    assert wrong_of(answers, expected) == []
    assert moded.when_idle("vllm:kv_offload_cpu_cache_usage_perc") == 0, "a row stays pinned"
    assert moded.when_idle("kvferry_open_loads") == 0
    assert moded.metric("kvferry_hook_errors_total") == 0


def test_a_server_smaller_than_a_prompt_gives_what_it_has(moded: Engine, cluster: Cluster):
    prompt = prompt_tokens(80 * BLOCK + 3, seed=3300)
    cold = moded.ask(prompt)
    with (
        cluster.left(moded),
        RemoteServer("4MiB") as small,
        closing(aim(cluster.proxy, moded, small)) as client,
    ):
        moded.ask(prompt)
        moded.leave_to_server()
        answer, tokens = moded.ask_from(prompt)
        counters = client.stats(timeout_s=60).result().counters
    assert answer.agrees_with(cold)
    assert tokens["server"] * ROW_BYTES // BLOCK <= 4 << 20
    assert counters["put_created"]


def test_no_line_of_ours_is_logged_again_and_again(moded: Engine):
    """After everything above. Numbers and names may differ from line to line."""
    ours = re.compile(r"(WARNING|ERROR) .*?\[(\w+\.py):\d+\] (.*)")
    lines = [found for line in moded.log.read_text().splitlines() if (found := ours.search(line))]
    modules = {file.name for file in Path("kv_connector").rglob("*.py")}
    said = Counter(
        (level, file, re.sub(r"[0-9a-f]{6,}|\d+", "N", text))
        for level, file, text in (found.groups() for found in lines)
        if file in modules
    )
    # Once for each reset while requests run, and each server that is away.
    assert {line: n for line, n in said.items() if n > 3} == {}


# ── engines of another shape ─────────────────────────────────────────────────────────────────

# vLLM's attention on a CPU takes blocks of 32 tokens and of multiples of that.
SHAPES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "without chunked prefill, rows of 8 blocks of 32": (
        [
            *("--block-size", "32", "--no-enable-chunked-prefill"),
            *("--max-num-batched-tokens", "3072"),
        ],
        {"blocks_per_row": 8},
    ),
    "without prefix caching, rows of 2 blocks of 128": (
        [
            *("--block-size", "128", "--no-enable-prefix-caching"),
            *("--num-gpu-blocks-override", "40"),
        ],
        {"blocks_per_row": 2},
    ),
    "rows of 3 blocks of 64": (
        ["--block-size", "64", "--num-gpu-blocks-override", "60"],
        {"blocks_per_row": 3},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_and_rows_of_any_size_come_back(
    shape: str, cluster: Cluster, plain: Engine, model: Path, logs: Path
):
    args, settings = SHAPES[shape]
    row = settings["blocks_per_row"] * int(args[args.index("--block-size") + 1])
    pool = 3072 // row * row // BLOCK * ROW_BYTES
    given = connector(cluster.server.endpoint, cpu_pool=pool, **PATIENT, **settings)
    lengths = [row - 1, row, row + 1, 3 * row + 1, 2100]
    prompts = [prompt_tokens(length, seed=3400 + length) for length in lengths]
    with QuickEngine(
        model,
        connector=given,
        args=[*SMALL_ARGS, *args],
        log=logs / f"shape-{[*SHAPES].index(shape)}.log",
    ) as engine:
        engine.when_ready()
        for prompt in prompts:
            cold = plain.ask(prompt)
            assert engine.ask(prompt).agrees_with(cold)
            engine.leave_to_server()
            answer, tokens = engine.ask_from(prompt)
            assert tokens["server"] == len(prompt) // row * row, len(prompt)
            assert answer.agrees_with(cold)
            if "--no-enable-prefix-caching" not in args:
                engine.forget()
            pooled, tokens = engine.ask_from(prompt)
            assert tokens["pool"] == len(prompt) // row * row
            assert are_bit_equal(pooled, answer)


def test_an_adapter_loaded_at_run_time_keeps_to_the_pool(
    cluster: Cluster, model: Path, logs: Path, tmp_path: Path
):
    """Its name and path do not identify its weights on another host."""
    adapter = build_adapter(tmp_path / "adapter", seed=3)
    args = [*SMALL_ARGS, "--enable-lora", "--max-lora-rank", "8"]
    given = connector(cluster.server.endpoint, **PATIENT)
    prompt = prompt_tokens(320 + 3, seed=3450)
    with QuickEngine(model, connector=given, args=args, log=logs / "lora.log") as engine:
        engine.when_ready()
        engine.load_adapter("mine", adapter)
        base = engine.ask(prompt)
        cold, tokens = engine.ask_from(prompt, model="mine")
        assert not any(tokens.values())
        assert not cold.agrees_with(base), "the adapter changes nothing"
        engine.forget()
        pooled, tokens = engine.ask_from(prompt, model="mine")
        assert tokens["pool"] == 320
        assert pooled.agrees_with(cold)
        engine.leave_to_server()
        again, tokens = engine.ask_from(prompt, model="mine")
        assert not any(tokens.values())
        assert again.agrees_with(cold)
        answer, tokens = engine.ask_from(prompt)
        assert tokens["server"] == 320
        assert answer.agrees_with(base)


def test_a_prompt_of_32k_tokens_comes_back_from_the_server(
    cluster: Cluster, model: Path, logs: Path
):
    length = 32_000
    args = [
        *("--max-model-len", "33024", "--num-gpu-blocks-override", "1100"),
        *("--max-num-batched-tokens", "2048"),
        *("--hf-overrides", json.dumps({"max_position_embeddings": 40_000})),
    ]
    prompt = prompt_tokens(length + 5, seed=3500)
    given = connector(cluster.server.endpoint, cpu_pool=4096 * ROW_BYTES, **PATIENT)
    with QuickEngine(model, connector=given, args=args, log=logs / "long.log") as engine:
        engine.when_ready()
        cold = engine.ask(prompt)
        engine.leave_to_server()
        answer, tokens = engine.ask_from(prompt)
        assert answer.agrees_with(cold)
        assert tokens["server"] == length


def test_five_quick_restarts_find_the_same_prompt_and_leave_nothing(
    cluster: Cluster, model: Path, logs: Path
):
    prompt = prompt_tokens(640 + 3, seed=3600)
    given = connector(cluster.server.endpoint, **PATIENT)
    before = {*Path("/dev/shm").glob("vllm_offload_*")}
    answers: list[Completion] = []
    for number in range(5):
        with QuickEngine(
            model, connector=given, args=SMALL_ARGS, log=logs / f"restart-{number}.log"
        ) as engine:
            engine.when_ready()
            answer, tokens = engine.ask_from(prompt)
            assert tokens["server"] == (640 if answers else 0)
            answers.append(answer)
            engine.settle()
    assert wrong_of(answers, [answers[0]] * 5) == []
    assert {*Path("/dev/shm").glob("vllm_offload_*")} <= before
