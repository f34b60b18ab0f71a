"""Our server, in a process of its own, with a disk for what a restart leaves, or without."""

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.transfer import move
from benchmarks.kvbench.ways import Rows, Server
from benchmarks.remote_kv_cache.baseline.blocks import SharedPool
from benchmarks.remote_kv_cache.baseline.ferry_client import PATIENCE_S, connect
from examples.processes import RemoteServer
from remote_server.client import RemoteClient
from remote_server.sizes import MiB

NAMESPACE = "six-systems"
_WINDOW_BYTES = 64 * MiB


class Ours:
    """Put over one transport, and got back. Cold: from its disk, after it was stopped and started.

    A put ends when its blocks are readable; the disk is written behind it, past the page cache.
    Without a folder there is no disk: what others do that keep everything in memory.
    """

    def __init__(
        self,
        folder: Path | None,
        rows: Rows,
        pools: tuple[SharedPool, SharedPool],
        transport: str,
    ) -> None:
        """Raises `Skipped` where there is no such transport."""
        self._rows = rows
        self._pools = pools if transport == "shm" else ()
        self._transport = transport
        self._window = max(1, _WINDOW_BYTES // rows.block_bytes)
        num_bytes = len(rows) * (rows.block_bytes + 4096)
        memory = str(num_bytes * 5 // 4 + 64 * MiB)
        disk: list[str] = []
        if folder is not None:
            disk = ["--disk", str(folder), "--disk-bytes", str(2 * num_bytes + 512 * MiB),
                    "--disk-write-rate", "0"]  # fmt: skip
        self._command = (memory, disk)
        self._server = RemoteServer(memory, args=disk).start()
        try:
            self._client = self._connect()
        except BaseException:
            self._server.stop()
            raise

    def clear(self) -> None:
        self._way.clear()

    def write(self) -> None:
        move(self._way, self._way.prepare_write, len(self._rows), self._window)

    def read(self) -> None:
        move(self._way, self._way.prepare_read, len(self._rows), self._window)

    def make_cold(self) -> None:
        memory, disk = self._command
        if not disk:
            raise Skipped("it keeps everything in memory")
        self._wait_for("its disk to have all blocks", self._all_on_disk)
        self._client.close()
        self._server.stop()
        self._server = RemoteServer(memory, args=disk).start()
        self._client = self._connect()
        self._wait_for("the blocks on its disk to be checked", self._all_readable)

    def close(self) -> None:
        self._client.close()
        self._server.stop()

    def _connect(self) -> RemoteClient:
        client = connect(
            self._server.endpoint, NAMESPACE, self._rows.block_bytes,
            transport=self._transport, rows=self._pools,
        )  # fmt: skip
        self._way = Server(client, NAMESPACE, self._rows)
        return client

    def _all_on_disk(self) -> bool:
        space = self._client.stats(timeout_s=PATIENCE_S).result().namespaces[NAMESPACE]
        return space.disk_blocks == len(self._rows)

    def _all_readable(self) -> bool:
        return self._way.num_kept == len(self._rows)

    def _wait_for(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
            time.sleep(0.02)
