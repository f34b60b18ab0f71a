"""An engine of two workers: both map the scheduler's pool, and both report."""

from pathlib import Path

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector

from examples.tiny_model import prompt_tokens


@pytest.mark.whole
@pytest.mark.timeout(700)
def test_the_parts_of_both_workers_come_back_from_the_server(
    cluster: Cluster, model: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Engine, "start_timeout_s", 500.0)  # one process more imports vLLM
    prompt, log = prompt_tokens(640 + 3, seed=980), logs / "two-workers.log"
    ours = connector(cluster.server.endpoint, **PATIENT)
    with Engine(
        model,
        connector=ours,
        args=[*ENGINE_ARGS, "--tensor-parallel-size", "2"],
        # On two cores there is none for each worker and one to spare.
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        log=log,
    ) as engine:
        engine.when_ready()
        cold = engine.ask(prompt)
        engine.push_out_of_pool(seed=50)
        cluster.settled()
        answer, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": 640 // BLOCK * BLOCK}
        assert answer.agrees_with(cold)
        assert engine.metric("kvferry_canaries_total") == 2
        assert engine.metric("kvferry_hook_errors_total") == 0
