"""The arithmetic that every number rests on: how large blocks are, and that bytes are checked."""

import numpy as np
import pytest

from benchmarks.harness import machine
from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.models import MODELS, TINY, choose

MiB = 1 << 20

# Computed by hand: layers × 2 × heads × head size × 2 bytes, times 16 tokens, times 512 blocks.
ORACLES = {
    "Qwen2.5-32B-Instruct": (262_144, 4 * MiB, 2048 * MiB),
    "Qwen2.5-7B-Instruct": (57_344, 896 * 1024, 448 * MiB),
    "Qwen2.5-3B-Instruct": (36_864, 576 * 1024, 288 * MiB),
    "glm-4-9b-chat-1m": (81_920, 1280 * 1024, 640 * MiB),
    "Llama-3.1-8B": (131_072, 2 * MiB, 1024 * MiB),
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_sizes(model):
    work = blocks.plan(model, blocks.NUM_BATCHES)
    assert (model.bytes_per_token, work.block_bytes, work.num_bytes) == ORACLES[model.name]
    assert model.page_bytes() * model.layers == work.block_bytes
    assert work.num_blocks * blocks.BLOCK_SIZE == 8192


def test_models_are_chosen_by_parts_of_their_names():
    assert choose("") == list(MODELS)
    assert [model.name for model in choose("3B, LLAMA,tiny")] == [
        "Qwen2.5-3B-Instruct", "Llama-3.1-8B", "tiny"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"names several.*tiny"):
        choose("Qwen")
    with pytest.raises(ValueError, match="no part"):
        choose("70B")


def test_a_plan_moves_every_block_once_and_is_always_the_same():
    work = blocks.plan(TINY, 3)
    for ids in work.everything:
        assert sorted(ids) == list(range(3 * 64))
    again = blocks.plan(TINY, 3)
    assert all(np.array_equal(a, b) for a, b in zip(work.everything, again.everything, strict=True))
    assert [len(batch.source) for batch in work.batches] == [64] * 3


def test_no_two_blocks_share_a_word():
    pool = blocks.allocate(64, 4096)
    blocks.fill(pool)
    words = pool.view(np.uint64)
    assert all(len(np.unique(words[:, place])) == 64 for place in range(words.shape[1]))


def test_one_wrong_byte_anywhere_is_found():
    work = blocks.plan(TINY, 1)
    source, target = (blocks.allocate(64, work.block_bytes) for _ in range(2))
    blocks.fill(source)
    with pytest.raises(WrongBytes):
        blocks.verify(source, target, work.everything)
    blocks.copy_naive(source, target, work)
    blocks.verify(source, target, work.everything)
    target[17, -1] ^= 1
    with pytest.raises(WrongBytes, match="to 17"):
        blocks.verify(source, target, work.everything)


def test_what_does_not_fit_says_so():
    machine.skip_unless_fits(1 * MiB, None)
    with pytest.raises(Skipped, match=r"needs 2.0 MiB, --memory allows 1.0 MiB"):
        machine.skip_unless_fits(2 * MiB, 1 * MiB)
    with pytest.raises(Skipped, match="does not fit"):
        machine.skip_unless_fits(1 << 50, None)
