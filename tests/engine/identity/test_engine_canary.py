"""The start-up canary of a real engine: through its own layout, its workers and a real server."""

from pathlib import Path

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector
from gate_proxy import GateProxy

from examples.tiny_model import prompt_tokens


class DamagingProxy(GateProxy):
    """Changes a byte in everything large that comes from the server: blocks, and only these."""

    def _passed_on(self, data: bytes) -> bytes:
        if len(data) < 4096:
            return data
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 1
        return bytes(damaged)


def canaries(engine: Engine) -> dict[str, float]:
    return {
        sample.partition('result="')[2].partition('"')[0]: value
        for sample, value in engine.metrics().items()
        if sample.startswith("kvferry_canaries_total{")
    }


def test_a_real_engines_canary_passes_and_nothing_is_left_of_it(engine: Engine, cluster: Cluster):
    engine.when_ready()
    assert set(canaries(engine)) == {"passed"}
    assert not [name for name in cluster.stats().namespaces if "canary" in name]
    assert engine.metric("kvferry_hook_errors_total") == 0


@pytest.mark.whole
def test_an_engine_whose_canary_fails_serves_from_its_pool_alone(
    cluster: Cluster, model: Path, logs: Path
):
    """Checksums off, so that nothing but the canary can see what this network does."""
    prompt, log = prompt_tokens(640 + 3, seed=900), logs / "self_test.log"
    put_before = cluster.counter("put_total")
    with (
        DamagingProxy(cluster.server.endpoint) as proxy,
        Engine(
            model,
            connector=connector(proxy.endpoint, transport="tcp", integrity=False, **PATIENT),
            args=ENGINE_ARGS,
            log=log,
        ) as engine,
    ):
        cold = engine.ask(prompt)
        engine.forget()
        answer, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 640 // BLOCK * BLOCK, "server": 0}
        assert answer.agrees_with(cold)
        assert canaries(engine) == {"failed": 1}
        assert engine.metric("kvferry_server_ready") == 0
        assert engine.metric("kvferry_hook_errors_total") == 0
    assert cluster.counter("put_total") == put_before + 1, "the canary alone was put"
    lines = log.read_text().splitlines()
    ours = ("remote_tier.py", "canary", "__init__.py", "worker.py", "copies.py", "connector.py")
    errors = [line for line in lines if "ERROR" in line and any(map(line.__contains__, ours))]
    assert len(errors) == 1, errors
    assert "disabled" in errors[0] and "came back from the server with" in errors[0]
