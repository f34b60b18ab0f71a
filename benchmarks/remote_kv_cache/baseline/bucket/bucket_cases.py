"""Packs to an object store and back: by bare calls, by the bucket tier, and through servers.

All ways move objects of the same size from and to the same memory, with as many calls at a time.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.harness.machine import process_cpu_s
from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.baseline.disk import disk_cases
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect, server_for
from benchmarks.remote_kv_cache.work.object_stores import Store
from examples.processes import RemoteServer
from remote_server import protocol
from remote_server.client import RemoteClient
from remote_server.errors import ConfigError
from remote_server.protocol import Stretch
from remote_server.store.bucket import layout, store_calls
from remote_server.store.bucket.index import BucketBlock, header_of
from remote_server.store.bucket.objects import open_store
from remote_server.store.bucket.packs import MAX_PACK_TOKENS, packs_in, rows_per_pack
from remote_server.store.bucket.process_objects import ProcessObjects
from remote_server.store.bucket.tier import BucketTier
from remote_server.store.disk.layout import PAGE
from remote_server.store.disk.pool import ThreadPool, Threads
from remote_server.store.tier import Written

NAMESPACE = "benchmark"

_POLL_S = 0.002


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


class Load:
    """The packs to be moved, in memory as the bucket has them: a header, then its rows."""

    def __init__(self, num_bytes: int, row_bytes: int, pack_bytes: int) -> None:
        """Rows of `row_bytes`, of which `pack_bytes` are 1,024 tokens. Raises `ConfigError`."""
        self.row_bytes, self.pack_bytes = row_bytes, pack_bytes
        self._row_tokens = MAX_PACK_TOKENS * row_bytes // pack_bytes
        self.rows_per_pack = rows_per_pack(max(1, self._row_tokens), row_bytes, pack_bytes)
        if row_bytes % PAGE or self.rows_per_pack * row_bytes != pack_bytes:
            raise ConfigError(
                f"row: a pack is a power of two of rows, and a row is whole pages of {PAGE} bytes"
            )
        self.num_packs = max(1, num_bytes // pack_bytes)
        self.num_bytes = self.num_packs * pack_bytes
        num_rows = self.num_packs * self.rows_per_pack
        self.chain = [Stretch(num_rows, 0, 0, self._row_tokens)]
        keys, ones = self.keys(0)[: self.rows_per_pack], [1] * self.rows_per_pack
        fields = [self.chain[0].part(place, 1) for place in range(self.rows_per_pack)]
        self.header_bytes = len(
            layout.encode_header(header_of(NAMESPACE, row_bytes, keys, ones, ones, fields))
        )
        self.target = disk_cases.aligned(num_rows, row_bytes)
        self.objects = disk_cases.aligned(self.num_packs, self.header_bytes + pack_bytes)
        self._bodies = self.objects[:, self.header_bytes :]
        blocks.fill(self.target)
        self._bodies[:] = self.target.reshape(self.num_packs, -1)
        self.rows = [
            memoryview(row)
            for body in self._bodies for row in body.reshape(self.rows_per_pack, row_bytes)
        ]  # fmt: skip

    def keys(self, number: int) -> list[bytes]:
        """The keys of all rows in round `number`, as long as vLLM's."""
        count = self.num_packs * self.rows_per_pack
        return [b"round %06d, row %06d %s" % (number, row, bytes(11)) for row in range(count)]

    def poison(self) -> None:
        blocks.poison(self.target)

    def verify(self) -> None:
        """Raises `WrongBytes` unless the target holds all rows."""
        if not np.array_equal(self.target.reshape(self.num_packs, -1), self._bodies):
            raise WrongBytes("the rows that arrived are not those that were written")


class Way(Protocol):
    """One way to keep the packs."""

    def clear(self) -> None:
        """Remove what the last `write` has written."""

    def write(self) -> None: ...

    def make_cold(self) -> None:
        """No part of what was written is in this way's memory; what it needs to find it is."""

    def read(self) -> None: ...

    def verify(self) -> None:
        """Raises `WrongBytes` unless `read` got the bytes that were written."""

    def cpu_s(self) -> float:
        """CPU time of all its processes, but for an emulator's."""

    def close(self) -> None: ...


class Bare:
    """One call of obstore for each object, from memory that holds it whole. What is read is
    dropped."""

    def __init__(self, store: Store, load: Load, threads: int) -> None:
        self._client = open_store(f"{store.url}/bare")
        self._store, self._load = store, load
        self._threads = ThreadPoolExecutor(threads)
        self._round = 0

    def clear(self) -> None:
        import obstore

        for chunk in obstore.list(self._client):
            obstore.delete(self._client, [each["path"] for each in chunk])

    def write(self) -> None:
        self._round += 1
        list(self._threads.map(self._put, range(self._load.num_packs)))

    def make_cold(self) -> None:
        self._store.drop_from_cache()

    def read(self) -> None:
        list(self._threads.map(self._get, range(self._load.num_packs)))

    def verify(self) -> None:
        for number in range(self._load.num_packs):
            body = self._load.objects[number, self._load.header_bytes :]
            if not np.array_equal(np.frombuffer(self._get(number), np.uint8), body):
                raise WrongBytes(f"object {number} came back with other bytes")

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.clear()
        self._threads.shutdown()

    def _put(self, number: int) -> None:
        import obstore

        whole = memoryview(self._load.objects[number])
        obstore.put(self._client, self._name(number), whole, mode="create", use_multipart=False)

    def _get(self, number: int) -> memoryview:
        import obstore

        begin, num_bytes = self._load.header_bytes, self._load.pack_bytes
        body = memoryview(
            obstore.get_range(self._client, self._name(number), start=begin, length=num_bytes)
        )
        if body.nbytes != num_bytes:
            raise WrongBytes(f"{body.nbytes} of {num_bytes} bytes of object {number}")
        return body

    def _name(self, number: int) -> str:
        return f"{number:02x}/{self._round}-{number}"


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
        return BucketTier(self._objects, self._pool, pack_bytes=self._load.pack_bytes)

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
                    NAMESPACE, keys[part], self._load.row_bytes, lengths, self._sums[part], chain
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


class ThroughServers:
    """One server writes all packs, and after each read another one is started, which reads them
    from the bucket alone."""

    def __init__(self, store: Store, load: Load) -> None:
        self._store, self._load = store, load
        self._arguments = [
            "--bucket", f"{store.url}/servers", "--pack", str(load.pack_bytes),
            "--bucket-admit", "all", "--bucket-write-rate", "0",
        ]  # fmt: skip
        self._round = 0
        self._written = 0
        self._writer = _Served(self._server().start(), load)
        self._reader: _Served | None = None

    def _server(self) -> RemoteServer:
        return server_for(self._load.num_bytes, self._load.row_bytes, self._arguments)

    def clear(self) -> None:
        self._writer.client.clear(NAMESPACE, timeout_s=PATIENCE_S).result()
        self._round += 1

    def write(self) -> None:
        """Until the last pack is in the bucket."""
        client, keys = self._writer.client, self._load.keys(self._round)
        client.lookup(NAMESPACE, keys, chain=self._load.chain, timeout_s=PATIENCE_S).result()
        put = client.put(
            NAMESPACE, keys, self._load.rows, chain=self._load.chain, timeout_s=PATIENCE_S
        ).result()
        if put.created != len(keys):
            raise RuntimeError(f"{put.created} of {len(keys)} rows were put: {put.error}")
        self._written += len(keys)
        deadline = time.monotonic() + PATIENCE_S
        while self._writer.counter("bucket_written") < self._written:
            if time.monotonic() > deadline:
                raise RuntimeError("not all rows came into the bucket")
            time.sleep(_POLL_S)

    def make_cold(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._store.drop_from_cache()
        self._reader = _Served(self._server().start(), self._load)
        self._reader.find(self._load.keys(self._round))
        self._load.poison()

    def read(self) -> None:
        assert self._reader is not None
        keys = self._load.keys(self._round)
        rows = [memoryview(row) for row in self._load.target]
        got = self._reader.client.get(
            NAMESPACE, keys, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
        ).result()
        if len(got.landed) != len(keys):
            raise RuntimeError(f"{len(got.landed)} of {len(keys)} rows came: {got.error}")

    def verify(self) -> None:
        self._load.verify()

    def cpu_s(self) -> float:
        servers = [self._writer, *([] if self._reader is None else [self._reader])]
        return time.process_time() + sum(served.cpu_s() for served in servers)

    def close(self) -> None:
        self.clear()
        self._writer.close()
        if self._reader is not None:
            self._reader.close()


class _Served:
    """A running server and a client of it."""

    def __init__(self, server: RemoteServer, load: Load) -> None:
        self._server, self._load = server, load
        self.client: RemoteClient = connect(server.endpoint, NAMESPACE, load.row_bytes)

    def counter(self, name: str) -> int:
        return self.client.stats(timeout_s=PATIENCE_S).result().counters[name]

    def find(self, keys: Sequence[bytes]) -> None:
        """Look up until all are readable."""
        deadline = time.monotonic() + PATIENCE_S
        found = 0
        while found < len(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{found} of {len(keys)} rows are found")
            time.sleep(_POLL_S)
            found = (
                self.client.lookup(NAMESPACE, keys, chain=self._load.chain, timeout_s=PATIENCE_S)
                .result()
                .prefix
            )

    def cpu_s(self) -> float:
        pid = self._server.pid
        return process_cpu_s(pid) + bucket_processes_cpu_s(pid)

    def close(self) -> None:
        self.client.close()
        self._server.stop()
