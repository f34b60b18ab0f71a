"""Beside another connector, in either order, on a real engine under vLLM's `MultiConnector`.

The sibling has handshake metadata, as Nixl has, and refuses any that is not its own.
"""

from pathlib import Path
from typing import Any

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector

from examples.tiny_model import prompt_tokens

SIBLING = {
    "kv_connector": "SiblingConnector",
    "kv_connector_module_path": "sibling_connector",
    "kv_role": "kv_both",
}


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.whole
@pytest.mark.parametrize("first", ["kvferry", "sibling"])
def test_both_connectors_work_in_either_order(
    first: str, cluster: Cluster, model: Path, logs: Path
):
    from sibling_connector import GOT_ITS_OWN  # seconds of vLLM, for one test

    prompt, log = prompt_tokens(640 + 3, seed=950 + len(first)), logs / f"multi-{first}.log"
    ours = connector(cluster.server.endpoint, **PATIENT)
    order = [ours, SIBLING] if first == "kvferry" else [SIBLING, ours]
    env = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).resolve().parents[2]}"}
    with Engine(model, connector=multi(*order), args=ENGINE_ARGS, env=env, log=log) as engine:
        engine.when_ready()
        cold = engine.ask(prompt)
        engine.leave_to_server()
        answer, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": 640 // BLOCK * BLOCK}
        assert answer.agrees_with(cold)
        samples = engine.metrics()
        canaries = {name: n for name, n in samples.items() if name.startswith("kvferry_canaries_t")}
        assert list(canaries.values()) == [1] and "passed" in next(iter(canaries))
        assert engine.metric("kvferry_hook_errors_total") == 0
    assert GOT_ITS_OWN in log.read_text()
