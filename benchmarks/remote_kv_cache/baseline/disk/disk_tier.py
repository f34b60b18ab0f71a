"""Blocks to a disk and back by the disk tier."""

import threading
from pathlib import Path

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.disk.ways import Blocks
from remote_server import protocol
from remote_server.store.disk.files import Folder
from remote_server.store.disk.layout import slot_bytes_for
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.io_threads import ThreadPool
from remote_server.store.pages import PAGE
from remote_server.store.tier import Offered, Written
from remote_server.values import MiB

# Bytes of blocks requested at once, as in a client's window.
WINDOW_BYTES = 32 * MiB

NAMESPACE = "benchmark"


class Tier:
    """The disk tier, driven as by a server. It is full: each round evicts the last one's blocks."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        slots = -(-num_blocks // 4)
        segment_bytes = PAGE + slots * slot_bytes_for(block_bytes)
        self._event = threading.Event()
        self._files = Folder(folder)
        self._pool = ThreadPool(self._event.set)
        budget = OVERHEAD_BYTES + 4 * segment_bytes
        self._tier = DiskTier(self._files, [], self._pool, DiskSettings(budget, segment_bytes))
        self._round = 0

    def write(self, blocks: Blocks) -> None:
        self._round += 1
        keys, done, begun = self._keys(len(blocks)), 0, 0
        sums: list[int] = []
        block_bytes = blocks.shape[1]
        window = max(1, WINDOW_BYTES // block_bytes // 2)

        def on_written(results: list[Written]) -> None:
            nonlocal done
            done += len(results)
            if set(results) != {Written.OK}:
                raise RuntimeError(f"not all blocks were written: {results}")

        while done < len(blocks):
            while begun < len(blocks):
                part = slice(begun, begun + window)
                # As in a server, which hashes a block while those before it are written.
                hashed = slice(len(sums), part.stop)
                here = [memoryview(block) for block in blocks[hashed]]
                sums += protocol.checksums(NAMESPACE, keys[hashed], here)
                lengths = [block_bytes] * len(keys[part])
                begins = self._tier.begin_puts(
                    Offered(NAMESPACE, keys[part], lengths, sums[part]), block_bytes
                )
                if not begins:
                    break
                views = [memoryview(blocks[begun + place]) for place in range(len(begins))]
                self._tier.write(begins, views, on_written)
                begun += len(begins)
            self._wait()

    def make_cold(self) -> None:
        """With O_DIRECT no block is in the page cache. Without it there is no cold read."""
        if not self._files.direct:
            raise Skipped("the file system does not offer O_DIRECT")

    def read(self, blocks: Blocks) -> None:
        keys, done, begun = self._keys(len(blocks)), 0, 0
        window = max(1, WINDOW_BYTES // blocks.shape[1] // 2)

        def on_read(results: list[bool]) -> None:
            nonlocal done
            done += len(results)
            if not all(results):
                raise RuntimeError("not all blocks could be read")

        while done < len(blocks):
            while begun < len(blocks) and begun - done < 2 * window:
                found = [
                    block
                    for block in self._tier.pin_all(NAMESPACE, keys[begun : begun + window])
                    if block is not None
                ]
                if not found:
                    raise RuntimeError("blocks are missing")
                views = [memoryview(blocks[begun + place]) for place in range(len(found))]
                self._tier.read(found, views, on_read)
                begun += len(found)
            self._wait()

    def close(self) -> None:
        self._pool.stop()
        self._tier.close()

    def _keys(self, count: int) -> list[bytes]:
        return [b"%d-%d" % (self._round, number) for number in range(count)]

    def _wait(self) -> None:
        self._event.wait()
        self._event.clear()
        self._tier.finish_jobs()
