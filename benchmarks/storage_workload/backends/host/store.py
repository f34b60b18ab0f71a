"""The server's store in this process: memory above disk, on the one thread that it requires.

The event loop submits reads and writes, which are turns of that thread. Each is cut into pieces;
between two pieces the thread finishes jobs of the disk and runs other turns, as the server does.

Without a memory tier (`memory` of 0) a little memory serves as staging: a write returns when its
blocks are on disk, and a block is dropped from memory with its last user.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks.storage_workload.backends.backend import Behind, Occupancy, ReadDone, WriteDone
from benchmarks.storage_workload.backends.host.cascade import HostCascade, LeavingOnly
from benchmarks.storage_workload.backends.host.measured_disk import MeasuredDisk
from benchmarks.storage_workload.backends.host.memory import HostMemory
from benchmarks.storage_workload.backends.host.reads import HostReads
from benchmarks.storage_workload.backends.host.turns import TurnThread
from benchmarks.storage_workload.backends.host.writes import HostWrites
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server.errors import ConfigError
from remote_server.process_limits import check_memory_fits
from remote_server.shm.mapping import Arena, Population
from remote_server.store.memory.slabs import memory_for_block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.stack.admission import Admission
from remote_server.store.stack.write_behind import BlocksBelow
from remote_server.store.store import Store
from remote_server.values import MiB, format_bytes

NAMESPACE = "storage-workload"

# Staging memory where there is no memory tier.
STAGING_BYTES = 256 * MiB

LOOK_AGAIN_S = 0.01
"""Whether the disk has everything."""

T = TypeVar("T")


class StoreHost:
    """A `Backend`. `with` starts the thread and ends it; the store is discarded with it."""

    def __init__(
        self, block_bytes: int, memory: int, disk: int, folder: Path | None, payload: Payload,
        *, cascade: bool = False,
    ) -> None:  # fmt: skip
        """`memory` and `disk` in bytes, 0 for none; `folder`, empty, is for the disk and belongs
        to the caller. `cascade` needs both, see that module. Raises `ConfigError`."""
        if not memory and not disk:
            raise ConfigError("cpu_mem_gb: 0 without a disk leaves nowhere to store anything")
        self.has_memory = memory > 0
        self.memory = memory or max(STAGING_BYTES, 2 * memory_for_block(block_bytes))
        if self.memory < memory_for_block(block_bytes):
            raise ConfigError(
                f"cpu_mem_gb: {format_bytes(self.memory)} are too few for blocks of "
                f"{format_bytes(block_bytes)}: {format_bytes(memory_for_block(block_bytes))} would "
                "be enough"
            )
        check_memory_fits(self.memory, setting="cpu_mem_gb")
        self._thread = TurnThread("store", self._finish_jobs)
        with ExitStack() as undo:
            self._arena = Arena(self.memory)
            undo.callback(self._arena.close)
            self.disk: MeasuredDisk | None = None
            if disk and folder is not None:
                self.disk = MeasuredDisk(folder, disk, block_bytes, self._thread.wake)
                undo.callback(self.disk.close)
            tier = MemoryTier(self._arena)
            leaving = LeavingOnly() if cascade else None
            below = [
                BlocksBelow(disk.tier, leaving or Admission()) for disk in (self.disk,) if disk
            ]
            self.store = Store(tier, below=below)
            self.store.namespaces.declare(NAMESPACE, NamespaceInfo(block_bytes=block_bytes))
            self._memory = HostMemory(
                tier, NAMESPACE, self.memory, block_bytes, self._thread.wake, keeps=self.has_memory
            )
            self.cascade: HostCascade | None = None
            if leaving is not None:
                self.cascade = HostCascade(
                    self.store, NAMESPACE, self._memory, block_bytes, leaving
                )
            self._writes = HostWrites(
                self.store, NAMESPACE, self._memory, self.disk, payload, self.cascade
            )
            self._reads = HostReads(
                self.store, NAMESPACE, self._memory, self.disk, block_bytes, self.cascade,
                self._writes.until_on_disk,
            )  # fmt: skip
            self._close = undo.pop_all()

    def __enter__(self) -> "StoreHost":
        Population([self._arena])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Pending requests end with a `RuntimeError`."""
        with self._close:
            self._thread.stop()

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("memory",) if self.disk is None else ("memory", "disk")

    async def read(self, blocks: Blocks) -> ReadDone:
        return await self._thread.submit(self._reads.read(blocks))

    async def write(self, blocks: Blocks) -> WriteDone:
        return await self._thread.submit(self._writes.write(blocks))

    async def occupancy(self) -> Mapping[str, Occupancy]:
        stats = await self.call(self.store.tier_stats)
        return {
            name: Occupancy(tier.budget_bytes, tier.used_bytes, tier.blocks)
            for name, tier in stats.items()
        }

    async def counters(self) -> Mapping[str, int]:
        """The store's; `staged_out`, blocks dropped because memory keeps none or by the cascade;
        and `cascade_offered`, blocks that the cascade offered to the disk."""
        own = {"staged_out": 0, "cascade_offered": 0}

        def ask() -> dict[str, int]:
            own["staged_out"] = self._memory.num_staged_out
            own["cascade_offered"] = 0 if self.cascade is None else self.cascade.offered
            return {**self.store.all_counters(), **own}

        return await self.call(ask)

    async def settle(self) -> None:
        while not await self.call(self._writes.give_up_late):
            await asyncio.sleep(LOOK_AGAIN_S)

    def take_behind(self) -> list[Behind]:
        return self._writes.take_behind()

    async def call(self, ask: Callable[[], T]) -> T:
        """The result of `ask`, which runs on the store's thread."""
        return await self._thread.call(ask)

    def _finish_jobs(self) -> None:
        self.store.tier_stack.finish_jobs()
