"""Small stores for tests of the storage workload: in this process, and clients of a server."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.storage_workload.backends import wire
from benchmarks.storage_workload.backends.backend import Backend, Part
from benchmarks.storage_workload.backends.host import reads as host_reads
from benchmarks.storage_workload.backends.host import store as store_host
from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.backends.wire import WireBackend
from benchmarks.storage_workload.figures.samples import TransferSample
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server.store.disk.layout import slot_bytes_for
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.io_threads import ThreadPool
from remote_server.store.pages import PAGE

KiB, MiB = 1 << 10, 1 << 20
BLOCK_BYTES = 16 * KiB

# 16 slabs of 8 slots; a read or write holds 16 blocks at a time.
MEMORY = 16 * 8 * BLOCK_BYTES
MEMORY_BLOCKS = MEMORY // BLOCK_BYTES


def disk_of(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> int:
    """A budget of 16 segments with room for `num_blocks` together."""
    assert num_blocks % 16 == 0
    segment = PAGE + num_blocks // 16 * slot_bytes_for(block_bytes)
    return OVERHEAD_BYTES + 16 * segment


def blocks_of(numbers: Iterable[int], length: int = BLOCK_BYTES) -> Blocks:
    keys = [b"block-%06d" % number for number in numbers]
    return Blocks(keys, [length] * len(keys))


class BreakablePayload(Payload):
    """Cannot make the bytes of `broken`."""

    broken = b""

    def fill(self, view: memoryview, key: bytes) -> None:
        if key == self.broken:
            raise OSError("no bytes for this one")
        super().fill(view, key)


def payload(block_bytes: int = BLOCK_BYTES) -> BreakablePayload:
    return BreakablePayload(1, block_bytes, noise_bytes=MiB)


def host_of(
    folder: Path, memory: int = 0, disk: int = 0, block_bytes: int = BLOCK_BYTES,
    *, cascade: bool = False,
) -> StoreHost:  # fmt: skip
    """With little memory of its own beside what is asked for."""
    with (
        patch.object(store_host, "STAGING_BYTES", 16 * MiB),
        patch.object(host_reads, "ROWS_BYTES", MiB),
    ):
        return StoreHost(block_bytes, memory, disk, folder, payload(block_bytes), cascade=cascade)


def wire_to(endpoint: str, transport: str = "auto") -> WireBackend:
    """With windows of 32 blocks, so that more than one is needed."""
    with patch.object(wire, "WINDOW_BYTES", 32 * BLOCK_BYTES):
        return WireBackend(endpoint, BLOCK_BYTES, payload(), transport)


def by_tier(parts: Iterable[Part]) -> dict[str, int]:
    """How many blocks each moved."""
    return {part.tier: part.blocks for part in parts}


def pool_of(host: StoreHost) -> ThreadPool:
    """The threads of its disk."""
    assert host.disk is not None
    return host.disk._pool


async def until(host: StoreHost, what: Callable[[], object]) -> None:
    """`what` is asked on the store's thread."""
    while not await host.call(what):
        await asyncio.sleep(0)


class Booked:
    """A backend, and the samples of what it was asked, as the driver keeps them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.transfers: list[TransferSample] = []

    async def read(self, blocks: Blocks) -> int:
        done = await self.backend.read(blocks)
        self._add("read", done.parts)
        return done.blocks

    async def write(self, blocks: Blocks) -> int:
        """How many were created."""
        done = await self.backend.write(blocks)
        self._add("write", done.parts)
        assert done.created + done.existed + done.declined == len(blocks.keys)
        return done.created

    async def settle(self) -> None:
        await self.backend.settle()
        self._add("write", [behind.part for behind in self.backend.take_behind()])

    def _add(self, direction: str, parts: Iterable[Part]) -> None:
        for part in parts:
            rest: list[Any] = [*part, 0.0]
            self.transfers.append(TransferSample(0.0, 0, 0, "", direction, *rest))
