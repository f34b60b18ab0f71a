"""After everything else: engines die, the server stays, and nothing is left behind."""

from pathlib import Path

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector
from gate_proxy import GateProxy

from examples.processes import free_port
from examples.tiny_model import prompt_tokens


def pool_files() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_offload_kvferry-*"))


@pytest.mark.whole
def test_an_engine_killed_and_started_before_its_server_finds_its_blocks_when_that_is_there(
    engine: Engine, cluster: Cluster, model: Path, logs: Path
):
    """Nothing listens at the new engine's address: it computes, logs it once, and recovers."""
    prompts = [prompt_tokens(1200, seed=700 + i) for i in range(2)]
    if not engine.running:  # an attempt before has killed it
        engine.start()
    engine.when_ready()
    cold = [engine.ask(prompt) for prompt in prompts]
    engine.settle()
    engine.stop(kill=True)
    port, log = free_port(), logs / "restarted.log"
    with Engine(
        model,
        connector=connector(f"tcp://127.0.0.1:{port}", transport="tcp", **PATIENT),
        args=ENGINE_ARGS,
        log=log,
    ) as restarted:
        assert pool_files() == set(), "of the killed engine, or of this one"
        answer, tokens = restarted.ask_from(prompts[0])
        assert answer.agrees_with(cold[0]) and not any(tokens.values()), "computed"
        with GateProxy(cluster.server.endpoint, port):
            restarted.when_ready()
            answer, tokens = restarted.ask_from(prompts[1])
            assert tokens == {"engine": 0, "pool": 0, "server": 1200 // BLOCK * BLOCK}
            assert answer.agrees_with(cold[1])
    assert pool_files() == set()
