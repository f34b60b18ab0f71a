"""NIXL: a file through its POSIX backend, and another process's memory through UCX."""

import base64
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.harness.files import drop_from_cache
from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.nixl_ways import NixlFile, agent_with, library
from benchmarks.kvbench.transfer import move
from benchmarks.remote_kv_cache.work.blocks import poison
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S
from benchmarks.six_systems.peers.lmcache_server import start
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import LoggedProcess
from remote_server.values import MiB

BACKEND = "UCX"
_WINDOW_BYTES = 64 * MiB


class NixlFiles:
    """One file through the page cache. A write ends when the kernel has the bytes."""

    def __init__(self, _: Host, share: Share) -> None:
        """Raises `Skipped` where NIXL or its file backend is missing."""
        self._rows = share.rows
        self._window = max(1, _WINDOW_BYTES // share.rows.block_bytes)
        self._way = NixlFile(share.folder, share.rows)

    def clear(self) -> None:
        """Clear the blocks; the file remains."""
        poison(self._rows.target_pool)
        for place, row in enumerate(self._rows.target):
            self._way.overwrite(place, row)

    def write(self) -> None:
        move(self._way, self._way.prepare_write, len(self._rows), self._window)

    def read(self) -> None:
        move(self._way, self._way.prepare_read, len(self._rows), self._window)

    def make_cold(self) -> None:
        drop_from_cache(self._way.path)

    def close(self) -> None:
        self._way.close()


class Target(NamedTuple):
    """The other process's agent and its memory."""

    metadata: bytes
    address: int


class _TargetProcess(LoggedProcess):
    name = "nixl-target"

    def __init__(self, num_bytes: int) -> None:
        module = "benchmarks.six_systems.peers.nixl_target"
        super().__init__([sys.executable, "-m", module, str(num_bytes)])

    def is_ready(self) -> bool:
        return "ready " in self.printed()

    def target(self) -> Target:
        found = re.search(r"ready (\d+) (\S+)", self.printed())
        assert found is not None, "asked before it was ready"
        return Target(base64.b64decode(found[2]), int(found[1]))


@contextmanager
def serve(sizes: Sizes) -> Iterator[Host]:
    """An agent with as much memory as all blocks. Raises `Skipped` where NIXL is missing."""
    library()
    process = start(_TargetProcess(sizes.num_bytes))
    try:
        yield Host(process.target())
    finally:
        process.stop()


class NixlMemory:
    """One-sided writes to and reads from the other process's memory, over UCX's choice of
    transport: on one host shared memory. A write ends when NIXL reports it done; the other process
    takes no part."""

    def __init__(self, host: Host, share: Share) -> None:
        """Raises `Skipped` where NIXL or its UCX backend is missing."""
        target: Target = host.address
        self._rows = share.rows
        self._agent = agent_with(f"six-systems-{share.first}", BACKEND)
        self._remote = self._agent.add_remote_agent(target.metadata)
        pools = (share.rows.padded_source, share.rows.padded_target)
        self._registered = self._agent.register_memory(
            [(_address(pool), pool.nbytes, 0, "") for pool in pools], "DRAM", backends=[BACKEND]
        )
        size = share.rows.block_bytes
        self._source, self._target = (
            self._agent.get_xfer_descs([(_address(row), size, 0) for row in rows], "DRAM")
            for rows in (share.rows.source_pool, share.rows.target_pool)
        )
        first = target.address + share.first * size
        self._there = self._agent.get_xfer_descs(
            [(first + place * size, size, 0) for place in range(len(share.rows))], "DRAM"
        )

    def clear(self) -> None:
        poison(self._rows.target_pool)
        self._move("WRITE", self._target)

    def write(self) -> None:
        self._move("WRITE", self._source)

    def read(self) -> None:
        self._move("READ", self._target)

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._agent.remove_remote_agent(self._remote)
        self._agent.deregister_memory(self._registered, backends=[BACKEND])

    def _move(self, operation: str, here: Sequence[Any]) -> None:
        handle = self._agent.initialize_xfer(
            operation, here, self._there, self._remote, backends=[BACKEND]
        )
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + PATIENCE_S
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError(f"a transfer of NIXL's took more than {PATIENCE_S:g} s")
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"a transfer of NIXL's ended as {state}")


def _address(pool: Any) -> int:
    return int(pool.__array_interface__["data"][0])
