"""What an engine uses from its own levels stays on the server, whatever else is put there."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from busy_scene import PATIENCE_S, PROMPT_TOKENS, ROWS, FarScene, counted_of, observer_of
from cluster import BLOCK, ROW_BYTES

from benchmarks.engine.prompts import keys_of
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from kv_connector.backfill import REST_S
from remote_server.client import RemoteClient
from remote_server.protocol import KeyState

MEMORY_MIB = 16
MEMORY_PROMPTS = (MEMORY_MIB << 20) // (ROWS * ROW_BYTES)
"""Prompts that the server's memory holds."""

SYSTEM, UNUSED = 50_000, 50_001
SCAN = range(51_000, 51_000 + 3 * (MEMORY_PROMPTS + 1))

PAUSE_S = 2 * REST_S / (MEMORY_PROMPTS - 1)
"""Between two prompts of the scan: it takes twice `REST_S`, in which a block is touched once, to
replace all else that the memory holds. A server that is filled in less than that keeps nothing."""


class Small:
    """A server that holds eight prompts, and the test's own client of it."""

    def __init__(self, client: RemoteClient) -> None:
        self._client = client
        self._namespace = ""

    def know_the_engine(self) -> bool:
        """Whether the engine has declared its namespace; this client declares it too."""
        known = self._client.stats(timeout_s=10).result().namespaces
        for name in known:
            if name.startswith("qwen2@"):
                self._namespace = name
                self._client.declare(name, ROW_BYTES, known[name].fingerprint)
        return bool(self._namespace)

    def rows_of(self, seed: int) -> int:
        """How many blocks of this prompt it has."""
        keys = keys_of(prompt_tokens(PROMPT_TOKENS, seed), BLOCK)
        states = self._client.lookup(self._namespace, keys, timeout_s=10).result().states
        return states.count(KeyState.READABLE)


@contextmanager
def small_server_behind(scene: FarScene, log: Path) -> Iterator[Small]:
    """The engine's server is another one in the block: empty, and `MEMORY_MIB` large."""
    with RemoteServer(f"{MEMORY_MIB}MiB", log=log) as server:
        client = observer_of(server)
        small = Small(client)
        try:
            aim(scene, server)
            until(scene, small.know_the_engine, "the engine reaches the small server")
            until(scene, lambda: client.ready, "the observer's namespace is welcome")
            # What the pool holds is offered to a server that lacks it: let that be over.
            until(
                scene,
                lambda: not scene.engine.metric("kvferry_backfill_waiting"),
                "nothing is left to be offered",
            )
            yield small
        finally:
            client.close()
            aim(scene, scene.server)
    scene.until_ready()


def aim(scene: FarScene, server: RemoteServer) -> None:
    scene.proxy.aim(server.endpoint)
    scene.proxy.reset_connections()


def until(scene: FarScene, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        scene.tick()
        time.sleep(0.05)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_a_system_prompt_that_only_levels_above_serve_outlives_a_scan_of_the_server(
    far_scene: FarScene, logs: Path
):
    """A user's question behind it comes between two prompts of the scan, which puts three times
    what the server's memory holds. Another prompt that no request uses does not survive that."""
    scene = far_scene
    with small_server_behind(scene, logs / "small-server.log") as small:
        for seed in (UNUSED, SYSTEM):
            scene.ask(seed, 1)
        until(scene, lambda: small.rows_of(UNUSED) == small.rows_of(SYSTEM) == ROWS, "both are put")
        scene.engine.reset_prefix_cache(30)  # the first question finds it in the pool
        before = scene.engine.cached_by_level()
        with scene.counting() as counted:
            for seed in SCAN:
                next_s = time.monotonic() + PAUSE_S
                question = prompt_tokens(PROMPT_TOKENS, SYSTEM) + prompt_tokens(8, seed)
                scene.engine.complete(question, 1)
                scene.ask(seed, 1)
                time.sleep(max(0.0, next_s - time.monotonic()))
        after = scene.engine.cached_by_level()
        found = small.rows_of(SYSTEM), small.rows_of(UNUSED)
    served = {level: after[level] - before[level] for level in before}
    print(f"\nblocks found: {found}; tokens by level: {served}")
    assert found == (ROWS, 0)
    assert served["pool"] >= ROWS * BLOCK, "once"
    assert served["engine"] >= 0.9 * len(SCAN) * ROWS * BLOCK
    assert served["server"] == 0
    assert counted_of(counted, "kvferry_touched_blocks_total") >= 2 * ROWS
