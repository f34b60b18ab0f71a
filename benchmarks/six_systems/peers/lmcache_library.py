"""LMCache's library: the parts shared by its server's client and its disk backend here."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.commands import peer_folder
from benchmarks.six_systems.systems import Share

PEER = "lmcache"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
"""Without this it reports its use to its authors over the network."""


def load(module: str) -> Any:
    """A module of it. Raises `Skipped` with the error of its import."""
    os.environ.update(QUIET)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    return peer_folder.package(PEER, module)


def environment(log_level: str = "INFO") -> dict[str, str]:
    """The environment of a Python process that runs a part of it."""
    return {**QUIET, "LMCACHE_LOG_LEVEL": log_level, **peer_folder.python_path(PEER)}


class Library:
    """Keys and memory objects of one client's blocks. The objects refer to the rows themselves, so
    that LMCache copies no more often than other systems here."""

    def __init__(self, share: Share) -> None:
        """Raises `Skipped` where LMCache cannot be imported."""
        self.torch = load("torch")
        self._memory = load("lmcache.v1.memory_management")
        key = load("lmcache.utils").CacheEngineKey
        self.keys = [
            key("six-systems", 1, 0, share.first + place, self.torch.uint8)
            for place in range(len(share.rows))
        ]
        self.source = [self.object_in(row) for row in share.rows.source_pool]
        self.target = [self.object_in(row) for row in share.rows.target_pool]

    def object_in(self, row: NDArray[np.uint8]) -> Any:
        """The memory object over `row`."""
        data = self.torch.from_numpy(row)
        metadata = self._memory.MemoryObjMetadata(
            data.shape, data.dtype, row.ctypes.data, row.nbytes, 1,
            fmt=self._memory.MemoryFormat.KV_2LTD,
        )  # fmt: skip
        return self._memory.TensorMemoryObj(data, metadata, None)


class RowsAsItsPool:
    """The used part of LMCache's CPU pool: `allocate`, which returns the next row."""

    def __init__(self, rows: list[Any]) -> None:
        whole, dtype = rows[0].get_shape(), rows[0].get_dtype()
        self.config = SimpleNamespace(extra_config={"save_chunk_meta": False}, use_layerwise=False)
        self.metadata = SimpleNamespace(
            use_mla=False, chunk_size=1, get_shapes=lambda: [whole], get_dtypes=lambda: [dtype],
            get_num_groups=lambda: 1,
        )  # fmt: skip
        self.next_place = 0
        self._rows = rows

    def allocate(self, shape: Any, *_: object, **__: object) -> Any:
        if self.next_place >= len(self._rows):
            raise MemoryError("LMCache allocated more objects than there are blocks")
        row = self._rows[self.next_place]
        self.next_place += 1
        if shape != row.get_shape():
            raise ValueError(f"LMCache holds {[*shape]} bytes for a block of {[*row.get_shape()]}")
        row.ref_count_up()
        return row
