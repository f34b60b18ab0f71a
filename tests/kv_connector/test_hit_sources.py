"""Tokens count as the server's when the server sent them, with sliding windows too."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_connector import BLOCK, FULL, Layers, group_of, matched, real_connector, request_of
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kv_connector.connector import KVFerryConnector
from remote_server.protocol import KeyState

DEVICE = CacheHitSource.DEVICE
SERVER = CacheHitSource.EXTERNAL_UNSPECIFIED

WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=2 * BLOCK
)
LONGER = replace(WINDOW, sliding_window=3 * BLOCK)

PROMPT = 8


@pytest.fixture
def connector(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KVFerryConnector]:
    with real_connector(
        model, tmp_path / "e", monkeypatch, request.param, break_even=False
    ) as made:
        yield made


def sources_of(connector: KVFerryConnector, groups: Sequence[Layers]) -> dict[Any, int]:
    """Where the tokens of a prompt come from of which the server holds every block."""
    tier: Any = connector._remote
    tier.declare("model", {"model": "m"})
    request = request_of(connector, "r", PROMPT * BLOCK + 1)
    tokens = matched(connector, request, lambda asked: [KeyState.READABLE] * len(asked.keys))
    assert tokens == PROMPT * BLOCK
    blocks = KVCacheBlocks(tuple(blocks_of(next(iter(group.values()))) for group in groups))
    connector.update_state_after_alloc(request, blocks, tokens)
    sources = connector.get_external_cache_hit_sources(request, tokens)
    assert sum(sources.values()) == tokens, "vLLM takes no other sum"
    return sources


def blocks_of(spec: Any) -> list[KVCacheBlock]:
    """What vLLM allocates for a hit of the whole prompt: nothing before a window."""
    window = getattr(spec, "sliding_window", None) or PROMPT * BLOCK
    first = max(0, PROMPT - (window - 1 + BLOCK - 1) // BLOCK)
    blocks = []
    for number in range(PROMPT + 1):
        block = KVCacheBlock(block_id=number + 1)
        block.is_null = number < first
        blocks.append(block)
    return blocks


MODELS = {
    "one window": ([group_of(0, WINDOW)], {SERVER: 2, DEVICE: 6}),
    "two windows": ([group_of(0, WINDOW), group_of(1, LONGER)], {SERVER: 3, DEVICE: 5}),
    "a window beside full attention": ([group_of(0, WINDOW), group_of(1, FULL)], {SERVER: 8}),
    "full attention": ([group_of(0, FULL)], {SERVER: 8}),
}


@pytest.mark.parametrize(
    ("connector", "groups", "expected"),
    [(groups, groups, expected) for groups, expected in MODELS.values()],
    ids=list(MODELS),
    indirect=["connector"],
)
def test_only_what_was_loaded_counts_as_the_servers(
    connector: KVFerryConnector, groups: list[Layers], expected: dict[Any, int]
):
    found = sources_of(connector, groups)
    assert found == {source: blocks * BLOCK for source, blocks in expected.items()}
