"""The offloading spec: vLLM's tiering, on the CPU platform too, in a pool file of its own."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv_connector.identity.self_test import Fixture, Part
from kv_connector.identity.worker_reports import WorkerReport
from kv_connector.pool.layout import (
    BytesUnknown,
    Pieces,
    RestOfRows,
    owned_by_groups,
    owned_in_packed_blocks,
    pages_of,
    places_of_rows,
)
from kv_connector.pool.pool_file import check_pool_is_there, offer_sealed_file, pool_path
from kv_connector.pool.rows import owned_bytes
from kv_connector.pool.sharing import Place, PoolFile, leave_mark, pool_file_of, take_marks
from kv_connector.pool.worker import ClearingWorker, HostWorker
from remote_server.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvferry")

POOL_NAME_KEY = "kvferry_pool_name"
"""Key under which the connector passes this spec the name of the engine's pool file."""


class FerrySpec(TieringOffloadingSpec):
    """CPU pool as primary tier, remote tier below it, workers for CUDA and CPU platforms.

    Differences from vLLM's spec: the pool file's name (see `pool_file`), its removal as soon as
    all processes have mapped it, `HostWorker` on the CPU platform, and rows that are cleared of
    their previous content (see `layout`). The index of the pool and its eviction are vLLM's.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._made_manager: OffloadingManager | None = None
        self._made_worker: OffloadingWorker | None = None
        self._engine_id: str = config.extra_config.get(POOL_NAME_KEY, config.engine_id)
        if config.canonical_layout and current_platform.is_cpu():
            raise ConfigError(
                "canonical_layout=True: the host worker for the CPU platform copies whole pages "
                "and cannot rearrange them; remove the setting"
            )
        if self.num_chunks < 1:
            raise ConfigError(
                f"cpu_pool={self.extra_config['cpu_bytes_to_use']} bytes holds no block: one is "
                f"{self.kv_bytes_per_chunk} bytes here; 1 GiB or more is sensible"
            )
        self._pool_file: int | None = None
        self._kv_caches: CanonicalKVCaches | None = None
        self.packed: Pieces | None = None
        """The bytes that each group owns of a packed block; set before a worker is made."""
        self._region: SharedOffloadRegion | None = None

    @property
    def _pool_bytes(self) -> int:
        return int(self.num_chunks * self.kv_bytes_per_chunk)

    def get_manager(self) -> OffloadingManager:
        """As upstream, in the pool that the workers have made. vLLM starts the scheduler when every
        worker has registered its KV cache, so all have mapped the file and written their marks,
        and its name is removed. Raises `ConfigError` for a missing mark: the engine must not
        start."""
        if self._made_manager is None:
            check_pool_is_there(self._engine_id, self._pool_bytes)
            manager = super().get_manager()
            try:
                self._take_marks(self._scheduler_mmap)
            except ConfigError:
                manager.shutdown()
                raise
            with suppress(OSError):  # the next engine removes a stale name
                pool_path(self._engine_id).unlink()
            self._made_manager = cast(OffloadingManager, manager)
        return self._made_manager

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's worker on a GPU, ours on the CPU platform. Writes its mark to the pool."""
        self._pool_file = offer_sealed_file(self._engine_id, self._pool_bytes)
        self._kv_caches = kv_caches
        if current_platform.is_cpu():
            self._region = region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker: OffloadingWorker = HostWorker(
                kv_caches, region, self.blocks_per_chunk, self.packed
            )
        else:
            worker = super().create_worker(kv_caches)
            self._region = region = worker._mmap_region
            rest = self._rest_of_rows(kv_caches)
            if rest:
                worker = ClearingWorker(worker, rest, self.blocks_per_chunk)
        leave_mark(_bytes_of(region), self._place_of(self.config.parallel.rank), self._engine_id)
        return cast(OffloadingWorker, worker)

    def _take_marks(self, region: SharedOffloadRegion) -> None:
        places = [self._place_of(rank) for rank in range(self.config.parallel.world_size)]
        take_marks(_bytes_of(region), places, self._engine_id)

    def _place_of(self, rank: int) -> Place:
        is_shared = self.replicated_layout or self.config.canonical_layout
        return Place(
            rank=rank,
            num_rows=self.num_chunks,
            stride=self.kv_bytes_per_chunk,
            start=0 if is_shared else rank * self.cpu_page_size_per_worker,
            num_bytes=self.cpu_page_size_per_worker,
        )

    @property
    def pool_file(self) -> PoolFile | None:
        """The file behind the pool that this worker has mapped; None before."""
        return None if self._region is None else pool_file_of(self._region.fd)

    @property
    def is_page_locked(self) -> bool | None:
        """Whether CUDA has page-locked the pool that this worker has mapped, in CUDA's own answer.
        vLLM registers it, and only logs a failure. None before, and on the CPU platform."""
        if self._region is None or current_platform.is_cpu():
            return None
        pool = self._region.base_tensor  # registered in parts, of which vLLM keeps all or none
        return bool(pool[:1].is_pinned() and pool[-1:].is_pinned())

    def find_packed_groups(
        self, kv_cache_config: "KVCacheConfig", kv_caches: "Mapping[str, torch.Tensor]"
    ) -> bool:
        """Whether every byte of a row is known to be its block's or cleared. If not, the engine
        does not use the server. Raises `ConfigError` for a cache that vLLM would not offload
        whole."""
        try:
            self.packed = owned_in_packed_blocks(kv_cache_config, kv_caches)
        except BytesUnknown as why:
            logger.error("rows may hold bytes of other requests: %s", why)
            return False
        return True

    def _rest_of_rows(self, kv_caches: CanonicalKVCaches) -> RestOfRows:
        """The unowned bytes of the rows that vLLM's worker fills."""
        canonical = self.config.canonical_layout
        assert self._region is not None
        pool = self._region.base_tensor.numpy().reshape(self.num_chunks, self.kv_bytes_per_chunk)
        pages = pages_of(kv_caches, canonical=canonical)
        places = places_of_rows(
            pool[:, self._place_of(self.config.parallel.rank).start :], pages, self.blocks_per_chunk
        )
        return RestOfRows(self.packed or owned_by_groups(kv_caches, canonical=canonical), places)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """As upstream, without its refusal of the CPU platform."""
        if self._made_worker is None:
            self._made_worker = self.create_worker(kv_caches)
        return self._made_worker

    def self_test_fixture(self) -> Fixture:
        """The blocks and rows that this worker's start-up canary may borrow, before any other use.

        Raises `ValueError` with the reason where no canary can run.
        """
        if self._made_worker is None or self._region is None or self._kv_caches is None:
            raise ValueError("this worker has no pool")
        parallel = self.config.parallel
        if self.config.canonical_layout:
            raise ValueError("with canonical_layout no worker has a part of a row to itself")
        place = self._place_of(parallel.rank)
        block_bytes = owned_bytes(self, self.kv_bytes_per_chunk)
        part = Part(_bytes_of(self._region), self._region.fd, place, block_bytes)
        owned = self.packed or owned_by_groups(self._kv_caches)
        # Where all share one copy of a row, only rank 0 stores it, but each rank loads it.
        turn, turns = (parallel.rank, parallel.world_size) if self.replicated_layout else (0, 1)
        blocks_per_row = self.blocks_per_chunk
        return Fixture(
            self._made_worker, self._kv_caches, part, blocks_per_row, owned, turn=turn, turns=turns
        )


def _bytes_of(region: SharedOffloadRegion) -> memoryview:
    """All of the pool, flat."""
    return memoryview(region.base_tensor.numpy()).cast("B")


def log_pageable_pool(before: WorkerReport | None, report: WorkerReport) -> None:
    """Log once that copies of this worker are of pageable memory. `report` replaces `before`."""
    was_locked = None if before is None else before.is_page_locked
    if report.is_page_locked is False and was_locked is not False:
        logger.warning(
            "the CPU pool is not page-locked in worker %d: its copies between GPU and pool are "
            "correct, and slower; the worker's log has the error code of cudaHostRegister",
            report.rank,
        )
