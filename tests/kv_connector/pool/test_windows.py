"""The windows of a hybrid model's groups, on vLLM's own scheduler half: in its lookups, and in the
tokens that count as the server's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_connector import (
    BLOCK,
    FULL,
    RECURRENT,
    Layers,
    group_of,
    matched,
    real_connector,
    request_of,
)
from scripted_client import ScriptedClient
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kv_connector.connector import KVFerryConnector
from kv_connector.pool.rows import windows_of
from kv_connector.tier.metrics import REUSED_TOKENS
from kv_connector.vllm.features import COUNTS_LEVELS, CacheHitSource, sources_by_keys
from remote_server.protocol import MAX_WINDOW, KeyState, Stretch
from remote_server.store.bucket.packs.grouping import packs_in

WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=2 * BLOCK
)
LONGER = replace(WINDOW, sliding_window=3 * BLOCK)

PROMPT = 80
"""Blocks of 32 tokens: two packs of 32, and a tail of 16."""

ROWS_OF_A_PACK = 32


def looked_up(
    model: Path, folder: Path, patch: pytest.MonkeyPatch, groups: list[Layers], readable: Any
) -> tuple[Any, int]:
    """The first lookup of a prompt, and the tokens of the hit where the server holds those blocks
    that `readable` accepts, by their group and the token they end at."""
    with real_connector(model, folder, patch, groups, break_even=False, cpu_pool="8MiB") as made:
        tier: Any = made._remote
        tier.declare("model", {"model": "m"})
        request = request_of(made, "r", PROMPT * BLOCK + 1)
        tokens = matched(made, request, lambda asked: states_of(asked, readable))
        asked = ScriptedClient.latest.asked
        return next(one for one in asked if one.operation == "lookup"), tokens


def states_of(asked: Any, readable: Any) -> list[KeyState]:
    states = [
        KeyState.READABLE if readable(stretch.group, stretch.start + n * stretch.step + BLOCK)
        else KeyState.ABSENT
        for stretch in asked.chain
        for n in range(stretch.rows)
    ]  # fmt: skip
    assert len(states) == len(asked.keys)
    return states


STATE = 50
"""The one block of which a recurrent group has kept its state."""


def in_packs(group: int, windows: dict[int, int]) -> list[range]:
    """The blocks of a group in each of its packs."""
    if windows.get(group) == 1:
        return [range(STATE, STATE + 1)]
    rows = min(windows.get(group) or ROWS_OF_A_PACK, ROWS_OF_A_PACK)
    ends = range(ROWS_OF_A_PACK, PROMPT + 1, ROWS_OF_A_PACK)
    return [range(end - rows, end) for end in ends]


HYBRIDS = {
    "a window": ([group_of(0, FULL), group_of(1, WINDOW)], {1: 2}),
    "two windows": ([group_of(0, FULL), group_of(1, LONGER), group_of(2, WINDOW)], {1: 3, 2: 2}),
    "a window longer than a pack": (
        [group_of(0, FULL), group_of(1, replace(WINDOW, sliding_window=40 * BLOCK))], {1: 40},
    ),
    "a recurrent state": ([group_of(0, FULL), group_of(1, RECURRENT)], {1: 1}),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "windows"), HYBRIDS.values(), ids=list(HYBRIDS))
def test_what_packs_hold_of_a_hybrid_model_is_a_hit_of_the_engine(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: list[Layers],
    windows: dict[int, int],
):
    """Where the bucket has the packs of a prompt and nothing else, it is found up to the end of the
    last one, or up to the state: a pack of a window has enough rows, and ends where one of full
    attention does."""

    def readable(group: int, end: int) -> bool:
        number = end // BLOCK - 1
        return any(number in rows for rows in in_packs(group, windows))

    first, tokens = looked_up(model, tmp_path / "e", monkeypatch, groups, readable)
    assert {stretch.group: stretch.window for stretch in first.chain} == {0: 0, **windows}
    full = first.chain[0]
    assert full == Stretch(PROMPT, 0, 0, BLOCK, 0)
    assert all(stretch.backwards for stretch in first.chain[1:])
    assert tokens == BLOCK * (STATE + 1 if 1 in windows.values() else 2 * ROWS_OF_A_PACK)
    found = {len(group.keys) for group in packs_in(first.keys, first.chain, 4096, 16 << 20)}
    assert found == {ROWS_OF_A_PACK, *(min(w, ROWS_OF_A_PACK) for w in windows.values())}


def test_a_window_has_a_row_to_spare_where_a_draft_model_gives_up_the_last_one_of_a_hit():
    def groups(*, drafts: bool) -> list[Any]:
        return [
            SimpleNamespace(
                group_idx=n, sliding_window_size_in_chunks=w, is_eagle_group=drafts and not n
            )
            for n, w in enumerate([None, 4, 1, MAX_WINDOW + 1])
        ]

    assert windows_of(groups(drafts=False)) == {1: 4, 2: 1, 3: MAX_WINDOW}
    assert windows_of(groups(drafts=True)) == {1: 5, 2: 1, 3: MAX_WINDOW}


# ── what counts as the server's ──────────────────────────────────────────────────────────


DEVICE = CacheHitSource.DEVICE
SERVER = CacheHitSource.EXTERNAL_UNSPECIFIED

SHORT = 8


def sources_of(connector: KVFerryConnector, groups: Sequence[Layers]) -> dict[Any, int]:
    """Where the tokens of a prompt come from of which the server holds every block."""
    tier: Any = connector._remote
    tier.declare("model", {"model": "m"})
    request = request_of(connector, "r", SHORT * BLOCK + 1)
    tokens = matched(connector, request, lambda asked: [KeyState.READABLE] * len(asked.keys))
    assert tokens == SHORT * BLOCK
    blocks = KVCacheBlocks(tuple(blocks_of(next(iter(group.values()))) for group in groups))
    connector.update_state_after_alloc(request, blocks, tokens)
    sources = connector._sources_of(request, tokens)
    assert sum(sources.values()) == tokens, "vLLM takes no other sum"
    assert tier.counters.totals()[REUSED_TOKENS, "server"] == sources[SERVER]
    return sources


def blocks_of(spec: Any) -> list[KVCacheBlock]:
    """What vLLM allocates for a hit of the whole prompt: nothing before a window."""
    window = getattr(spec, "sliding_window", None) or SHORT * BLOCK
    first = max(0, SHORT - (window - 1 + BLOCK - 1) // BLOCK)
    blocks = []
    for number in range(SHORT + 1):
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


@pytest.mark.skipif(not COUNTS_LEVELS, reason="vLLM 0.32 is the first to count by level")
@pytest.mark.parametrize(("groups", "expected"), MODELS.values(), ids=list(MODELS))
def test_only_what_was_loaded_counts_as_the_servers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Layers],
    expected: dict[Any, int],
):  # fmt: skip
    with real_connector(model, tmp_path / "e", monkeypatch, groups, break_even=False) as made:
        found = sources_of(made, groups)
    assert found == {source: blocks * BLOCK for source, blocks in expected.items()}


@pytest.mark.parametrize("groups", [groups for groups, _ in MODELS.values()], ids=list(MODELS))
def test_where_vllm_does_not_know_the_level_of_a_hit_the_tier_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Layers]
):
    for module in ("connector", "tier.remote_tier"):
        monkeypatch.setattr(f"kv_connector.{module}.COUNTS_LEVELS", False)
    with real_connector(model, tmp_path / "e", monkeypatch, groups, break_even=False) as made:
        found = sources_of(made, groups)
        tier: Any = made._remote
        assert tier.loaded_keys("r")
        tier.on_request_finished(SimpleNamespace(req_id="r"))
        assert not tier.loaded_keys("r")
    assert found == {SERVER: SHORT * BLOCK}


def test_tokens_are_shared_out_by_the_keys_that_were_loaded():
    host = CacheHitSource.HOST
    assert sources_by_keys(96, ["a", "b", "c"], {"b"}) == {SERVER: 32, host: 64}
    assert sources_by_keys(96, ["a", "b", "c"], ()) == {host: 96}
    assert sources_by_keys(96, [], {"w"}) == {SERVER: 96}
