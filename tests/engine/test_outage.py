"""The server dies, is away while prompts are computed, and comes back empty; the engine stays."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import BLOCK, ENGINE_ARGS, Engine, connector

from examples.processes import RemoteServer, free_port
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient

SERVER_BACK_S = 5.0


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_prompts_computed_while_the_server_was_away_are_hits_from_it_afterwards(
    model: Path, logs: Path
):
    port = free_port()
    bind = f"tcp://127.0.0.1:{port}"
    prompts = [prompt_tokens(700 + i, seed=900 + i) for i in range(3)]
    blocks = sum(len(prompt) // BLOCK for prompt in prompts)
    with (
        RemoteServer("256MiB", bind=bind, log=logs / "first.log") as first,
        Engine(
            model, connector=connector(bind), args=ENGINE_ARGS, log=logs / "outage.log"
        ) as engine,
    ):
        engine.when_ready()
        before = engine.ask(prompts[0], 1)
        first.stop(kill=True)
        eventually(lambda: not ask_and_read(engine, "kvferry_server_ready"), 10)
        waited = engine.metric("kvferry_wait_steps_sum")
        answers = [engine.ask(prompt) for prompt in prompts[1:]]
        assert engine.metric("kvferry_wait_steps_sum") == waited, "nobody waits for nobody"

        with RemoteServer("256MiB", bind=bind, log=logs / "second.log") as second:
            began = time.monotonic()
            client = RemoteClient(ClientConfig(second.endpoint))
            eventually(lambda: client.ready, 10)
            eventually(lambda: bool(ask_and_read(engine, "kvferry_server_ready")), SERVER_BACK_S)

            def created() -> int:
                return client.stats(timeout_s=5).result().counters["put_created"]

            eventually(lambda: created() >= blocks, SERVER_BACK_S)
            assert time.monotonic() - began < 2 * SERVER_BACK_S
            assert engine.metric("kvferry_backfill_blocks_total") >= blocks
            eventually(lambda: not ask_and_read(engine, "kvferry_backfill_waiting"), 5)

            for prompt, computed in zip(prompts[1:], answers, strict=True):
                answer, tokens = engine.ask_server(prompt)
                assert tokens["server"] == len(prompt) // BLOCK * BLOCK
                assert answer.agrees_with(computed)
            answer, tokens = engine.ask_server(prompts[0], 1)
            assert tokens["server"] == len(prompts[0]) // BLOCK * BLOCK, "lost, and given again"
            assert answer.agrees_with(before)
            client.close()
        assert engine.metric("kvferry_wait_seconds_count") > 0
        assert engine.metric("kvferry_prefill_tokens_per_second") > 0
        assert engine.metric("kvferry_hook_errors_total") == 0


def ask_and_read(engine: Engine, gauge: str) -> float:
    engine.ask(prompt_tokens(8, seed=1), 1)  # gauges move with the engine's steps
    return engine.metric(gauge)
