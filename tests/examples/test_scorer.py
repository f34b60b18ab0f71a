"""The example's scorer sends a prompt where it costs least."""

from collections.abc import Iterator
from typing import Any

import pytest

from examples.scorer import WORK_COUNTS, Engine, choose

SIZE = 4
PROMPT = [*range(100, 100 + 10 * SIZE)]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines = [Engine(name, f"inproc://events-of-{name}") for name in ("a", "b")]
    yield engines
    for engine in engines:
        engine.close()


def stored(*hashes: int, medium: str = "GPU", parent: int | None = None, at: int = 0) -> Any:
    tokens = PROMPT[at * SIZE : (at + len(hashes)) * SIZE]
    return {
        "type": "BlockStored", "block_hashes": [*hashes], "parent_block_hash": parent,
        "token_ids": tokens, "block_size": SIZE, "medium": medium,
    }  # fmt: skip


def removed(*hashes: int, medium: str = "GPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": [*hashes], "medium": medium}


def test_a_prefix_is_what_its_blocks_make_wherever_they_are(engines: list[Engine]):
    engine = engines[0]
    engine.apply(stored(1, 2))
    engine.apply(stored(3, medium="CPU", parent=2, at=2))
    engine.apply(stored(9, medium="STORAGE", parent=3, at=3))
    assert engine.cached(PROMPT) == 3 * SIZE
    engine.apply(stored(2, medium="CPU", parent=1, at=1))
    engine.apply(removed(1, 2))
    assert engine.cached(PROMPT) == 0, "its first block is nowhere"
    engine.apply(stored(1, medium="CPU"))
    assert engine.cached(PROMPT) == 3 * SIZE
    engine.apply({"type": "AllBlocksCleared"})
    assert engine.cached(PROMPT) == 0


def test_the_warm_engine_is_chosen_unless_its_queue_costs_more(engines: list[Engine]):
    warm, cold = engines
    warm.apply(stored(*range(1, 9)))
    assert choose(engines, PROMPT, 0) is warm
    warm.queued_s = WORK_COUNTS * 9 * SIZE / warm.computes_per_s
    assert choose(engines, PROMPT, 0) is cold


def test_a_servers_prefix_lowers_the_price_of_the_cold_engine(engines: list[Engine]):
    warm, cold = engines
    warm.apply(stored(*range(1, 9)))
    warm.queued_s = 10 * SIZE / warm.computes_per_s
    assert choose(engines, PROMPT, 0) is warm
    assert choose(engines, PROMPT, 10 * SIZE) is cold
