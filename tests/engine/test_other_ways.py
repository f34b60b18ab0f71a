"""The other ways to run it: the pool alone, and the tier in a foreign offloading config."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import (
    BLOCK,
    ENGINE_ARGS,
    PATIENT,
    Cluster,
    Engine,
    bare_tier,
    connector,
    running,
)

from examples.tiny_model import prompt_tokens

pytestmark = pytest.mark.whole


class Ways(NamedTuple):
    """Two engines, and vLLM's pool files that were there before them."""

    pool: Engine
    bare: Engine
    files_before: set[Path]


def offload_files() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_offload_*"))


@pytest.fixture(scope="module")
def ways(cluster: Cluster, model: Path, logs: Path) -> Iterator[Ways]:
    """An engine without a server, and one with vLLM's own connector, of which every token is
    counted."""
    every_token = bare_tier(cluster.server.endpoint, "bare-tier-test", **PATIENT)
    pool = Engine(model, connector=connector(None), args=ENGINE_ARGS, log=logs / "pool.log")
    bare = Engine(model, connector=every_token, args=ENGINE_ARGS, log=logs / "bare.log")
    before = offload_files()
    with running(pool, bare):
        yield Ways(pool, bare, before)


def test_without_a_server_the_pool_works_alone(ways: Ways):
    prompt = prompt_tokens(640 + 3, seed=800)
    cold = ways.pool.ask(prompt)
    ways.pool.forget()
    answer, tokens = ways.pool.ask_from(prompt)
    assert tokens == {"engine": 0, "pool": 640, "server": 0}
    assert answer.agrees_with(cold)


def test_the_tier_serves_vllms_own_connector(ways: Ways, cluster: Cluster):
    prompt, bare = prompt_tokens(640 + 3, seed=810), ways.bare
    assert offload_files() <= ways.files_before, "a pool keeps its name"
    bare.when_ready()
    cold = bare.ask(prompt)
    bare.settle()
    # A bare tier does not find again what was stored before a reset, so the pool is filled instead.
    for seed in range(811, 814):
        bare.ask(prompt_tokens(3_000, seed=seed), 1)
        bare.forget()
    assert any(name.startswith("bare-tier-test@") for name in cluster.stats().namespaces)
    answer, tokens = bare.ask_from(prompt)
    assert tokens == {"engine": 0, "pool": 0, "server": 640 // BLOCK * BLOCK}
    assert answer.agrees_with(cold)
