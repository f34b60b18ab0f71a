"""Memory of a GPU above a store: the prefix cache that an engine has above its connector.

A write fills rows on the device and goes to the store below in parallel, as a connector stores
computed blocks. A read takes the leading present blocks of the prompt from the device and the rest
from below; blocks from below are also put into rows. Blocks on the device behind a gap are read
from below too, as in an engine, and keep their rows. Eviction is LRU, and within one prompt the
last block first, because blocks behind a gap are of no use.

Bytes travel as in an engine, from page-locked memory to the device, and inside the device to where
attention would read them; a real engine reads without writing, so this is the upper bound. The
contents of a block read from below are generated again for its row. A sample of the blocks read is
fetched and compared.

The device's library is CuPy or torch, see `library`. All of it was tested with a CPU as the
device. It has not been run on a GPU.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from benchmarks.storage_workload.backends import backend
from benchmarks.storage_workload.backends.backend import (
    Behind,
    Occupancy,
    Part,
    ReadDone,
    WriteDone,
)
from benchmarks.storage_workload.backends.gpu.library import Library
from benchmarks.storage_workload.backends.gpu.row_table import RowTable
from benchmarks.storage_workload.backends.gpu.rows import DeviceRows, row_bytes_for
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server.errors import ConfigError
from remote_server.values import MiB

WINDOW_BYTES = 32 * MiB
"""Bytes moved in one turn."""

CHECK_EVERY = 256
"""One of this many blocks read from the device is compared."""


@dataclass
class _Span:
    """The device's part of one read or write."""

    came: float = field(default_factory=time.monotonic)
    began: float = 0.0
    ended: float = 0.0
    checked_s: float = 0.0
    """Seconds of comparing, which belong to the benchmark and not to a store."""

    blocks: int = 0
    num_bytes: int = 0
    device_s: float = 0.0
    existed: int = 0
    declined: int = 0

    @property
    def waited_s(self) -> float:
        return max(0.0, self.began - self.came)

    @property
    def parts(self) -> tuple[Part, ...]:
        total_s = self.ended - self.began - self.checked_s
        part = Part("gpu", self.blocks, self.num_bytes, total_s, self.device_s)
        return (part,) if self.blocks else ()


class GpuTier:
    """A `Backend` above another, which the caller owns. The end of `with` frees the device."""

    def __init__(
        self, below: backend.Backend, block_bytes: int, budget: int, payload: Payload,
        library: Library, check_every: int = CHECK_EVERY,
    ) -> None:  # fmt: skip
        """`budget` in bytes, allocated now on the device of `library`. Raises `ConfigError`."""
        self.below = below
        self.row_bytes = row_bytes_for(block_bytes)
        self.num_rows = budget // self.row_bytes
        if not self.num_rows:
            raise ConfigError(
                f"gpu_mem_gb: {budget} bytes are too few for a block of {block_bytes}"
            )
        self._window = min(self.num_rows, max(1, WINDOW_BYTES // self.row_bytes))
        self._device = DeviceRows(library, self.num_rows, self.row_bytes, self._window)
        self._payload = payload
        self._check_every = check_every
        self._rows = RowTable(self.num_rows)
        names = ("hits", "written", "promoted", "declined", "checked", "damaged")
        self.own = Counter({f"gpu_{name}": 0 for name in names})
        self._behind: deque[Behind] = deque()
        # One thread, as a device has one stream: work on a window is not interrupted.
        self._thread = ThreadPoolExecutor(1, "gpu")

    def __enter__(self) -> "GpuTier":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._device.close()

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("gpu", *self.below.tiers)

    async def read(self, blocks: Blocks) -> ReadDone:
        span = _Span()
        turn = asyncio.get_running_loop().run_in_executor
        for start in range(0, len(blocks.keys), self._window):
            here = await turn(self._thread, self._read_window, blocks, start, span)
            if here < min(self._window, len(blocks.keys) - start):
                break
        good = span.blocks
        if good == len(blocks.keys):
            return ReadDone(good, span.parts, span.waited_s)
        done = await self.below.read(blocks.part(good))
        found = good + done.blocks
        await self._fill(blocks.part(0, found), good, "gpu_promoted", is_behind=True)
        return ReadDone(found, (*span.parts, *done.parts), span.waited_s + done.waited_s)

    async def write(self, blocks: Blocks) -> WriteDone:
        """Returns the result of the store below, if there is one."""
        is_above = bool(self.below.tiers)
        filling = asyncio.create_task(self._fill(blocks, 0, "gpu_written", is_behind=is_above))
        try:
            done = await self.below.write(blocks)
        finally:
            span = await filling  # it runs to its end in any case, and is counted
        if is_above:
            return done
        return WriteDone(span.blocks, span.existed, span.declined, span.parts, span.waited_s)

    async def occupancy(self) -> Mapping[str, Occupancy]:
        budget, used = (rows * self.row_bytes for rows in (self.num_rows, self._rows.num_used))
        own = Occupancy(budget, used, len(self._rows))
        return {"gpu": own, **await self.below.occupancy()}

    async def counters(self) -> Mapping[str, int]:
        return {**self.own, "gpu_evicted": self._rows.evicted, **await self.below.counters()}

    async def settle(self) -> None:
        await self.below.settle()

    def take_behind(self) -> list[Behind]:
        """The writes behind of the store below, and copies to the device beside a store or after
        a read: a run counts the bytes of a write once, in the store below."""
        own = [self._behind.popleft() for _ in range(len(self._behind))]
        return own + self.below.take_behind()

    async def _fill(self, blocks: Blocks, first: int, counter: str, *, is_behind: bool) -> _Span:
        """Put the blocks from `first` on into rows; the others are their prefix."""
        span = _Span()
        turn = asyncio.get_running_loop().run_in_executor
        for start in range(first, len(blocks.keys), self._window):
            await turn(self._thread, self._fill_window, blocks, start, counter, span)
        if is_behind:
            self._behind.extend(Behind(span.ended, part) for part in span.parts)
        return span

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _fill_window(self, blocks: Blocks, start: int, counter: str, span: _Span) -> None:
        span.began = span.began or time.monotonic()
        self._rows.touch(blocks.keys)
        own = frozenset(blocks.keys)
        window = blocks.part(start, start + self._window)
        rows: list[int] = []
        lengths: list[int] = []
        for key, length in zip(*window, strict=True):
            if key in self._rows:
                span.existed += 1
            elif (row := self._rows.take(key, own)) is None:
                span.declined += 1
                self.own["gpu_declined"] += 1
            else:
                self._payload.fill(self._device.staging(len(rows), length).data, key)
                rows.append(row)
                lengths.append(length)
        span.device_s += self._device.store(rows, lengths)
        self._rows.touch(blocks.keys)
        self.own[counter] += len(rows)
        span.blocks += len(rows)
        span.num_bytes += sum(lengths)
        span.ended = time.monotonic()

    def _read_window(self, blocks: Blocks, start: int, span: _Span) -> int:
        """The number of blocks from `start` on that are present and right."""
        span.began = span.began or time.monotonic()
        window = blocks.part(start, start + self._window)
        rows = self._rows.prefix(window.keys)
        if rows:
            span.device_s += self._device.read(rows)
            self._rows.touch(blocks.keys[: start + len(rows)])
        began_check = time.monotonic()
        good = self._check(window.part(0, len(rows)))
        span.ended = time.monotonic()
        span.checked_s += span.ended - began_check
        self.own["gpu_hits"] += good
        span.blocks += good
        span.num_bytes += sum(window.lengths[:good])
        return good

    def _check(self, window: Blocks) -> int:
        """The number of blocks just read that are right, by sample. A wrong block is removed."""
        before = self.own["gpu_hits"]
        for place, (key, length) in enumerate(zip(*window, strict=True)):
            if (before + place) % self._check_every:
                continue
            self.own["gpu_checked"] += 1
            expected = self._device.staging(0, length)
            self._payload.fill(expected.data, key)
            if not np.array_equal(self._device.was_read(place, length), expected):
                self.own["gpu_damaged"] += 1
                self._rows.remove(key)
                return place
        return len(window.keys)
