"""vLLM's router before two engines: it starts, it routes, and it follows the events that kvferry
adds to vLLM's."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from cluster import ROW_BYTES

from benchmarks.harness.runner import Skipped
from examples import router_demo, tiny_model
from examples.router_demo import POLICIES, QUESTIONS, Asked, Routed

pytestmark = pytest.mark.timeout(1800)

LENGTH = 1024
POOL_ROWS = 160
"""Puts may pin a quarter of a pool: a document's 32 rows. Five documents fill it."""
OTHERS = 6


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Routed]:
    try:
        router_demo.program()
    except Skipped as reason:
        pytest.skip(str(reason))
    with ExitStack() as stack:
        logs = tmp_path_factory.mktemp("logs")
        args = ["--num-gpu-blocks-override", "40", "--max-model-len", "1152"]
        yield Routed(stack, model, logs, pool=POOL_ROWS * ROW_BYTES, args=args)


def computed(asked: Asked) -> int:
    return asked.prompt_tokens - asked.from_engine - asked.from_pool - asked.from_server


def test_a_document_is_computed_once_whatever_the_policy_and_kv_aware_stays_with_it(
    routed: Routed,
):
    asked = [*routed.ask_all(POLICIES, LENGTH)]
    blind, aware = asked[:QUESTIONS], asked[QUESTIONS:]
    for first, *others in (blind, aware):
        assert computed(first) == first.prompt_tokens
        assert all(computed(one) < 2 * router_demo.BLOCK_TOKENS for one in others)
    assert [one.engine for one in blind] in (["a", "b", "a"], ["b", "a", "b"])
    assert blind[1].from_server == LENGTH, "the cold engine loads what the other has computed"
    assert len({one.engine for one in aware}) == 1
    assert all(one.from_engine == LENGTH for one in aware[1:])
    assert router_demo.describe(asked).count("kv_aware") == QUESTIONS


def test_the_router_sends_a_prompt_to_the_engine_whose_events_have_it_on_the_server(
    routed: Routed,
):
    """No cache and no pool has it any more, so only the events of the server's blocks name one."""
    seeds = count(500)

    def compute(engine: str) -> list[int]:
        document = tiny_model.prompt_tokens(LENGTH + 1, next(seeds))
        before = routed.blocks()
        routed.engines[engine].complete(document, 1, logprobs=None)
        routed.wait_for(before + LENGTH // router_demo.BLOCK_TOKENS)
        return document

    with routed.router("kv_aware") as router:
        documents = [(name, compute(name)) for name in [*routed.engines] * 2]
        for name in routed.engines:
            for _ in range(OTHERS):
                compute(name)
        found = [(name, routed.ask("kv_aware", router.url, one)) for name, one in documents]
    assert [asked.engine for _, asked in found] == [name for name, _ in found]
    assert all(asked.from_server == LENGTH for _, asked in found)
