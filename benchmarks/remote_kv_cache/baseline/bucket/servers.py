"""Packs to an object store and back through servers."""

import time
from collections.abc import Sequence

from benchmarks.harness.machine import process_cpu_s
from benchmarks.remote_kv_cache.baseline.bucket.bucket_tier import bucket_processes_cpu_s
from benchmarks.remote_kv_cache.baseline.bucket.packs import NAMESPACE, Load
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect, server_for
from benchmarks.remote_kv_cache.work.object_stores import Store
from examples.processes import RemoteServer
from remote_server.client import RemoteClient

_POLL_S = 0.002


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
