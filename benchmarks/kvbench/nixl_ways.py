"""Blocks in a file through NIXL's POSIX and GDS backends, as measured by the source."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.device_ways import DeviceRows
from benchmarks.kvbench.transfer import Range
from benchmarks.kvbench.ways import Rows, blocks_per_request
from benchmarks.remote_kv_cache.work.blocks import Pool
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S

POSIX, GDS = "POSIX", "GDS"


def library() -> Any:
    """NIXL's Python module. Raises `Skipped` with the error of its import."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    return peer_folder.package("nixl", "nixl._api")


def agent_with(name: str, backend: str) -> Any:
    """A NIXL agent with one backend. Raises `Skipped` where either is missing."""
    api = library()
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        agent.create_backend(backend)
    except Exception as error:  # the library has no error classes of its own
        reason = str(error) or type(error).__name__
        raise Skipped(f"NIXL's backend {backend} does not start: {reason}") from None
    return agent


@dataclass
class NixlRequest:
    """A prepared NIXL transfer that is not yet posted."""

    handle: Any


class NixlFile:
    """One preallocated file, from and to the host's memory or a device's.

    POSIX uses the page cache, and a write ends when the kernel has the bytes. GDS bypasses the page
    cache and, with a device, the host; it moves whole pages.
    """

    def __init__(
        self, folder: Path, rows: Rows, backend: str = POSIX, device: DeviceRows | None = None
    ) -> None:
        """Raises `Skipped` where NIXL or this backend is missing."""
        self.blocks_per_request = blocks_per_request(rows.block_bytes)
        self._backend = backend
        self._agent = agent_with(f"kvbench-{backend}", backend)
        direct = backend != POSIX
        self.path = folder / f"nixl-{backend}"
        self._stride = rows.padded_source.shape[1]
        self._block_bytes = self._stride if direct else rows.block_bytes
        num_bytes = len(rows) * self._stride
        self._source, self._target, self._segment = _places(rows, device)
        self._fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600
        )
        os.posix_fallocate(self._fd, 0, num_bytes)
        memory = [(places[0], num_bytes, 0, "") for places in (self._source, self._target)]
        self._registered = [
            self._agent.register_memory(memory, self._segment, backends=[backend]),
            self._agent.register_memory([(0, num_bytes, self._fd, "")], "FILE", backends=[backend]),
        ]

    def prepare_write(self, places: Range) -> NixlRequest:
        return self._prepare("WRITE", self._source, places)

    def prepare_read(self, places: Range) -> NixlRequest:
        return self._prepare("READ", self._target, places)

    def post(self, request: NixlRequest) -> None:
        if self._agent.transfer(request.handle) == "ERR":
            raise OSError("NIXL could not post a transfer")

    def wait(self, request: NixlRequest) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (state := self._agent.check_xfer_state(request.handle)) == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError(f"a transfer of NIXL's took more than {PATIENCE_S:g} s")
        self._agent.release_xfer_handle(request.handle)
        if state != "DONE":
            raise OSError(f"a transfer of NIXL's ended as {state}")

    def overwrite(self, place: int, row: memoryview) -> None:
        """Overwrite a block's place without NIXL."""
        os.pwrite(self._fd, row, place * self._stride)

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered, backends=[self._backend])
        os.close(self._fd)
        self.path.unlink()

    def _prepare(self, operation: str, rows: Sequence[int], places: Range) -> NixlRequest:
        memory = [(rows[place], self._block_bytes, 0) for place in places]
        file = [(place * self._stride, self._block_bytes, self._fd) for place in places]
        handle = self._agent.initialize_xfer(
            operation,
            self._agent.get_xfer_descs(memory, self._segment),
            self._agent.get_xfer_descs(file, "FILE"),
            self._agent.name,
            backends=[self._backend],
        )
        return NixlRequest(handle)


def _places(rows: Rows, device: DeviceRows | None) -> tuple[list[int], list[int], str]:
    """Addresses of all rows of source and target, and NIXL's kind of their memory."""
    stride = rows.padded_source.shape[1]
    if device is None:
        first = [_address(pool) for pool in (rows.padded_source, rows.padded_target)]
        segment = "DRAM"
    else:
        first = [int(pool.data_ptr()) for pool in (device.source, device.target)]
        segment = "VRAM" if device.source.is_cuda else "DRAM"
    source, target = ([start + place * stride for place in range(len(rows))] for start in first)
    return source, target, segment


def _address(pool: Pool) -> int:
    return int(pool.__array_interface__["data"][0])
