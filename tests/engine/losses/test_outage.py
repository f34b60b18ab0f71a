"""The server dies, is away while prompts are computed, and comes back empty; the engine stays."""

from pathlib import Path

from cluster import BLOCK, Cluster, Engine, aim

from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens


def test_prompts_computed_while_the_server_was_away_are_hits_from_it_afterwards(
    engine: Engine, cluster: Cluster, logs: Path
):
    prompts = [prompt_tokens(700 + i, seed=900 + i) for i in range(3)]
    blocks = sum(len(prompt) // BLOCK for prompt in prompts)
    with cluster.left(engine):
        with RemoteServer("256MiB", log=logs / "first.log") as first:
            aim(cluster.proxy, engine, first).close()
            before = engine.ask(prompts[0])
            engine.settle()
            first.stop(kill=True)
            cluster.proxy.cut()
            engine.when_idle("kvferry_server_ready")
            waited = engine.metric("kvferry_wait_steps_sum")
            backfilled = engine.metric("kvferry_backfill_blocks_total")
            answers = [engine.ask(prompt) for prompt in prompts[1:]]
            assert engine.metric("kvferry_wait_steps_sum") == waited, (
                "a request waits for a server that is away"
            )
        with RemoteServer("256MiB", log=logs / "second.log") as second:
            aim(cluster.proxy, engine, second).close()
            engine.leave_to_server()
            assert engine.metric("kvferry_backfill_blocks_total") - backfilled >= blocks
            for prompt, computed in zip(prompts, [before, *answers], strict=True):
                answer, tokens = engine.ask_from(prompt)
                assert tokens["server"] == len(prompt) // BLOCK * BLOCK
                assert answer.agrees_with(computed)
    assert engine.metric("kvferry_wait_seconds_count") > 0
    assert engine.metric("kvferry_prefill_tokens_per_second") > 0
    assert engine.metric("kvferry_hook_errors_total") == 0
