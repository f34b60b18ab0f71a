"""A real engine whose blocks travel on lanes, as between two hosts."""

from pathlib import Path

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Engine, connector

from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient

pytestmark = pytest.mark.whole

PROMPT = 60 * BLOCK


def test_a_prompt_comes_back_over_lanes_with_the_answer_of_before(model: Path, logs: Path):
    prompt = prompt_tokens(PROMPT + 3, seed=950)
    with (
        RemoteServer("256MiB", log=logs / "lanes_server.log") as server,
        Engine(
            model,
            connector=connector(server.endpoint, transport="tcp", **PATIENT),
            args=ENGINE_ARGS,
            log=logs / "lanes.log",
        ) as engine,
    ):
        client = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
        cold = engine.ask(prompt)
        engine.push_out_of_pool(seed=95)
        again, tokens = engine.ask_from(prompt)
        assert tokens == {"engine": 0, "pool": 0, "server": PROMPT}
        assert again.agrees_with(cold)
        counters = client.stats(timeout_s=20).result().counters
        client.close()
    assert counters["lane_bytes_in"] > 0
    assert counters["lane_bytes_out"] > 0
    canary = 128 << 10  # goes before the lanes are open
    assert max(counters["bytes_in"], counters["bytes_out"]) < canary < counters["lane_bytes_out"]
