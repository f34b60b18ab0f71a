"""A router that follows an engine's events sees the blocks of its pool and of the server."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from cluster import (
    BLOCK,
    PATIENT,
    ROW_BYTES,
    SMALL_ARGS,
    SMALL_POOL_ROWS,
    Cluster,
    Engine,
    QuickEngine,
    connector,
    running,
    until,
)

from examples.tiny_model import prompt_tokens

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]


Place = tuple[str, str | None]
"""Medium and locality."""

GPU: Place = ("GPU", None)
POOL: Place = ("CPU", None)
SERVER: Place = ("STORAGE", "REMOTE")


class Router:
    """Where each block is, by its hash, and the prompts that the blocks make."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.places: dict[Place, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        """The hash of each block, with that of the block before it and its tokens."""
        self.removed: set[tuple[Place, int]] = set()
        self._next: int | None = None

    def read(self) -> None:
        """All that has come."""
        while self._socket.poll(200):
            _, number, payload = self._socket.recv_multipart()
            assert self._next in (None, int.from_bytes(number, "big")), "a batch was lost"
            self._next = int.from_bytes(number, "big") + 1
            for event in msgpack.unpackb(payload)[1]:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.places.clear()
            return
        place = event["medium"], event.get("locality")
        here = self.places.setdefault(place, {})
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                here.pop(block, None)
                self.removed.add((place, block))
            return
        assert event["block_size"] == BLOCK
        parent = event["parent_block_hash"]
        for number, block in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][number * BLOCK : (number + 1) * BLOCK]
            here[block] = parent, tuple(tokens)
            parent = block

    def prefix_at(self, place: Place, prompt: list[int]) -> int:
        """Tokens of `prompt`, from the first, whose blocks are there, by parents and tokens."""
        self.read()
        return BLOCK * len(self.blocks_at(place, prompt))

    def blocks_at(self, place: Place, prompt: list[int]) -> list[int]:
        """Their hashes."""
        by_content = {content: block for block, content in self.places.get(place, {}).items()}
        blocks: list[int] = []
        parent = None
        for first in range(0, len(prompt), BLOCK):
            parent = by_content.get((parent, tuple(prompt[first : first + BLOCK])))
            if parent is None:
                break
            blocks.append(parent)
        return blocks

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


@pytest.fixture(scope="module")
def seen(cluster: Cluster, model: Path, logs: Path, router: Router) -> Iterator[Engine]:
    given = connector(
        cluster.proxy.endpoint, transport="tcp", cpu_pool=SMALL_POOL_ROWS * ROW_BYTES,
        kv_events=True, **PATIENT,
    )  # fmt: skip
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{router.port}",
    }  # fmt: skip
    args = [*SMALL_ARGS, "--kv-events-config", json.dumps(events)]
    engine = QuickEngine(model, connector=given, args=args, log=logs / "events.log")
    with running(engine):
        engine.when_ready()
        seeds = count(8000)

        def is_followed() -> bool:
            """ZeroMQ drops what the engine publishes until it has the subscription."""
            engine.ask(prompt_tokens(2 * BLOCK, seed=next(seeds)), 1)
            router.read()
            return bool(router.places)

        until(is_followed, "the engine is followed")
        yield engine


# No test here resets the engine's own cache alone: for that too vLLM publishes `AllBlocksCleared`,
# which has no level.


def test_a_prompt_is_seen_at_every_level_with_its_tokens(seen: Engine, router: Router):
    prompt = prompt_tokens(10 * BLOCK + 3, seed=8100)
    seen.ask(prompt, 1)
    seen.until(lambda: router.prefix_at(SERVER, prompt) == 10 * BLOCK, "the put is seen")
    assert router.prefix_at(POOL, prompt) == 10 * BLOCK
    assert router.prefix_at(GPU, prompt) == 10 * BLOCK


def test_what_a_reset_leaves_on_the_server_is_seen_again_when_it_is_loaded(
    seen: Engine, router: Router
):
    prompt = prompt_tokens(12 * BLOCK + 3, seed=8200)
    seen.ask(prompt, 1)
    seen.leave_to_server()
    seen.tick()
    assert not router.prefix_at(SERVER, prompt), "a reset clears what is known"
    _, tokens = seen.ask_from(prompt, 1)
    assert tokens["server"] >= 11 * BLOCK
    seen.until(lambda: router.prefix_at(SERVER, prompt) == tokens["server"], "the load is seen")
    assert router.prefix_at(POOL, prompt) == tokens["server"]


def test_what_a_server_has_lost_is_removed_when_the_engine_finds_out(
    seen: Engine, router: Router, cluster: Cluster
):
    prompt = prompt_tokens(9 * BLOCK + 3, seed=8300)
    seen.ask(prompt, 1)
    seen.until(lambda: router.prefix_at(SERVER, prompt) == 9 * BLOCK, "the put is seen")
    known = router.blocks_at(SERVER, prompt)
    cluster.client.clear(timeout_s=60).result(60)
    for number in range(3):  # they drive the prompt out of the engine's cache and out of the pool
        seen.ask(prompt_tokens(60 * BLOCK, seed=8310 + number), 1)
    _, tokens = seen.ask_from(prompt, 1)
    assert not any(tokens.values())

    def is_removed() -> bool:
        router.read()
        return (SERVER, known[0]) in router.removed

    seen.until(is_removed, "the absence is seen")
    seen.until(lambda: router.prefix_at(SERVER, prompt) == 9 * BLOCK, "it is put again")
