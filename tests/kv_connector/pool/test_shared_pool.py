"""Scheduler and workers of an engine have one pool, or the engine does not start."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from connector_standin import Connector, output_of
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kv_connector.connector import KVFerryConnector
from kv_connector.identity.worker_reports import WorkerReport
from kv_connector.pool import pool_file as at_pool
from kv_connector.pool.pool_file import engine_core_pid, pool_name, pool_path
from kv_connector.pool.sharing import MARK_BYTES, PoolFile, PoolNotShared, pool_file_of
from kv_connector.spec import POOL_NAME_KEY, FerrySpec
from remote_server.errors import ConfigError

PAGE = 2048
ROWS = 6


def spec_of(
    pool_name: str, rank: int = 0, *, workers: int = 2, page: int = PAGE, replicated: bool = False,
    rows: int = ROWS,
) -> FerrySpec:  # fmt: skip
    """With rank 0 it may be the scheduler's as well."""
    parallel = OffloadingParallelConfig(
        rank=rank, world_size=workers, tp_size=workers, pp_size=1, pcp_size=1, dcp_size=1,
        data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )  # fmt: skip
    extra: dict[str, Any] = {
        POOL_NAME_KEY: pool_name,
        "cpu_bytes_to_use": rows * 4096,
        "secondary_tiers": [],
    }
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer",), 0),),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=parallel,
        replicated_layout=replicated,
    )
    return FerrySpec(config)


def kv_caches(page: int = PAGE, blocks: int = 8) -> CanonicalKVCaches:
    """A worker's KV cache of one layer."""
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((blocks, page), dtype=torch.int8), page)],
        [[CanonicalKVCacheRef(0, page)]],
    )


Names = Callable[[str], str]
Start = Callable[[FerrySpec], FerrySpec]


@pytest.fixture
def names() -> Iterator[Names]:
    """Names of pools, removed at the end."""
    made = []

    def name(engine: str = "shared") -> str:
        made.append(pool_name(os.getpid(), f"test-{engine}-{os.getpid()}"))
        return made[-1]

    yield name
    for one in made:
        pool_path(one).unlink(missing_ok=True)


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts a worker as far as its copies between KV cache and pool; ends it with the test."""
    specs: list[FerrySpec] = []

    def start(spec: FerrySpec) -> FerrySpec:
        spec.get_worker(kv_caches(spec.cpu_page_size_per_worker))
        specs.append(spec)
        return spec

    yield start
    for spec in specs:
        assert spec._made_worker is not None
        spec._made_worker.shutdown()
        if spec._pool_file is not None:
            os.close(spec._pool_file)


@pytest.fixture
def pool(names: Names) -> str:
    return names("shared")


def bytes_of(region: Any) -> Any:
    return region.base_tensor.numpy().view("uint8")


# ── marks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("replicated", [False, True])
def test_the_scheduler_starts_in_the_pool_of_workers(replicated: bool, pool: str, started: Start):
    workers = [started(spec_of(pool, rank, replicated=replicated)) for rank in (0, 1)]
    scheduler = spec_of(pool, replicated=replicated)
    manager = scheduler.get_manager()
    region = scheduler._scheduler_mmap
    assert {worker.pool_file for worker in workers} == {pool_file_of(region.fd)}
    assert not bytes_of(region).any(), "a mark is left in a row"
    bytes_of(workers[1]._region)[7] = 42
    assert bytes_of(region)[7] == 42
    assert not os.path.lexists(pool_path(pool)), "a kill would leave the name"
    assert scheduler.get_manager() is manager
    manager.shutdown()


def test_a_scheduler_without_a_workers_pool_makes_none_of_its_own(pool: str):
    """As where its workers have another parent. It would put rows of zeros."""
    with pytest.raises(ConfigError, match=r"no CPU pool at .* on one host"):
        spec_of(pool).get_manager()
    assert not os.path.lexists(pool_path(pool))


def test_a_worker_in_another_pool_stops_the_start(names: Names, pool: str, started: Start):
    started(spec_of(pool, 0))
    started(spec_of(names("elsewhere"), 1))
    scheduler = spec_of(pool)
    with pytest.raises(ConfigError, match="worker 1 left no mark in it"):
        scheduler.get_manager()


def test_a_worker_that_lays_its_part_elsewhere_stops_the_start(pool: str, started: Start):
    """Rows of one size whose parts differ: one worker would write into the other's."""
    started(spec_of(pool, 0))
    started(spec_of(pool, 1, page=PAGE - 64))
    with pytest.raises(ConfigError, match=f"worker 1 has {PAGE - 64} bytes .* unequal parts"):
        spec_of(pool).get_manager()


def test_stages_of_unequal_layers_in_pools_of_one_size_are_named(pool: str, started: Start):
    """Rows of another size in a pool of the same: a mark in the worker's own row was not found."""
    started(spec_of(pool, 0))
    started(spec_of(pool, 1, page=2 * PAGE))  # three rows of 8 KiB, where there are six of 4 KiB
    with pytest.raises(ConfigError, match=r"worker 1 has 4096 bytes .* unequal parts .* layers"):
        spec_of(pool).get_manager()


def test_two_connectors_in_one_engine_are_named(pool: str, started: Start):
    """`MultiConnector` makes both in one process, and their pools have one name."""
    started(spec_of(pool, 0))
    with pytest.raises(ConfigError, match=r"worker 0 uses this CPU pool already: .* one connector"):
        started(spec_of(pool, 0))


def test_workers_that_need_pools_of_different_sizes_stop_at_once(pool: str, started: Start):
    """As pipeline stages with unequal layers do. vLLM would wait half a minute, or go on."""
    started(spec_of(pool, 0))
    for page in (PAGE // 4, 3 * PAGE):
        with pytest.raises(ConfigError, match="unequal parts of the KV cache"):
            spec_of(pool, 1, page=page, rows=5).get_worker(kv_caches(page))


def test_the_mark_of_another_engine_is_none(pool: str, started: Start):
    worker = started(spec_of(pool, 0, workers=1))
    scheduler = spec_of(pool, workers=1)
    place = scheduler._place_of(0)
    bytes_of(worker._region)[place.mark_at + 8] ^= 1
    with pytest.raises(ConfigError, match="the mark of worker 0 of another engine"):
        scheduler.get_manager()


@pytest.mark.parametrize("replicated", [False, True])
def test_no_mark_lies_in_a_row_that_a_canary_borrows(replicated: bool, pool: str, started: Start):
    """Workers start at the same time: it would put back what was there before the mark."""
    workers = [started(spec_of(pool, rank, replicated=replicated)) for rank in (0, 1)]
    stage = workers[0].self_test_fixture()
    with stage.borrowed():
        stage.write_pattern()
        stage.store()
    borrowed = {*stage._source_rows, *stage._target_rows}
    for worker in workers:
        place = worker._place_of(worker.config.parallel.rank)
        assert place.mark_at // place.stride not in borrowed
    spec_of(pool, replicated=replicated).get_manager().shutdown()


def test_marks_of_many_workers_of_one_shared_part_do_not_meet(pool: str):
    places = [spec_of(pool, workers=32, replicated=True)._place_of(rank) for rank in range(32)]
    starts = [place.mark_at for place in places]
    assert starts == list(range(starts[0], starts[0] + 32 * MARK_BYTES, MARK_BYTES))
    assert {start // places[0].stride for start in starts} == {ROWS // 2}


def test_a_worker_that_reports_another_pool_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    """It is too late to refuse, and what it loads is not what was stored."""
    ours = Connector()
    monkeypatch.setattr("kv_connector.pool.sharing.pool_file_of", lambda _: PoolFile(1, 2, 4096))
    told = WorkerReport(0, 1, {"attention": "x"}, pool=PoolFile(1, 2, 4096))
    ours.connector.update_connector_output(output_of(told))
    other = WorkerReport(1, 1, {"attention": "x"}, pool=PoolFile(1, 3, 4096))
    with pytest.raises(PoolNotShared, match="worker 1 uses the CPU pool"):
        ours.connector.update_connector_output(output_of(other))


# ── ranks that start together ────────────────────────────────────────────────────────────────


MOMENTS = [
    (at_pool.os.path, "lexists"), (at_pool.Path, "exists"), (at_pool.Path, "unlink"),  # type: ignore[attr-defined]
    (at_pool, "check_memory_fits"), (at_pool.os, "memfd_create"), (at_pool.os, "ftruncate"),  # type: ignore[attr-defined]
    (at_pool.Path, "symlink_to"), (at_pool.Path, "stat"),  # type: ignore[attr-defined]
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "call"), MOMENTS, ids=[call for _, call in MOMENTS])
def test_ranks_that_start_together_map_one_pool(
    owner: Any, call: str, after: bool, pool: str, started: Start, monkeypatch: pytest.MonkeyPatch
):
    """Rank 1 starts whole while rank 0 is at any call of making the file."""
    rank_1: list[FerrySpec] = []
    real = getattr(owner, call)

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs) if after else None
        if not rank_1:
            rank_1.append(spec_of(pool, 1))
            started(rank_1[0])
        return result if after else real(*args, **kwargs)

    with monkeypatch.context() as racing:
        racing.setattr(owner, call, meanwhile)
        rank_0 = started(spec_of(pool, 0))
    if not rank_1:  # a call that making the file does without
        started(spec_of(pool, 1))
    else:
        assert rank_0.pool_file == rank_1[0].pool_file
    spec_of(pool).get_manager().shutdown()


# ── executors ────────────────────────────────────────────────────────────────────────────────


def engine_with(backend: object, world_size: int = 2, nodes: int = 1) -> Any:
    parallel = SimpleNamespace(
        distributed_executor_backend=backend,
        world_size=world_size,
        use_ray=backend == "ray" or getattr(backend, "uses_ray", False),
        nnodes=nodes,
        nnodes_within_dp=nodes,
    )
    config = MagicMock(parallel_config=parallel)
    config.attention_config.hisparse_config = None
    config.kv_transfer_config.kv_connector_extra_config = {}
    return config


class OwnLauncher(ExecutorWithExternalLauncher):
    pass


class OwnRay(MultiprocExecutor):
    uses_ray = True


REFUSED = [
    (engine_with("external_launcher"), "external_launcher with 2 ranks"),
    (engine_with(OwnLauncher), "external_launcher with 2 ranks"),
    (engine_with("ray"), "backend ray"),
    (engine_with(OwnRay), "backend ray"),
    (engine_with("ray", world_size=1), "backend ray"),
    (engine_with("mp", nodes=2), "--nnodes 2"),
]


@pytest.mark.parametrize(("engine", "named"), REFUSED)
def test_an_executor_that_cannot_share_a_pool_is_refused_by_name(engine: Any, named: str):
    """When vLLM asks for the layout, before it allocates KV cache; and where it does not ask."""
    with pytest.raises(ConfigError, match=named):
        KVFerryConnector.get_required_kvcache_layout(engine)
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(ConfigError, match=named):
            KVFerryConnector(engine, role, MagicMock())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "engine",
    [
        engine_with("mp"), engine_with("uni", 1), engine_with("external_launcher", 1),
        engine_with(OwnLauncher, 1), engine_with(MultiprocExecutor), engine_with("my.Executor"),
    ],
)  # fmt: skip
def test_an_executor_that_can_share_a_pool_or_is_not_known_is_not_refused(engine: Any):
    assert KVFerryConnector.get_required_kvcache_layout(engine) == "LBHNC"


@pytest.mark.parametrize("backend", [UniProcExecutor, OwnLauncher, "uni", "external_launcher"])
def test_a_worker_in_the_engine_cores_process_is_known_by_its_executor(backend: object):
    assert engine_core_pid(in_worker=True, executor_backend=backend) == os.getpid()
