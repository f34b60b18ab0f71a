"""A machine is lost: another one, with the bucket alone, gives a real engine its prompts back."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from busy_scene import observer_of
from cluster import (
    ALWAYS_LOAD,
    BLOCK,
    ENGINE_ARGS,
    ENGINE_BLOCKS,
    PATIENT,
    ROW_BYTES,
    Engine,
    connector,
    running,
)
from hybrid_model import WINDOW_TOKENS, build_hybrid
from s3 import s3_server

from examples.processes import RemoteServer, free_port
from examples.tiny_model import prompt_tokens
from remote_server.client import RemoteClient
from remote_server.protocol import StatsReply
from remote_server.store.bucket.packs import MAX_PACK_TOKENS

PACKS = 4
"""Whole packs of each prompt; a tail of 100 tokens and more is in none."""

NUM_PROMPTS = 4

NUM_HYBRID_PROMPTS = 8
"""More: an engine keeps few rows of a window, so that more prompts fit in its pool."""

POOL_ROWS = 256
"""Fewer than all prompts have: each comes from the server when it is its turn again."""

PATIENCE_S = 120.0


class Bucket(NamedTuple):
    """An address, and the environment that a server needs for it."""

    url: str
    environment: Mapping[str, str]


class Machine(NamedTuple):
    """A port at which servers come and go, and an engine that knows no other."""

    port: int
    engine: Engine

    @contextmanager
    def server(
        self, log: Path, bucket: Bucket, *args: str
    ) -> Iterator[tuple[RemoteServer, RemoteClient]]:
        """A server at that port, with the test's own client of it."""
        with RemoteServer(
            "256MiB", bind=f"tcp://127.0.0.1:{self.port}", env=bucket.environment, log=log,
            args=["--bucket", bucket.url, "--bucket-write-rate", "0", *args],
        ) as server:  # fmt: skip
            client = observer_of(server)
            try:
                yield server, client
            finally:
                client.close()


@contextmanager
def two_machines(
    model: Path, logs: Path, pool_rows: int, *args: str
) -> Iterator[tuple[Machine, Machine]]:
    """They have nothing in common; their servers are not there yet."""
    ports = free_port(), free_port()
    settings = PATIENT | ALWAYS_LOAD | {"transport": "tcp", "cpu_pool": pool_rows * ROW_BYTES}
    engines = [
        Engine(
            model, connector=connector(f"tcp://127.0.0.1:{port}", **settings),
            args=[*ENGINE_ARGS, *args], log=logs / f"{model.name}-{number}.log",
        )
        for number, port in enumerate(ports)
    ]  # fmt: skip
    with running(*engines):
        yield Machine(ports[0], engines[0]), Machine(ports[1], engines[1])


@pytest.fixture(scope="module")
def machines(model: Path, logs: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(model, logs, POOL_ROWS) as machines:
        yield machines


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.whole)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    if request.param == "file":
        yield Bucket(f"file://{tmp_path / 'bucket'}", {})
        return
    with s3_server() as s3:
        yield Bucket(s3.url, s3.environment)


def test_a_lost_machines_prompts_come_back_from_the_bucket_alone(
    machines: tuple[Machine, Machine], bucket: Bucket, logs: Path, tmp_path: Path
):
    seed = 20_000 if bucket.url.startswith("file") else 21_000  # the engines are the same
    packs = NUM_PROMPTS * PACKS
    tokens, counters = lose_a_machine(machines, bucket, logs, tmp_path / "disk", seed, packs)
    assert tokens >= 0.99 * packs * MAX_PACK_TOKENS
    assert counters["hits_bucket"] * BLOCK == tokens, "all of them from the bucket"
    assert counters["bucket_packs_read"] == packs, "each once"


@pytest.mark.whole
def test_a_hybrid_models_prompts_come_back_too(model: Path, logs: Path, tmp_path: Path):
    """Of each pack, the rows of full attention and those of two groups with a window."""
    hybrid = build_hybrid(tmp_path / "hybrid", model)
    packs = 3 * NUM_HYBRID_PROMPTS * PACKS
    bucket = Bucket(f"file://{tmp_path / 'bucket'}", {})
    args = ["--prefix-cache-retention-interval", str(MAX_PACK_TOKENS)]
    # A row has two of the six layers.
    args += ["--num-gpu-blocks-override", str(2 * ENGINE_BLOCKS)]
    with two_machines(hybrid, logs, POOL_ROWS * 3 // 4, *args) as machines:
        tokens, counters = lose_a_machine(
            machines, bucket, logs, tmp_path / "disk", 22_000, packs, NUM_HYBRID_PROMPTS
        )
    assert tokens >= 0.99 * NUM_HYBRID_PROMPTS * PACKS * MAX_PACK_TOKENS
    windows = 2 * NUM_HYBRID_PROMPTS * WINDOW_TOKENS // BLOCK
    assert counters["hits_bucket"] == tokens // BLOCK + windows, "the windows of the hits alone"


def lose_a_machine(
    machines: tuple[Machine, Machine],
    bucket: Bucket,
    logs: Path,
    disk: Path,
    seed: int,
    packs: int,
    num_prompts: int = NUM_PROMPTS,
) -> tuple[int, dict[str, int]]:
    """Every prompt comes again to the first machine, for which `packs` are written. Then its server
    is killed, and nothing of it is left but the bucket. The second machine answers the same.
    Returns how many tokens it had from its server, and what that counted."""
    lengths = (PACKS * MAX_PACK_TOKENS + 50 * (n + 2) for n in range(num_prompts))
    prompts = [prompt_tokens(length, seed + n) for n, length in enumerate(lengths)]
    (first, second), name = machines, f"{seed}.log"
    with first.server(
        logs / f"lost-{name}", bucket, "--disk", str(disk), "--disk-write-rate", "0"
    ) as (server, client):
        reach(first.engine)
        expected = [first.engine.ask(prompt) for prompt in prompts]
        deadline = time.monotonic() + PATIENCE_S
        while num_written(client) < packs:  # a store that was late gets them in another round
            assert time.monotonic() < deadline, f"{num_written(client)} of {packs} packs"
            for prompt in prompts:
                until(client, at_rest, "nothing is under way")
                first.engine.forget()
                first.engine.ask(prompt, 1)
            until(client, at_rest, "nothing is under way")
        server.stop(kill=True)
    shutil.rmtree(disk)
    with second.server(logs / f"new-{name}", bucket) as (_, client):
        until(client, lambda s: s.counters["bucket_listed"] == 1, "the bucket is listed")
        reach(second.engine)
        found = [second.engine.ask_from(prompt) for prompt in prompts]
        counters = client.stats(timeout_s=10).result().counters
    print({name: n for name, n in counters.items() if "bucket" in name and n})
    assert [a.compared_with(e) for (a, _), e in zip(found, expected, strict=True)] == (
        ["equal"] * num_prompts
    )
    return sum(levels["server"] for _, levels in found), counters


def reach(engine: Engine) -> None:
    """Until it has reached its server. A step makes its gauges those of now."""
    engine.ask(prompt_tokens(8, seed=1), 1)
    engine.when_ready()


def num_written(client: RemoteClient) -> int:
    counters = client.stats(timeout_s=10).result().counters
    return counters["bucket_packs_written"] + counters["bucket_packs_existed"]


def at_rest(stats: StatsReply) -> bool:
    return not any(tier.pending for tier in stats.tiers.values())


def until(client: RemoteClient, condition: Callable[[StatsReply], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition(stats := client.stats(timeout_s=10).result()):
        counters = {name: n for name, n in stats.counters.items() if "bucket" in name and n}
        assert time.monotonic() < deadline, f"{what}: {counters}"
        time.sleep(0.02)
