"""The offloading spec: vLLM's tiering, on the CPU platform too, in a pool file of its own."""

from contextlib import suppress
from pathlib import Path
from typing import cast

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv_connector.canary_stage import Part, Stage
from kv_connector.clearing_worker import ClearingWorker
from kv_connector.group_bytes import (
    Pieces,
    RestOfRows,
    owned_by_groups,
    pages_of,
    places_of_rows,
)
from kv_connector.host_worker import HostWorker
from kv_connector.pool_file import offer_sealed_file, pool_path
from kv_connector.pool_rows import owned_bytes
from remote_server.errors import ConfigError

POOL_NAME_KEY = "kvferry_pool_name"
"""Where the connector hands this spec the name of the engine's pool file."""


class FerrySpec(TieringOffloadingSpec):
    """CPU pool as primary tier, remote tier below it, workers for CUDA and CPU platforms.

    What differs from vLLM's spec: the pool file's name (see `pool_file`), its removal as soon
    as everyone has mapped it, `HostWorker` where there is no GPU, and rows in which nothing is
    left of what they held before (see `group_bytes`). Everything else, the index of the pool and
    its eviction included, is vLLM's.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._worker: OffloadingWorker | None = None
        self._engine_id: str = config.extra_config.get(POOL_NAME_KEY, config.engine_id)
        if config.canonical_layout and current_platform.is_cpu():
            raise ConfigError(
                "canonical_layout=True: the host worker for the CPU platform copies whole pages "
                "and cannot rearrange them; remove it"
            )
        if self.num_chunks < 1:
            raise ConfigError(
                f"cpu_pool={self.extra_config['cpu_bytes_to_use']} bytes holds no block: one is "
                f"{self.kv_bytes_per_chunk} bytes here; 1 GiB or more is sensible"
            )
        self._pool_file: int | None = None
        self._kv_caches: CanonicalKVCaches | None = None
        self.packed: Pieces | None = None
        """What each group owns of a packed block; to be set before a worker is made."""
        self._region: SharedOffloadRegion | None = None

    def _offer_pool_file(self) -> None:
        """Before anyone of this engine opens the pool's file; the first one makes it."""
        if self._pool_file is None:
            pool_bytes = self.num_chunks * self.kv_bytes_per_chunk
            self._pool_file = offer_sealed_file(self._engine_id, pool_bytes)

    def get_manager(self) -> OffloadingManager:
        """As upstream. vLLM starts the workers first, so the file has usually been mapped by all
        when the scheduler opens it here, and its name can go at once."""
        workers_came_first = pool_path(self._engine_id).exists()
        self._offer_pool_file()
        manager = super().get_manager()
        if workers_came_first:
            self.forget_pool_name_of(manager)
        return cast(OffloadingManager, manager)

    @staticmethod
    def forget_pool_name_of(manager: TieringOffloadingManager) -> None:
        """Remove the pool file's name; right once scheduler and workers have mapped the file."""
        with suppress(OSError):  # gone already; a name too many is swept by the next engine
            Path(manager.primary_tier._mmap_region.mmap_path).unlink()

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's worker on a GPU, ours on the CPU platform."""
        self._offer_pool_file()
        self._kv_caches = kv_caches
        if not current_platform.is_cpu():
            worker = super().create_worker(kv_caches)
            self._region = worker._mmap_region
            rest = self._rest_of_rows(kv_caches)
            if rest:
                worker = ClearingWorker(worker, rest, self.blocks_per_chunk)
            return cast(OffloadingWorker, worker)
        self._region = region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region, self.blocks_per_chunk, self.packed)

    def _rest_of_rows(self, kv_caches: CanonicalKVCaches) -> RestOfRows:
        """Of the rows that vLLM's worker fills."""
        canonical = self.config.canonical_layout
        assert self._region is not None
        pool = self._region.base_tensor.numpy().reshape(self.num_chunks, self.kv_bytes_per_chunk)
        pages = pages_of(kv_caches, canonical=canonical)
        places = places_of_rows(
            pool[:, 0 if canonical else self._own_start :], pages, self.blocks_per_chunk
        )
        return RestOfRows(self.packed or owned_by_groups(kv_caches, canonical=canonical), places)

    @property
    def _own_start(self) -> int:
        """Where in a row this worker's part begins."""
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        return int(rank * self.cpu_page_size_per_worker)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """As upstream, without its refusal of the CPU platform."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def canary_stage(self) -> Stage:
        """What this worker's start-up canary may borrow, before anything else uses it.

        Raises `ValueError` where there is nothing to be flown, with the reason.
        """
        if self._worker is None or self._region is None or self._kv_caches is None:
            raise ValueError("this worker has no pool")
        parallel = self.config.parallel
        if self.config.canonical_layout:
            raise ValueError("with canonical_layout no worker has a part of a row to itself")
        part = Part(
            pool=memoryview(self._region.base_tensor.numpy()).cast("B"),
            fd=self._region.fd,
            num_rows=self.num_chunks,
            stride=self.kv_bytes_per_chunk,
            start=self._own_start,
            num_bytes=self.cpu_page_size_per_worker,
            block_bytes=owned_bytes(self, self.kv_bytes_per_chunk),
        )
        owned = self.packed or owned_by_groups(self._kv_caches)
        # Rank 0 alone stores where all share one copy of a row, but each of them loads it.
        turn, turns = (parallel.rank, parallel.world_size) if self.replicated_layout else (0, 1)
        return Stage(
            self._worker,
            self._kv_caches,
            part,
            self.blocks_per_chunk,
            owned,
            turn=turn,
            turns=turns,
        )
