"""LMCache's own local disk backend: its threads, a file for each block."""

import asyncio
import threading
from pathlib import Path

from benchmarks.harness.files import drop_from_cache
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S
from benchmarks.six_systems.peers.lmcache_library import Library, RowsAsItsPool, load
from benchmarks.six_systems.systems import Host, Share
from remote_server.values import GiB

# `LocalDiskBackend.remove` does not subtract from what the backend has taken of its limit (0.5.6),
# so the blocks of all rounds must fit, though each round removes them.
ROUNDS = 100


class LmcacheDisk:
    """Its `LocalDiskBackend` with default settings: the page cache, four threads.

    A write ends when its callback has reported every block. There is no engine around it: it gets
    a configuration, and rows as its pool.
    """

    def __init__(self, _: Host, share: Share) -> None:
        """Raises `Skipped` where LMCache cannot be imported."""
        backend = load("lmcache.v1.storage_backend.local_disk_backend")
        config = load("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=str(share.folder),
            max_local_disk_size=ROUNDS * len(share.rows) * share.rows.block_bytes / GiB,
        )  # fmt: skip
        self._library = Library(share)
        self._folder = share.folder
        self._pool = RowsAsItsPool(self._library.target)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._backend = backend.LocalDiskBackend(config, self._loop, self._pool, "cpu")

    def clear(self) -> None:
        for key in self._library.keys:
            self._backend.remove(key)

    def write(self) -> None:
        left, done = len(self._library.keys), threading.Event()
        lock = threading.Lock()

        def on_complete(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    done.set()

        self._backend.batched_submit_put_task(
            self._library.keys, self._library.source, on_complete_callback=on_complete
        )
        if not done.wait(PATIENCE_S):
            raise TimeoutError(f"LMCache's disk backend left {left} blocks unwritten")

    def read(self) -> None:
        self._pool.next_place = 0
        found = self._backend.batched_get_blocking(self._library.keys)
        if missing := sum(block is None for block in found):
            raise OSError(f"LMCache's disk backend does not have {missing} blocks")

    def make_cold(self) -> None:
        for path in self._files():
            drop_from_cache(path)

    def close(self) -> None:
        self._backend.disk_worker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.is_file()]
