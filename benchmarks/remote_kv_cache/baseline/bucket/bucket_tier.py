"""Packs to an object store and back by the bucket tier."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.machine import process_cpu_s
from benchmarks.remote_kv_cache.baseline.bucket.packs import NAMESPACE, Load
from benchmarks.remote_kv_cache.work.object_stores import Store
from remote_server import protocol
from remote_server.store.bucket.objects import store_calls
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.process_objects import ProcessObjects
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.pack import BucketBlock
from remote_server.store.bucket.tier import BucketSettings, BucketTier
from remote_server.store.io_threads import ThreadPool, Threads
from remote_server.store.tier import Offered, Written


def bucket_processes_cpu_s(pid: int) -> float:
    """CPU seconds of the processes in which `pid` has the object store called."""
    children = [
        int(child)
        for listed in Path(f"/proc/{pid}/task").glob("*/children")
        for child in listed.read_text().split()
    ]
    return sum(
        process_cpu_s(child)
        for child in children
        if store_calls.__name__.encode() in Path(f"/proc/{child}/cmdline").read_bytes()
    )


class Tier:
    """The bucket tier, driven as by a server: rows with checksums, in packs."""

    def __init__(self, store: Store, load: Load, threads: int) -> None:
        self._store, self._load = store, load
        self._objects = ProcessObjects(f"{store.url}/tier", threads)
        self._event = threading.Event()
        self._threads = Threads(threads, "bucket")
        self._pool = ThreadPool(self._event.set, threads=self._threads)
        self._tier = self._new_tier()
        self._round = 0

    def _new_tier(self) -> BucketTier:
        largest = BucketSettings().largest._replace(pack_bytes=self._load.pack_bytes)
        return BucketTier(
            BucketContext(self._objects, self._pool, self._pool), BucketSettings(largest)
        )

    def clear(self) -> None:
        self._tier.clear(None)
        self._drain()
        self._round += 1
        self._keys = self._load.keys(self._round)
        self._sums = protocol.checksums(NAMESPACE, self._keys, self._load.rows)

    def write(self) -> None:
        keys, rows, done, begun = self._keys, self._load.rows, 0, 0

        def on_written(results: Sequence[Written]) -> None:
            nonlocal done
            done += len(results)
            if set(results) != {Written.OK}:
                raise RuntimeError(f"not all rows were written: {set(results)}")

        while done < len(keys):
            while begun < len(keys):
                part = slice(begun, begun + self._load.rows_per_pack)
                lengths = [self._load.row_bytes] * self._load.rows_per_pack
                if self._tier.room_for(lengths) < len(lengths):
                    break
                chain = [self._load.chain[0].part(begun, len(lengths))]
                begins = self._tier.begin_puts(
                    Offered(NAMESPACE, keys[part], lengths, self._sums[part], chain),
                    self._load.row_bytes,
                )
                if len(begins) < len(lengths):
                    raise RuntimeError("the tier leaves the store alone: calls have failed")
                self._tier.write(begins, rows[part], on_written)
                begun += len(begins)
            self._wait()

    def make_cold(self) -> None:
        """A new tier, which has read the headers."""
        self._store.drop_from_cache()
        self._tier = self._new_tier()
        groups = packs_in(
            self._keys, self._load.chain, self._load.row_bytes, self._load.pack_bytes
        )  # fmt: skip
        self._tier.expect(NAMESPACE, [*groups])
        self._drain()
        self._load.poison()

    def read(self) -> None:
        done = 0
        found = [row for row in self._tier.pin_all(NAMESPACE, self._keys) if row is not None]
        if len(found) < len(self._keys):
            raise RuntimeError("rows are missing")

        def on_read(results: Sequence[bool]) -> None:
            nonlocal done
            done += len(results)
            if not all(results):
                raise RuntimeError("not all rows could be read")

        for begin in range(0, len(found), self._load.rows_per_pack):
            part = slice(begin, begin + self._load.rows_per_pack)
            rows: list[BucketBlock] = found[part]
            self._tier.read(rows, [memoryview(row) for row in self._load.target[part]], on_read)
        while done < len(found):
            self._wait()

    def verify(self) -> None:
        self._load.verify()

    def cpu_s(self) -> float:
        return time.process_time() + bucket_processes_cpu_s(os.getpid())

    def close(self) -> None:
        self._tier.clear(None)
        self._drain()
        self._pool.stop()
        self._threads.stop()
        self._objects.close()

    def _wait(self) -> None:
        self._event.wait()
        self._event.clear()
        self._tier.finish_jobs()

    def _drain(self) -> None:
        self._tier.finish_jobs()
        while self._tier.busy:
            self._wait()
