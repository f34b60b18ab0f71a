"""Reads from the store of this process: each block is copied into a row and hashed there, as in a
client."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.storage_workload.backends.backend import Part, ReadDone
from benchmarks.storage_workload.backends.host.cascade import HostCascade, OnDisk
from benchmarks.storage_workload.backends.host.device_times import Interval, covered
from benchmarks.storage_workload.backends.host.measured_disk import MeasuredDisk
from benchmarks.storage_workload.backends.host.memory import HostMemory
from benchmarks.storage_workload.backends.host.turns import Turn
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.store.gets import Pinned
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.store import Store
from remote_server.turns import to_end
from remote_server.values import MiB

# Bytes copied in one turn.
TURN_BYTES = 8 * MiB

# Target rows of reads. Larger than the CPU's caches, so that copies have their real cost.
ROWS_BYTES = 64 * MiB


class HostReads:
    """Reads, on the store's thread alone."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        memory: HostMemory,
        disk: MeasuredDisk | None,
        block_bytes: int,
        cascade: HostCascade | None = None,
        on_disk: OnDisk | None = None,
    ) -> None:
        """With `cascade` a read makes room for the blocks that it loads, by way of `on_disk`, and
        keeps no copy of them in memory."""
        self._cascade = cascade
        self._on_disk = on_disk
        self._store = store
        self._namespace = namespace
        self._memory = memory
        self._disk = disk
        # Filled, so that no read pays for the first touch of a page.
        self._rows = np.full((max(2, ROWS_BYTES // block_bytes), block_bytes), 1, np.uint8)
        self._next_row = 0

    def read(self, blocks: Blocks) -> Turn[ReadDone]:
        submitted = time.monotonic()
        yield True
        began = time.monotonic()
        prefix = self._store.gets.lookup(self._namespace, blocks.keys).prefix
        spans = {"memory": _Span(), "disk": _Span()}
        good = 0
        for first in range(0, prefix, self._memory.window):
            window = blocks.part(first, min(prefix, first + self._memory.window))
            turn = self._read_window(window, spans)
            if self._cascade is not None and self._on_disk is not None:
                turn = self._cascade.reading(window.keys, self._on_disk, turn)
            read = yield from self._memory.holding(window.num_bytes, turn)
            good += read
            if read < len(window.keys):
                break
            yield True
        if not spans["disk"].blocks:
            # A read from memory alone takes the whole time; beside a disk, only its copies.
            spans["memory"].total_s = time.monotonic() - began
        parts = tuple(span.part(tier) for tier, span in spans.items() if span.blocks)
        return ReadDone(good, parts, began - submitted)

    def _read_window(self, window: Blocks, spans: Mapping[str, "_Span"]) -> Turn[int]:
        """The number of good blocks from the first on."""
        began = time.monotonic()
        pinned, tier_of, during = yield from self._fetch(window)
        fetched = time.monotonic()
        tiers = [tier_of[index] for index in pinned.indices]
        if "disk" in tiers:
            spans["disk"].total_s += fetched - began
        left = deque(zip(pinned.indices, pinned.blocks, tiers, strict=True))
        good = copied = 0
        is_prefix = True
        try:
            while left:
                index, block, tier = left[0]
                started = time.monotonic()
                span = spans[tier]
                if block.key in during:
                    # A turn that joined a read in flight waited only for the rest of it.
                    span.during.append(during[block.key].since(began))
                is_prefix = is_prefix and index == good and self._copy(block)
                good += is_prefix
                span.blocks += 1
                span.num_bytes += block.length
                left.popleft()
                self._memory.tier.unpin_all((block,))
                span.total_s += time.monotonic() - started
                copied += block.length
                if copied >= TURN_BYTES:
                    copied = 0
                    yield True
        finally:
            self._memory.tier.unpin_all(block for _, block, _ in left)
        keys = [block.key for block in pinned.blocks]
        self._memory.release(keys)
        if self._cascade is not None:
            self._cascade.put_back(keys)
        return good

    def _fetch(
        self, window: Blocks
    ) -> Turn[tuple[Pinned, Sequence[str], Mapping[bytes, Interval]]]:
        """The present blocks, pinned, the tier of each of `window`, and the device's intervals for
        the blocks from disk."""
        found: list[Pinned] = []
        if self._disk is None:
            at_once = to_end(self._store.gets.fetch(self._namespace, window.keys, found.append))
            assert at_once is not None, "there is nothing to be read"
            return at_once, ["memory"] * len(window.keys), {}
        reads = self._disk.tier.reads
        reads.expect(window.keys)
        try:
            at_once = to_end(self._store.gets.fetch(self._namespace, window.keys, found.append))
            # After the get has begun, and before a read of it can end. The get takes its keys in
            # steps, and a step that reads from disk may evict blocks of the next one.
            states = self._memory.tier.lookup_all(self._namespace, window.keys)
            tier_of = ["memory" if each == KeyState.READABLE else "disk" for each in states]
            if at_once is not None:
                found.append(at_once)
            while not found:
                yield False
        finally:
            during = reads.take(window.keys)
        return found[0], tier_of, during

    def _copy(self, block: Block) -> bool:
        """Copy the block into the next row. True if its bytes are right; if not, the block is
        removed."""
        row = self._rows[self._next_row, : block.length]
        self._next_row = (self._next_row + 1) % len(self._rows)
        np.copyto(row, np.frombuffer(self._memory.tier.view(block), np.uint8))
        if protocol.checksum(self._namespace, block.key, row.data) == block.checksum:
            return True
        if block.state is BlockState.READABLE:
            self._store.remove_corrupt(block)
        return False


class _Span:
    """One tier's part of one read."""

    def __init__(self) -> None:
        self.blocks = 0
        self.num_bytes = 0
        self.total_s = 0.0
        self.during: list[Interval] = []

    def part(self, tier: str) -> Part:
        return Part(tier, self.blocks, self.num_bytes, self.total_s, covered(self.during))
