"""An engine of two ranks: each flies a canary of its own, and one of them is enough to fail."""

import os
from pathlib import Path
from typing import Any

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector
from test_engine_canary import canaries
from test_exactness import wrong_of

from examples.tiny_model import prompt_tokens

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent


class TwoRanks(Engine):
    """With a core for each rank."""

    def __init__(
        self, model: Path, settings: dict[str, Any], log: Path, how: str = "--tensor-parallel-size"
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        super().__init__(
            model,
            connector=settings,
            args=[*ENGINE_ARGS, how, "2"],
            # The last one, whatever its value, lets two engines share a memory node (vLLM 0.33).
            env={
                "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
                "PYTHONPATH": path,
                "VLLM_CPU_SIM_MULTI_NUMA": "0",
            },
            log=log,
        )


def test_the_canaries_of_both_ranks_pass_and_their_rows_come_back(
    cluster: Cluster, model: Path, logs: Path
):
    prompt = prompt_tokens(640 + 3, seed=950)
    settings = connector(cluster.server.endpoint, **PATIENT)
    with TwoRanks(model, settings, logs / "ranks.log") as engine:
        engine.when_ready()
        assert canaries(engine) == {"passed": 2}
        cold = engine.ask(prompt)
        engine.leave_to_server()
        answer, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": 640 // BLOCK * BLOCK}
        assert answer.agrees_with(cold)
        assert engine.metric("kvferry_hook_errors_total") == 0


def test_both_engines_of_one_address_find_what_either_has_computed(
    cluster: Cluster, model: Path, logs: Path
):
    """Data parallel: each has a scheduler, a pool and a connection of its own."""
    prompts = [prompt_tokens(640 + 3, seed=952 + number) for number in range(4)]
    settings = connector(cluster.server.endpoint, **PATIENT)
    with TwoRanks(model, settings, logs / "data.log", "--data-parallel-size") as engine:
        engine.until(lambda: engine.metric("kvferry_server_ready") == 2, "both are connected")
        cold = engine.ask_together(prompts)
        engine.leave_to_server()
        with engine.counting() as tokens:
            answers = engine.ask_together(prompts)
        assert tokens == {"engine": 0, "pool": 0, "server": len(prompts) * 640}
        assert wrong_of(answers, cold) == []
        assert engine.metric("kvferry_hook_errors_total") == 0


def test_a_damaged_load_of_one_rank_keeps_the_engine_from_the_server(
    cluster: Cluster, model: Path, logs: Path
):
    log = logs / "bad-rank.log"
    log.unlink(missing_ok=True)  # of an attempt before
    settings = connector(cluster.server.endpoint, **PATIENT)
    settings |= {"kv_connector": "OneBadRank", "kv_connector_module_path": "one_bad_rank"}
    put_before = cluster.counter("put_created")
    with TwoRanks(model, settings, log) as engine:
        prompt = prompt_tokens(320 + 3, seed=960)
        cold = engine.ask(prompt)
        engine.forget()
        answer, tokens = engine.ask_from(prompt)
        assert not any(tokens.values()), "its copies change bytes, so the pool would as well"
        assert answer.agrees_with(cold)
        assert canaries(engine) == {"passed": 1, "failed": 1}
        assert engine.metric("kvferry_server_ready") == 0
    assert cluster.counter("put_created") == put_before + 2, "a canary of each rank, and no more"
    (line,) = [line for line in log.read_text().splitlines() if "disabled until" in line]
    assert "canary of worker 1 failed" in line and "layers differ" in line
