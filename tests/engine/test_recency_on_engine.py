"""What an engine uses from its own levels stays on the server, whatever else is put there."""

from contextlib import closing
from pathlib import Path

import pytest
from cluster import BLOCK, ROW_BYTES, Cluster, Engine, aim, declared, rows_of

from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens

ROWS = 20
MEMORY_MIB = 16
MEMORY_PROMPTS = (MEMORY_MIB << 20) // (ROWS * ROW_BYTES)
"""Prompts that the server's memory holds."""

TOUCHED = "kvferry_touched_blocks_total"


@pytest.mark.whole  # a block is touched once in five seconds
def test_a_system_prompt_that_only_levels_above_serve_outlives_a_scan_of_the_server(
    engine: Engine, cluster: Cluster, logs: Path
):
    """A user's question behind it comes between two prompts of the scan, which puts three times
    what the server's memory holds, and no more of it between two touches than half of that.
    Another prompt that no request uses does not survive that."""
    unused, system, *scan = (
        prompt_tokens(ROWS * BLOCK + 3, seed=50_000 + n) for n in range(3 * MEMORY_PROMPTS + 5)
    )
    with (
        cluster.left(engine),
        RemoteServer(f"{MEMORY_MIB}MiB", log=logs / "small-server.log") as server,
        closing(aim(cluster.proxy, engine, server)) as client,
    ):
        namespace = declared(client)
        for prompt in (unused, system):
            engine.ask(prompt, 1)
        engine.settle()  # the first question finds it in the pool
        assert rows_of(client, namespace, unused) == rows_of(client, namespace, system) == ROWS
        touched = engine.metric(TOUCHED)

        def is_touched() -> bool:
            engine.ask(system + prompt_tokens(8, seed=1), 1)
            return engine.metric(TOUCHED) >= touched + ROWS

        with engine.counting() as served:
            for number, prompt in enumerate(scan):
                engine.ask(system + prompt_tokens(8, seed=51_000 + number), 1)
                engine.ask(prompt, 1)
                if number % (MEMORY_PROMPTS // 2) == 0:
                    engine.until(is_touched, "the server counts the use")
                    touched = engine.metric(TOUCHED)
        assert rows_of(client, namespace, system) == ROWS
        assert rows_of(client, namespace, unused) == 0
    assert served["pool"] >= ROWS * BLOCK, "once"
    assert served["engine"] >= 0.9 * len(scan) * ROWS * BLOCK
    assert served["server"] == 0
