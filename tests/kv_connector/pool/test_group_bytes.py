"""A row brings back all bytes of its block in every layout that vLLM has, or the engine does not
start; and that of a hybrid model holds nothing of what the row or the engine's block held before.

A layout other than the preferred one comes from the environment, or from an attention backend that
does not support the preferred one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_stand_in import use_gpu
from laid_out_worker import HYBRIDS, WINDOW, MakeWorker, Worker
from real_connector import FULL, RECURRENT, Layers, configs_of, group_of
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from kv_connector.connector import KVFerryConnector
from kv_connector.pool.layout import Piece, rest_of_rows
from kv_connector.vllm.features import COUNTS_LEVELS
from remote_server.errors import ConfigError

STRANGER, OWN = 0x11, 0x22
"""The bytes of the request before, and of the request that is stored."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int8)


def fill(tensor: torch.Tensor, value: int) -> None:
    tensor.copy_(torch.full_like(bytes_of(tensor), value).view(tensor.dtype))


@pytest.fixture(params=[False, True], ids=["on a CPU", "on a GPU"])
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM's own worker copies, which is that of a GPU."""
    if request.param:
        use_gpu(monkeypatch)
    return bool(request.param)


@pytest.fixture(params=HYBRIDS)
def worker(request: pytest.FixtureRequest, make_worker: MakeWorker, on_gpu: bool) -> Worker:
    return make_worker(*HYBRIDS[request.param])


BY_HEADS = KVCacheLayout.LHBNC
"""The one layout in which the bytes of a layer's block are in several places."""

CACHES: dict[str, tuple[str, list[Layers]]] = {
    **HYBRIDS,
    "one layer": ("LBHNC", [group_of(0, FULL)]),
    **{one.name: (one.name, [group_of(0, FULL, 3)]) for one in KVCacheLayout if one != BY_HEADS},
}


@pytest.mark.parametrize("cache", CACHES)
def test_a_row_brings_back_every_byte_of_its_block_and_of_no_other(
    make_worker: MakeWorker, on_gpu: bool, cache: str
):
    layout, groups = CACHES[cache]
    worker = make_worker(layout, groups)
    memory = worker.backing()
    memory[:] = np.random.default_rng(1).integers(-128, 128, len(memory), np.int8)
    blocks = range(worker.cache.num_blocks)
    for group in range(len(groups)):
        before = [[layer.clone() for layer in worker.own(group, block)] for block in blocks]
        worker.copy(group, block=5, row=3, store=True)
        worker.copy(group, block=9, row=3, store=False)
        for block in blocks:
            expected = before[5 if block == 9 else block]
            for layer, sent in zip(worker.own(group, block), expected, strict=True):
                assert torch.equal(bytes_of(layer), bytes_of(sent))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layout_with_a_block_in_several_places_is_refused(
    make_worker: MakeWorker, num_layers: int
):
    with pytest.raises(ConfigError, match=BY_HEADS.name):
        make_worker(BY_HEADS.name, [group_of(0, FULL, num_layers)])


@pytest.mark.parametrize("group", [0, 1])
def test_a_stored_row_holds_nothing_of_what_was_there_before(worker: Worker, group: int):
    """Neither of the row, which another group's block had, nor of the engine's block."""
    worker.backing()[:] = STRANGER
    worker.rows[:] = STRANGER
    for layer in worker.own(group, 5):
        fill(layer, OWN)
    num_own = sum(layer.nbytes for layer in worker.own(group, 5))
    worker.copy(group, block=5, row=3, store=True)
    values, counts = np.unique(worker.rows[3], return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert found.pop(OWN) == num_own
    assert set(found) <= {0}, f"{found.get(STRANGER)} bytes of another request"
    assert (worker.rows[2] == STRANGER).all() and (worker.rows[4] == STRANGER).all()


@pytest.mark.parametrize("waited_for", [False, True])
def test_on_a_gpu_a_row_is_cleared_when_its_copy_ends_and_not_again(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, waited_for: bool
):
    """A row that was waited for may have another owner when the end of its copy is reported."""
    use_gpu(monkeypatch, eager=True)
    worker = make_worker(*HYBRIDS["a group with fewer layers"])
    worker.rows[:] = STRANGER
    worker.submit_store(1, block=5, row=3)
    if waited_for:
        worker.copies.wait({1})
        worker.rows[:] = STRANGER
    assert [result.job_id for result in worker.copies.get_finished()] == [1]
    assert (worker.rows[3] == (STRANGER if waited_for else 0)).all()


def test_the_canary_of_a_hybrid_model_looks_at_what_each_group_owns(worker: Worker):
    stage = worker.spec.self_test_fixture()
    with stage.borrowed():
        stage.write_pattern()
        stage.store()
        for source, target in zip(stage.source_rows(), stage.target_rows(), strict=True):
            target[:] = source
        stage.load()
        sent, got = stage.sources(), stage.targets()
        assert sent.keys() == got.keys() and {group for group, _ in sent} == {0, 1}
        assert all(np.array_equal(sent[place], got[place]) for place in sent)
        assert sum(pages.nbytes for pages in sent.values()) == sum(
            layer.nbytes for group in (0, 1) for layer in worker.own(group, 5)
        )


def test_every_rank_that_loads_a_shared_row_has_a_canary_of_its_own(worker: Worker):
    """Rank 0 alone stores the rows of an MLA model, whose load half is every rank's."""
    spec, rows = worker.spec, []
    spec.replicated_layout, num_bytes = True, spec.cpu_page_size_per_worker
    for rank in range(3):
        spec.config = replace(
            spec.config, parallel=replace(spec.config.parallel, rank=rank, world_size=3)
        )
        stage = spec.self_test_fixture()
        assert (stage.part.place.start, stage.part.place.num_bytes) == (0, num_bytes)
        rows += stage._source_rows + stage._target_rows
    assert len(set(rows)) == len(rows)


def test_groups_whose_bytes_in_a_packed_block_are_not_known_keep_the_engine_from_the_server(
    make_worker: MakeWorker,
):
    """A recurrent state among packed attention pages: vLLM shows no place of it in the block."""
    worker = make_worker("BLHNC", [group_of(0, FULL, 2), group_of(1, RECURRENT)])
    assert worker.connector._reporter is not None
    told = worker.connector._reporter.report
    assert told.facts is None and told.failed_hooks == ()


def test_a_cache_of_which_vllm_would_offload_one_layer_alone_is_refused(make_worker: MakeWorker):
    """vLLM 0.32 takes pages that are padded to an alignment for packed blocks: loads would bring
    back the first layer, and leave in the others what another request had there. 0.31 does not."""
    padded = replace(FULL, block_stride_alignment=FULL.page_size_bytes * 3 // 2)
    layouts = ["LBHNC", "BLHNC"]
    if COUNTS_LEVELS:
        with pytest.raises(ConfigError, match=r"without layers.0.2.*VLLM_KV_CACHE_LAYOUT=BLHNC"):
            make_worker("LBHNC", [group_of(0, padded, 3)])
        layouts.remove("LBHNC")
    for layout in layouts:
        worker = make_worker(layout, [group_of(0, padded, 3)])
        for layer in worker.own(0, 5):
            fill(layer, OWN)
        worker.copy(0, block=5, row=3, store=True)
        worker.copy(0, block=9, row=3, store=False)
        assert all((bytes_of(layer) == OWN).all() for layer in worker.own(0, 9))


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("spec", [WINDOW, RECURRENT], ids=lambda spec: type(spec).__name__)
def test_rows_of_several_blocks_are_refused_where_vllm_would_store_them_incomplete(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Any, spec: Any
):
    config, cache = configs_of(
        model, tmp_path / "e", monkeypatch, [group_of(0, FULL), group_of(1, spec)],
        server=None, blocks_per_row=4,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"blocks_per_row=4.*{type(spec).__name__}.*remove the"):
        KVFerryConnector(config, role, cache)


def test_the_rest_is_what_lies_between_the_pieces():
    owned = [[Piece(0, 0, 10), Piece(1, 2, 4), Piece(1, 6, 8)], [Piece(1, 0, 8)], []]
    assert rest_of_rows(owned, [10, 8]) == [
        [Piece(1, 0, 2), Piece(1, 4, 6)],
        [Piece(0, 0, 10)],
        [Piece(0, 0, 10), Piece(1, 0, 8)],
    ]
