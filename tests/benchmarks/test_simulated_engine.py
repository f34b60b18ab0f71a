"""The simulated engine: what it finds, moves and waits for, with a real tier, client and server."""

import numpy as np
import pytest

from benchmarks.engine import kinds
from benchmarks.engine.driver import EngineFailed, EngineSettings, Request
from benchmarks.engine.prompts import Expected, distinct
from benchmarks.simulated import calibration
from benchmarks.simulated.engine import DECODE_AS_TOKENS, SimulatedEngine
from benchmarks.simulated.sequences import PrefixCache, answer_to, keys_of
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

BLOCK = 16
BYTES_PER_TOKEN = 1024
TOKEN_S = 2e-5


def settings(**more: object) -> EngineSettings:
    given = {
        "model": "none", "kv_bytes_per_token": BYTES_PER_TOKEN, "max_model_len": 512,
        "max_batched_tokens": 128, "max_num_seqs": 4, "block_tokens": BLOCK,
        "engine_cache": False, "connector": {"cpu_pool": "8MiB", "store_answers": False},
    }  # fmt: skip
    return EngineSettings(**{**given, **more})


def test_a_key_stands_for_every_token_before_it_and_whole_blocks_alone_have_one():
    tokens = list(range(50))
    assert len(keys_of(tokens, BLOCK)) == 3
    assert keys_of(tokens[:32], BLOCK) == keys_of(tokens, BLOCK)[:2]
    changed = keys_of([9, *tokens[1:]], BLOCK)
    assert not set(changed) & set(keys_of(tokens, BLOCK))


def test_the_same_prompt_gets_the_same_answer_however_long():
    assert answer_to([1, 2, 3], 8)[:3] == answer_to([1, 2, 3], 3)
    assert answer_to([1, 2, 3], 8) != answer_to([1, 2, 4], 8)


def test_the_prefix_cache_finds_a_prefix_and_keeps_its_head_the_longest():
    cache = PrefixCache(3)
    a, b, c, d = keys_of(range(4 * BLOCK), BLOCK)
    cache.keep([a, b, c])
    assert cache.find([a, b, c, d]) == 3
    cache.keep([d])
    assert cache.find([a, b, c]) == 2
    cache.clear()
    assert cache.find([a]) == 0


def test_a_step_lasts_as_long_as_its_tokens_cost_and_a_long_prompt_takes_several():
    with SimulatedEngine(settings(connector=None), token_s=TOKEN_S) as engine:
        batch = engine.run([Request(list(range(300)), 4)])
        assert batch.steps == 3 + 3  # 128, 128, 44 tokens and a token; then one a step
        assert batch.seconds >= (300 + 3 * DECODE_AS_TOKENS) * TOKEN_S
        assert batch.answers[0].tokens == answer_to(list(range(300)), 4)
        assert batch.answers[0].first_token_s >= 300 * TOKEN_S
        engine.limit_step(64)
        assert engine.run([Request(list(range(300)), 1)]).steps == 5
        with pytest.raises(EngineFailed, match="a step of 129 tokens"):
            engine.limit_step(129)
        with pytest.raises(EngineFailed, match="max_model_len"):
            engine.run([Request(list(range(512)), 1)])


def test_each_level_gives_what_it_has_and_bytes_agree_with_arithmetic():
    prompts = distinct(6, 8 * BLOCK + 1, seed=1, max_tokens=3)
    cached = 6 * 8 * BLOCK

    def moved(engine: SimulatedEngine) -> list[str]:
        before = engine.counters()
        batch = engine.run(prompts)
        engine.settle()
        counted = engine.counters().since(before)
        assert counted.hook_errors == 0
        expected = Expected.of(
            levels, BLOCK, BLOCK * BYTES_PER_TOKEN, 0 if levels else cached, server=True
        )
        return expected.differences(batch.cached, counted.moved)

    with RemoteServer("32MiB") as server:
        connector = {
            "cpu_pool": "8MiB", "store_answers": False, "server": server.endpoint,
            "break_even": False, "patience": 1000, "max_wait_ms": 60_000, "transport": "tcp",
        }  # fmt: skip
        with SimulatedEngine(
            settings(engine_cache=True, connector=connector), token_s=TOKEN_S
        ) as engine:
            levels: dict[str, int] = {}
            assert moved(engine) == []
            levels = {"engine": cached}
            assert moved(engine) == []
            engine.forget()
            levels = {"pool": cached}
            assert moved(engine) == []
            engine.restart()
            assert engine.counters().moved == dict.fromkeys(engine.counters().moved, 0)
            levels = {"server": cached}
            assert moved(engine) == []
            engine.forget(pool=True)  # a new weight epoch: no tier has its blocks
            levels = {}
            assert moved(engine) == []
            assert engine._pool is not None
            engine._pool.check()


def test_a_row_that_holds_another_block_ends_the_engine():
    prompts = distinct(1, 4 * BLOCK + 1, seed=2, max_tokens=1)
    with SimulatedEngine(settings(), token_s=TOKEN_S) as engine:
        engine.run(prompts)
        assert engine.run(prompts).cached["pool"] == 4 * BLOCK
        assert engine._pool is not None
        engine._pool.rows[:] = np.roll(engine._pool.rows, 1, axis=0)
        with pytest.raises(EngineFailed, match="another block"):
            engine.run(prompts)


def test_what_computing_costs_comes_from_what_fetching_was_measured_to_cost(monkeypatch):
    asked = []

    def fetch(block_bytes: int) -> float:
        asked.append(block_bytes)
        return 1e-9

    monkeypatch.setattr("benchmarks.simulated.engine.fetch_s_per_byte", fetch)
    with SimulatedEngine(settings(connector=None), ratio=7.0) as engine:
        assert engine.token_s == pytest.approx(7e-9 * BYTES_PER_TOKEN)
    assert asked == [BLOCK * BYTES_PER_TOKEN]
    assert calibration.ratio_of(57_344) == 12.0
    assert calibration.ratio_of(36_864) == 7.0


def test_a_kind_names_its_ratio_and_is_said_before_every_title():
    assert kinds.label("vllm") == ""
    assert kinds.label(kinds.named("simulated")) == "simulated: "
    assert kinds.label(kinds.named("simulated:12")) == "simulated:12:1: "
    for wrong in ("vllm:3", "other", "simulated:", "simulated:0", "simulated:-1"):
        with pytest.raises(ValueError, match=r"."):
            kinds.named(wrong)
    engine = kinds.make("simulated:3.5", settings())
    assert isinstance(engine, SimulatedEngine)
    assert engine.ratio == 3.5
