"""LMCache's own server, in a process of its own, and its own client for it (its `lm://`)."""

import asyncio
import importlib
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.ways import Rows
from examples.processes import LoggedProcess, StartFailed, free_port

_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
"""It would report its use to its authors over the network."""


class _ServerProcess(LoggedProcess):
    name = "lmcache-server"

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        super().__init__(command, {**_QUIET, "LMCACHE_LOG_LEVEL": "INFO"})

    def is_ready(self) -> bool:
        return "Server started at" in self.log.read_text(errors="replace")


class _RowsAsItsPool:
    """What its client asks of LMCache's CPU pool: a place for the block that comes next.

    It gets the row itself, so that a read has no copy more than ours.
    """

    def __init__(self, rows: list[Any]) -> None:
        whole, dtype = rows[0].get_shape(), rows[0].get_dtype()
        self.config = SimpleNamespace(extra_config={"save_chunk_meta": False}, use_layerwise=False)
        self.metadata = SimpleNamespace(
            use_mla=False, chunk_size=1, get_shapes=lambda: [whole], get_dtypes=lambda: [dtype],
            get_num_groups=lambda: 1,
        )  # fmt: skip
        self.next_place = 0
        self._rows = rows

    def allocate(self, shape: Any, *_: object) -> Any:
        row = self._rows[self.next_place]
        if shape != row.get_shape():
            raise ValueError(f"LMCache holds {[*shape]} bytes for a block of {[*row.get_shape()]}")
        return row


class LmcacheServer:
    """Blocks put and got one after another, as its client does it. A write ends when the server
    says that it has the last block: it answers no put, but its connection is served in order."""

    def __init__(self, rows: Rows) -> None:
        """Raises `Skipped` with what its import, or its server, said."""
        os.environ.update(_QUIET)
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        try:
            self._torch: Any = importlib.import_module("torch")
            self._memory: Any = importlib.import_module("lmcache.v1.memory_management")
            client: Any = importlib.import_module(
                "lmcache.v1.storage_backend.connector.lm_connector"
            )
            key: Any = importlib.import_module("lmcache.utils").CacheEngineKey
        except Exception as error:  # a package built for CUDA raises whatever its loader does
            raise Skipped(f"cannot import lmcache: {error}") from None
        self._keys = [
            key("six-systems", 1, 0, place, self._torch.uint8) for place in range(len(rows))
        ]
        self._source = [self._object(row) for row in rows.source_pool]
        self._nothing = self._object(np.zeros(1, np.uint8))
        self._pool = _RowsAsItsPool([self._object(row) for row in rows.target_pool])
        self._loop = asyncio.new_event_loop()
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            try:
                server = stack.enter_context(_ServerProcess())
            except StartFailed as error:
                last_words = str(error).strip().splitlines()[-1]
                raise Skipped(f"its server does not start: {last_words}") from None
            self._client = client.LMCServerConnector(
                "127.0.0.1", server.port, self._loop, self._pool
            )
            stack.callback(lambda: self._loop.run_until_complete(self._client.close()))
            self._stack = stack.pop_all()

    def clear(self) -> None:
        """It has no command to forget a block: a single byte takes the place of each."""
        self._loop.run_until_complete(self._put([self._nothing] * len(self._keys)))

    def write(self) -> None:
        self._loop.run_until_complete(self._put(self._source))

    def read(self) -> None:
        self._loop.run_until_complete(self._get())

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._stack.close()

    async def _put(self, contents: list[Any]) -> None:
        for key, content in zip(self._keys, contents, strict=True):
            await self._client.put(key, content)
        if not await self._client.exists(self._keys[-1]):
            raise OSError("LMCache's server does not have the last block")

    async def _get(self) -> None:
        for place, key in enumerate(self._keys):
            self._pool.next_place = place
            if await self._client.get(key) is None:
                raise OSError(f"LMCache's server does not have block {place}")

    def _object(self, row: NDArray[np.uint8]) -> Any:
        """Its memory object, which lies in `row`."""
        data = self._torch.from_numpy(row)
        metadata = self._memory.MemoryObjMetadata(
            data.shape, data.dtype, row.ctypes.data, row.nbytes, 1,
            fmt=self._memory.MemoryFormat.KV_2LTD,
        )  # fmt: skip
        return self._memory.TensorMemoryObj(data, metadata, None)
