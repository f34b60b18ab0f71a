"""The Mooncake store: its own master, memory process and client."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.six_systems.peers.lmcache_server import start
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import LoggedProcess, free_port
from remote_server.values import MiB

_PEER = "mooncake"
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""Libraries to which its modules are linked, with or without RDMA, in the order of loading."""

_METADATA = "P2PHANDSHAKE"
_LOCAL_BUFFER = 16 * MiB


class _Process(LoggedProcess):
    """A program of its wheel, ready when it has logged `ready`."""

    def __init__(self, program: str, ready: str, *args: str) -> None:
        self.name = program.replace("_", "-")
        self._ready = ready
        found = peer_folder.program(_PEER, program)
        folder = peer_folder.installed(_PEER)
        env = peer_folder.library_path(folder) if folder else found.env
        super().__init__([found.path, "--logtostderr", "--minloglevel=0", *args], env)

    def is_ready(self) -> bool:
        return self._ready in self.printed()


@contextmanager
def serve(sizes: Sizes) -> Iterator[Host]:
    """Master and memory, over tcp on this host. Raises `Skipped` where it is not installed."""
    _library()
    port, memory = free_port(), (sizes.num_bytes * 3 // 2) // MiB + 128
    with ExitStack() as stack:
        master = _Process(
            "mooncake_master", "Master service started", f"--rpc_port={port}",
            "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1",
        )  # fmt: skip
        stack.callback(start(master).stop)
        lender = _Process(
            "mooncake_client", "Starting real client service", f"--port={free_port()}",
            f"--master_server_address=127.0.0.1:{port}", f"--metadata_server={_METADATA}",
            "--host=127.0.0.1", f"--global_segment_size={memory}MB", "--protocol=tcp",
        )  # fmt: skip
        stack.callback(start(lender).stop)
        yield Host(f"127.0.0.1:{port}")


class Mooncake:
    """Its client, which provides no memory itself: `batch_put_from` and `batch_get_into` of all
    blocks, out of and into the rows, over tcp."""

    def __init__(self, host: Host, share: Share) -> None:
        self._store: Any = _library().MooncakeDistributedStore()
        if status := self._store.setup(
            "127.0.0.1", _METADATA, 0, _LOCAL_BUFFER, "tcp", "", host.address
        ):
            raise Skipped(f"its client does not start: status {status}")
        self._rows = share.rows
        self._keys = [key.decode() for key in share.block_keys()]
        self._sizes = [share.rows.block_bytes] * len(self._keys)
        self._pools = (share.rows.padded_source, share.rows.padded_target)
        for pool in self._pools:
            if status := self._store.register_buffer(pool.ctypes.data, pool.nbytes):
                raise Skipped(f"it does not register the rows: status {status}")
        self._source, self._target = (
            [int(row.ctypes.data) for row in rows]
            for rows in (share.rows.source_pool, share.rows.target_pool)
        )

    def clear(self) -> None:
        """Remove all blocks now: otherwise a block read recently is kept until its lease ends."""
        self._store.batch_remove(self._keys, True)

    def write(self) -> None:
        results = self._store.batch_put_from(self._keys, self._source, self._sizes)
        if any(results):
            raise OSError(f"Mooncake did not take a block: status {min(results)}")

    def read(self) -> None:
        results = self._store.batch_get_into(self._keys, self._target, self._sizes)
        if results != self._sizes:
            raise OSError(f"Mooncake does not have a block: status {min(results)}")

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        for pool in self._pools:
            self._store.unregister_buffer(pool.ctypes.data)
        self._store.close()


def _library() -> Any:
    """Its module. Raises `Skipped` with the error of its import."""
    os.environ.setdefault("GLOG_minloglevel", "1")  # warnings
    folder = peer_folder.installed(_PEER)
    if folder is not None:
        for name in _LIBRARIES:
            for path in sorted((folder / peer_folder.ROOT).rglob(name)):
                ctypes.CDLL(str(path))
    return peer_folder.package(_PEER, "mooncake.store")
