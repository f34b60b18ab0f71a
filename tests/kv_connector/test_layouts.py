"""In every layout that vLLM has, a row holds all bytes of its block, or the engine does not start.

A layout other than the preferred one comes from the environment, or from an attention backend that
does not support the preferred one.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_stand_in import use_gpu
from laid_out_worker import make_worker
from real_connector import FULL, group_of
from vllm.v1.kv_cache_layout import KVCacheLayout

from remote_server.errors import ConfigError

BY_HEADS = KVCacheLayout.LHBNC
"""The one layout in which the bytes of a layer's block are in several places."""


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("layout", [one for one in KVCacheLayout if one is not BY_HEADS])
def test_a_row_brings_back_its_block_and_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: KVCacheLayout,
    num_layers: int, on_gpu: bool,
):  # fmt: skip
    if on_gpu:
        use_gpu(monkeypatch)
    worker = make_worker(model, tmp_path, monkeypatch, layout.name, [group_of(0, FULL, num_layers)])
    memory = worker.backing()
    memory[:] = np.random.default_rng(1).integers(-128, 128, len(memory), np.int8)
    blocks = range(worker.cache.num_blocks)
    before = [[layer.clone() for layer in worker.own(0, block)] for block in blocks]
    worker.copy(0, block=5, row=3, store=True)
    worker.copy(0, block=9, row=3, store=False)
    for block in blocks:
        expected = before[5 if block == 9 else block]
        for layer, sent in zip(worker.own(0, block), expected, strict=True):
            assert torch.equal(layer.view(torch.int16), sent.view(torch.int16))
    worker.shutdown()


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layout_in_which_a_block_is_in_several_places_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int
):
    with pytest.raises(ConfigError, match="LHBNC"):
        make_worker(model, tmp_path, monkeypatch, "LHBNC", [group_of(0, FULL, num_layers)])
