"""Packs to an object store and back by bare calls of its client."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.baseline.bucket.packs import Load
from benchmarks.remote_kv_cache.work.object_stores import Store
from remote_server.store.bucket.objects.client import open_store


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
