"""Our offloading spec as the scheduler and the workers of one engine have it, without a model."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kv_connector.spec import POOL_NAME_KEY, FerrySpec

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
