"""Our server, in a process of its own, with a disk for blocks after a restart, or without."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.transfer import move
from benchmarks.kvbench.ways import Server
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import RemoteServer
from remote_server.client import RemoteClient
from remote_server.values import MiB

_WINDOW_BYTES = 64 * MiB


@contextmanager
def serve(sizes: Sizes, *, disk: bool) -> Iterator[Host]:
    """A server with room for all blocks in memory and, with `disk`, on its disk."""
    padded_bytes = sizes.num_blocks * (sizes.block_bytes + 4096)
    memory = str(padded_bytes * 5 // 4 + 64 * MiB)
    args: list[str] = []
    if disk:
        args = ["--disk", str(sizes.folder / "disk"), "--disk-write-rate", "0",
                "--disk-bytes", str(2 * padded_bytes + 512 * MiB)]  # fmt: skip
    server = RemoteServer(memory, args=args).start()

    def restart() -> str:
        nonlocal server
        server.stop()
        server = RemoteServer(memory, args=args).start()
        return server.endpoint

    try:
        if disk:
            yield Host(
                server.endpoint, restart, "it is not restarted while several processes use it"
            )
        else:
            yield Host(server.endpoint)
    finally:
        server.stop()


class Ours:
    """Puts and gets over one transport. Cold: from the server's disk after a restart.

    A put ends when its blocks are readable; the disk is written behind it, past the page cache.
    Without a disk it compares with systems that keep all blocks in memory.
    """

    def __init__(self, host: Host, share: Share, *, transport: str) -> None:
        """Raises `Skipped` without this transport."""
        self._host = host
        self._rows = share.rows
        self._pools = share.pools if transport == "shm" else ()
        self._transport = transport
        self._namespace = f"six-systems-{share.first}"
        self._window = max(1, _WINDOW_BYTES // share.rows.block_bytes)
        self._client = self._connect(host.address)

    def clear(self) -> None:
        self._way.clear()

    def write(self) -> None:
        move(self._way, self._way.prepare_write, len(self._rows), self._window)

    def read(self) -> None:
        move(self._way, self._way.prepare_read, len(self._rows), self._window)

    def make_cold(self) -> None:
        if self._host.restart is None:
            raise Skipped(self._host.never_cold)
        self._wait_for("its disk to have all blocks", self._all_on_disk)
        self._client.close()
        self._client = self._connect(self._host.restart())
        self._wait_for("the blocks on its disk to be checked", self._all_readable)

    def close(self) -> None:
        self._client.close()

    def _connect(self, endpoint: str) -> RemoteClient:
        client = connect(
            endpoint, self._namespace, self._rows.block_bytes,
            transport=self._transport, rows=self._pools,
        )  # fmt: skip
        self._way = Server(client, self._namespace, self._rows)
        return client

    def _all_on_disk(self) -> bool:
        space = self._client.stats(timeout_s=PATIENCE_S).result().namespaces[self._namespace]
        return space.share("disk").blocks == len(self._rows)

    def _all_readable(self) -> bool:
        return self._way.num_kept == len(self._rows)

    def _wait_for(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
            time.sleep(0.02)
