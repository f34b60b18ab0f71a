"""Our connector with a fault in the copies of one rank, for the engine of a test."""

from typing import Any

from kv_connector.connector import KVFerryConnector
from kv_connector.pool.copies import Region

BAD_RANK = 1


class OneBadRank(KVFerryConnector):
    """Loads of rank 1 copy nothing; its stores, and all of the other ranks, are as ever."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._engine_config.parallel_config.rank == BAD_RANK:
            copy = Region.copy
            Region.copy = (  # type: ignore[method-assign]
                lambda self, run, *, store: copy(self, run, store=True) if store else 0
            )
        super().register_kv_caches(kv_caches)
