"""A machine is lost: another one, with the bucket alone, gives a real engine its prompts back."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import (
    BLOCK,
    ENGINE_ARGS,
    ENGINE_BLOCKS,
    LONG_PATIENCE_S,
    PATIENT,
    Cluster,
    Engine,
    QuickEngine,
    aim,
    connector,
    stats_of,
    until,
)
from gate_proxy import GateProxy
from hybrid_model import WINDOW_TOKENS, build_hybrid
from s3 import s3_server

from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS

PACKS = 2
"""Whole packs of each prompt; a tail of 100 tokens is in none."""

PROMPT_TOKENS = PACKS * MAX_PACK_TOKENS + 100


class Bucket(NamedTuple):
    """An address, and the environment that a server needs for it."""

    url: str
    environment: Mapping[str, str]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.whole)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    if request.param == "file":
        yield Bucket(f"file://{tmp_path / 'bucket'}", {})
        return
    with s3_server() as s3:
        yield Bucket(s3.url, s3.environment)


def test_a_lost_machines_prompts_come_back_from_the_bucket_alone(
    engine: Engine, cluster: Cluster, bucket: Bucket, tmp_path: Path
):
    prompts = [prompt_tokens(PROMPT_TOKENS, seed=20_000)]
    with cluster.left(engine):
        tokens, counters = lose_a_machine(engine, cluster.proxy, bucket, tmp_path, prompts, PACKS)
    assert tokens == PACKS * MAX_PACK_TOKENS
    assert counters["hits_bucket"] * BLOCK == tokens, "all of them from the bucket"
    assert counters["bucket_packs_read"] == PACKS, "each once"


def test_a_hybrid_models_prompts_come_back_too(model: Path, logs: Path, tmp_path: Path):
    """Of each pack, the rows of full attention and those of two groups with a window."""
    hybrid = build_hybrid(tmp_path / "hybrid", model)
    prompts = [prompt_tokens(PROMPT_TOKENS, seed=22_000)]
    bucket = Bucket(f"file://{tmp_path / 'bucket'}", {})
    args = ["--prefix-cache-retention-interval", str(MAX_PACK_TOKENS)]
    # A row has two of the six layers.
    args += ["--num-gpu-blocks-override", str(2 * ENGINE_BLOCKS)]
    with (
        GateProxy("tcp://127.0.0.1:1") as proxy,
        QuickEngine(
            hybrid,
            connector=connector(proxy.endpoint, transport="tcp", **PATIENT),
            args=[*ENGINE_ARGS, *args],
            log=logs / "hybrid.log",
        ) as engine,
    ):
        packs = 3 * len(prompts) * PACKS
        tokens, counters = lose_a_machine(engine, proxy, bucket, tmp_path, prompts, packs)
    assert tokens == len(prompts) * PACKS * MAX_PACK_TOKENS
    windows = 2 * len(prompts) * WINDOW_TOKENS // BLOCK
    assert counters["hits_bucket"] == tokens // BLOCK + windows, "the windows of the hits alone"


def lose_a_machine(
    engine: Engine,
    proxy: GateProxy,
    bucket: Bucket,
    folder: Path,
    prompts: Sequence[list[int]],
    packs: int,
) -> tuple[int, dict[str, int]]:
    """The prompts come again to the engine's first server, which writes `packs`. Then it is killed,
    and nothing of it is left but the bucket. With the second server the engine, whose own levels
    are empty, answers the same. Returns how many tokens came from that, and what it counted."""
    args = ["--bucket", bucket.url, "--bucket-write-rate", "0"]
    disk = folder / "disk"
    with RemoteServer(
        "256MiB", env=bucket.environment, log=folder / "lost.log",
        args=[*args, "--disk", str(disk), "--disk-write-rate", "0"],
    ) as server, closing(aim(proxy, engine, server)) as client:  # fmt: skip
        expected = [engine.ask(prompt) for prompt in prompts]

        def are_written() -> bool:
            engine.leave_to_server()
            for prompt in prompts:
                engine.ask(prompt, 1)
            counters = stats_of(client).counters
            return counters["bucket_packs_written"] + counters["bucket_packs_existed"] >= packs

        until(are_written, f"{packs} packs are in the bucket", LONG_PATIENCE_S)
        engine.leave_to_server()
        server.stop(kill=True)
    shutil.rmtree(disk)
    with RemoteServer(
        "256MiB", env=bucket.environment, log=folder / "new.log", args=args
    ) as server, closing(aim(proxy, engine, server)) as client:  # fmt: skip
        until(lambda: stats_of(client).counters["bucket_listed"] == 1, "the bucket is listed")
        found = [engine.ask_from(prompt) for prompt in prompts]
        counters = stats_of(client).counters
    assert all(a.agrees_with(e) for (a, _), e in zip(found, expected, strict=True))
    return sum(levels["server"] for _, levels in found), counters
