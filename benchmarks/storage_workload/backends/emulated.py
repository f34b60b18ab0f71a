"""Stores of known speed, for measuring the driver and the autoscalers. They move no bytes."""

import asyncio
from collections.abc import Mapping

from benchmarks.storage_workload.backends.backend import (
    Behind,
    Occupancy,
    Part,
    ReadDone,
    WriteDone,
)
from benchmarks.storage_workload.traffic.entries import Blocks


class NullBackend:
    """A store without delays that has all blocks: only the driver takes time."""

    tiers: tuple[str, ...] = ("null",)

    async def read(self, blocks: Blocks) -> ReadDone:
        num_blocks = len(blocks.keys)
        return ReadDone(num_blocks, (Part("null", num_blocks, blocks.num_bytes, 0.0, 0.0),))

    async def write(self, blocks: Blocks) -> WriteDone:
        num_blocks = len(blocks.keys)
        parts = (Part("null", num_blocks, blocks.num_bytes, 0.0, 0.0),)
        return WriteDone(num_blocks, 0, 0, parts)

    async def occupancy(self) -> Mapping[str, Occupancy]:
        return {}

    async def counters(self) -> Mapping[str, int]:
        return {}

    async def settle(self) -> None:
        pass

    def take_behind(self) -> list[Behind]:
        return []


class NoTier(NullBackend):
    """An empty store below a GPU: it finds nothing and keeps nothing."""

    tiers = ()

    async def read(self, blocks: Blocks) -> ReadDone:
        return ReadDone(0, ())

    async def write(self, blocks: Blocks) -> WriteDone:
        return WriteDone(0, 0, len(blocks.keys), ())


class EmulatedBackend(NullBackend):
    """One device that moves `bytes_per_s`, one request after another, each after a fixed latency.
    It keeps all blocks, without limit. Time is the event loop's."""

    tiers = ("emulated",)

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_at = 0.0
        self._kept: dict[bytes, int] = {}

    async def read(self, blocks: Blocks) -> ReadDone:
        there = next(
            (place for place, key in enumerate(blocks.keys) if key not in self._kept),
            len(blocks.keys),
        )
        part, waited_s = await self._move(blocks.part(0, there))
        return ReadDone(there, (part,) if there else (), waited_s)

    async def write(self, blocks: Blocks) -> WriteDone:
        new = [place for place, key in enumerate(blocks.keys) if key not in self._kept]
        created = Blocks(
            [blocks.keys[place] for place in new], [blocks.lengths[place] for place in new]
        )
        part, waited_s = await self._move(created)
        self._kept.update(zip(*created, strict=True))
        num_existed = len(blocks.keys) - len(new)
        return WriteDone(len(new), num_existed, 0, (part,) if new else (), waited_s)

    async def occupancy(self) -> Mapping[str, Occupancy]:
        used = sum(self._kept.values())
        return {"emulated": Occupancy(used, used, len(self._kept))}

    async def _move(self, blocks: Blocks) -> tuple[Part, float]:
        now = asyncio.get_running_loop().time()
        began = max(now, self._free_at)
        device_s = blocks.num_bytes / self._bytes_per_s
        self._free_at = began + device_s
        waited_s = began - now
        await asyncio.sleep(waited_s + device_s + self._latency_s)
        part = Part(
            "emulated", len(blocks.keys), blocks.num_bytes, device_s + self._latency_s, device_s
        )
        return part, waited_s
