"""The other ways to run it: the pool alone, and the tier in somebody else's offloading config."""

from pathlib import Path

from cluster import (
    ALWAYS_LOAD,
    BLOCK,
    ENGINE_ARGS,
    PATIENT,
    POOL_ROWS,
    ROW_BYTES,
    Cluster,
    Engine,
    connector,
)

from examples.tiny_model import prompt_tokens


def test_without_a_server_the_pool_works_alone(model: Path, logs: Path):
    prompt = prompt_tokens(640 + 3, seed=800)
    with Engine(model, connector=connector(None), args=ENGINE_ARGS, log=logs / "pool.log") as pool:
        cold = pool.ask(prompt)
        pool.forget()
        answer, tokens = pool.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 640, "server": 0}
        assert answer.agrees_with(cold)


def test_the_tier_serves_vllms_own_connector(cluster: Cluster, model: Path, logs: Path):
    """As on a GPU host, but for the spec: vLLM's own refuses the CPU platform."""
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "FerrySpec",
            "spec_module_path": "kv_connector.spec",
            "cpu_bytes_to_use": POOL_ROWS * ROW_BYTES,
            "secondary_tiers": [
                {
                    "type": "RemoteTier",
                    "module_path": "kv_connector.remote_tier",
                    "server": cluster.server.endpoint,
                    "namespace": "bare-tier-test",
                    **PATIENT,  # every token is counted
                    **ALWAYS_LOAD,
                }
            ],
        },
    }
    prompt = prompt_tokens(640 + 3, seed=810)
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    with Engine(model, connector=offloading, args=ENGINE_ARGS, log=logs / "bare.log") as bare:
        assert set(Path("/dev/shm").glob("vllm_offload_*")) == before, "the pool keeps its name"
        bare.when_ready()
        cold = bare.ask(prompt)
        bare.push_out_of_pool(seed=30)
        stats = cluster.settled()
        assert any(name.startswith("bare-tier-test@") for name in stats.namespaces)
        answer, tokens = bare.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": 640 // BLOCK * BLOCK}
        assert answer.agrees_with(cold)
