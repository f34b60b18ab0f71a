"""The engines of the benchmarks count what really happens, to the token and the byte."""

from pathlib import Path

import pytest
from cluster import ALWAYS_LOAD, BLOCK, PATIENT, POOL_ROWS, ROW_BYTES, Cluster

from benchmarks.engine.driver import Batch, Counters, EngineFailed, EngineSettings
from benchmarks.engine.profile import profile
from benchmarks.engine.prompts import Expected, distinct
from benchmarks.engine.vllm_engine import VllmEngine


@pytest.mark.whole
def test_an_engine_of_the_benchmarks_says_what_it_did(cluster: Cluster, model: Path):
    settings = EngineSettings(
        model=str(model),
        kv_bytes_per_token=ROW_BYTES // BLOCK,
        max_model_len=2048,
        max_batched_tokens=512,
        max_num_seqs=4,
        connector={
            "server": cluster.server.endpoint, "cpu_pool": POOL_ROWS * ROW_BYTES,
            "store_answers": False, "namespace": "bench", **ALWAYS_LOAD, **PATIENT,
        },
        watch=True,
        extra={"kv_cache_memory_bytes": 128 << 20},
    )  # fmt: skip
    prompts = distinct(2, 10 * BLOCK + 1, seed=42, max_tokens=3)
    with VllmEngine(settings) as engine:

        def run(expected: Expected) -> Batch:
            before = engine.counters()
            batch = engine.run(prompts)
            engine.settle()
            moved = engine.counters().since(before)
            assert expected.differences(batch.cached, moved.moved) == []
            return batch

        def of(level: str | None) -> Expected:
            tokens = 20 * BLOCK
            cached = {} if level is None else {level: tokens}
            return Expected.of(cached, BLOCK, ROW_BYTES, 0 if level else tokens)

        engine.limit_step(64)
        cold = run(of(None))
        assert cold.steps >= 642 // 64, "no step computes more than it may"
        assert all(0 < a.first_token_s < a.total_s < cold.seconds + 1 for a in cold.answers)
        computing = profile(cold, engine.take_spans())
        assert 0 < computing.compute < cold.seconds and computing.ours > 0
        assert computing.copying > 0, "stores were seen where they are made"
        engine.limit_step(512)
        again = run(of("engine"))
        assert again.steps < cold.steps
        engine.forget()
        from_pool = run(of("pool"))
        # Other prompts push these out of the pool, and then only the server has them.
        for seed in range(100, 101 + POOL_ROWS // 30):
            engine.run(distinct(1, 30 * BLOCK + 1, seed, max_tokens=1))
            engine.settle()
        engine.forget()
        from_server = run(of("server"))
        tokens = [
            [answer.tokens for answer in each.answers]
            for each in (cold, again, from_pool, from_server)
        ]
        assert tokens[1:] == tokens[:1] * 3
        assert engine.counters().hook_errors == 0
        with pytest.raises(EngineFailed, match="a step of 513 tokens: this engine takes 4 "):
            engine.limit_step(513)
    assert Counters(1, 2).since(Counters(1, 1)) == Counters(0, 1)
    with pytest.raises(EngineFailed, match="does not run"):
        engine.run(prompts)
