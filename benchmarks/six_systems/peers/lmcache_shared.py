"""LMCache's multiprocess server, and its engine-driven way through its shared memory."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S
from benchmarks.six_systems.peers.lmcache_library import environment, load
from benchmarks.six_systems.peers.lmcache_server import start
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import LoggedProcess, free_port
from remote_server.values import GiB, MiB

_CHUNK_TOKENS = 16
_MODEL = "six-systems"


class _ServerProcess(LoggedProcess):
    name = "lmcache-multiprocess-server"
    start_timeout_s = 120.0

    def __init__(self, sizes: Sizes) -> None:
        self.port = free_port()
        memory = sizes.num_bytes * 5 // 4 + 64 * MiB  # it evicts above 80 %
        super().__init__(
            [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1",
             "--port", str(self.port), "--chunk-size", str(_CHUNK_TOKENS),
             "--supported-transfer-mode", "engine_driven", "--shm-name", f"kvferry-{self.port}",
             "--l1-size-gb", f"{memory / GiB * 1.25:.3f}", "--no-l1-use-lazy",
             "--eviction-policy", "LRU", "--disable-observability"],
            environment(),
        )  # fmt: skip

    def is_ready(self) -> bool:
        return "LMCache cache server is running..." in self.printed()


@contextmanager
def serve(sizes: Sizes) -> Iterator[Host]:
    """Raises `Skipped` where LMCache cannot be imported, or its server does not start."""
    if sizes.block_bytes % _CHUNK_TOKENS:
        raise Skipped(f"a block of {_CHUNK_TOKENS} tokens has whole bytes for each")
    load("lmcache.v1.multiprocess.transfer_context.base")
    server = start(_ServerProcess(sizes))
    try:
        yield Host(server.port)
    finally:
        server.stop()


class LmcacheShared:
    """Stores and retrieves as an engine without a GPU: the server reserves slots in its shared
    memory, the client copies, and the server publishes. All blocks are one request."""

    def __init__(self, host: Host, share: Share) -> None:
        """Raises `Skipped` where the server offers no shared memory."""
        torch = load("torch")
        types = load("lmcache.v1.multiprocess.custom_types")
        layout = load("lmcache.v1.distributed.api").MemoryLayoutDesc
        base = load("lmcache.v1.multiprocess.transfer_context.base")
        factory = load("lmcache.v1.multiprocess.transport.factory").RequestClientFactory
        self._key_type = types.IPCCacheServerKey
        self._rows = share.rows
        self._num_requests = 0
        self._instance = os.getpid()
        first = share.first * _CHUNK_TOKENS
        self._tokens = tuple(range(first, first + len(share.rows) * _CHUNK_TOKENS))
        width = share.rows.block_bytes // _CHUNK_TOKENS
        self._client = factory.create(f"tcp://127.0.0.1:{host.address}")
        registered = self._client.register_kv_cache_engine_driven_context(
            types.RegisterEngineDrivenContextPayload(
                instance_id=self._instance, model_name=_MODEL, world_size=1,
                block_size=_CHUNK_TOKENS, num_layers=1, hidden_dim_size=width, dtype_str="uint8",
                use_mla=True, num_physical_slots=_CHUNK_TOKENS,
            )
        ).result(timeout=PATIENCE_S)  # fmt: skip
        shape = torch.Size([1, _CHUNK_TOKENS, width])
        self._context = base.create_engine_driven_context(
            base.EngineDrivenContextMetadata(
                layout(shapes=[shape], dtypes=[torch.uint8]), _CHUNK_TOKENS, use_mla=True
            ),
            self._client, PATIENCE_S, registered.shm_name, registered.pool_size,
        )  # fmt: skip
        if "Shm" not in type(self._context).__name__:
            self.close()
            raise Skipped("its server offers no shared memory, see its log")

    def clear(self) -> None:
        """Clear the blocks of all its clients: there is no command for those of one."""
        self._client.clear(True).result(timeout=PATIENCE_S)

    def write(self) -> None:
        key = self._new_request(num_readers=0)
        slots = self._context.prepare_store(key, self._instance)
        if slots is None or len(slots[1]) != len(self._rows):
            raise OSError("LMCache's server reserved no slot for some blocks")
        for slot, place in zip(*slots, strict=True):
            np.copyto(slot.view(-1).numpy(), self._rows.source_pool[place])
        if not self._context.commit_store(key, self._instance, []):
            raise OSError("LMCache's server did not take the blocks")
        self._end(key)

    def read(self) -> None:
        key = self._new_request(num_readers=1)
        lookup = self._new_request(num_readers=1, of=key)
        self._client.lookup(lookup, 1).result(timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while self._client.query_prefetch_status(key.request_id).result(timeout=PATIENCE_S) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("a lookup of LMCache's server did not end")
        slots = self._context.prepare_retrieve(key, self._instance)
        if slots is None or len(slots) != len(self._rows):
            raise OSError("LMCache's server does not have all blocks")
        for slot, row in zip(slots, self._rows.target_pool, strict=True):
            np.copyto(row, slot.view(-1).numpy())
        if not self._context.commit_retrieve(key, self._instance):
            raise OSError("LMCache's server did not end a read")
        self._end(key)

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._context.close()
        self._client.close()

    def _new_request(self, *, num_readers: int, of: Any = None) -> Any:
        """A key for all blocks. With `of`, a request: the key of its lookup, without a worker."""
        if of is None:
            self._num_requests += 1
        request = f"{self._instance}-{self._num_requests}"
        return self._key_type(
            _MODEL, 1, 0 if of is None else None, self._tokens, 0, len(self._tokens), request,
            num_kv_readers=num_readers,
        )  # fmt: skip

    def _end(self, key: Any) -> None:
        self._client.end_session(key.request_id).result(timeout=PATIENCE_S)
