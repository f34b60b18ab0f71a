"""Writes into the store of this process, and the results of their blocks on disk.

A write fills the slots that the store reserves and hashes them. It returns when its blocks are in
memory, and reports the disk's results later; or, without a memory tier, it returns when they are on
disk.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence

from benchmarks.storage_workload.backends.backend import Behind, Part, WriteDone
from benchmarks.storage_workload.backends.host.cascade import HostCascade
from benchmarks.storage_workload.backends.host.device_times import Interval, covered
from benchmarks.storage_workload.backends.host.measured_disk import MeasuredDisk
from benchmarks.storage_workload.backends.host.memory import HostMemory
from benchmarks.storage_workload.backends.host.turns import Turn
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server import protocol
from remote_server.protocol import Declined, PutOutcome
from remote_server.store.disk.segments import DiskBlock
from remote_server.store.puts import Reserved
from remote_server.store.store import Store
from remote_server.store.tier import Offered, Written
from remote_server.values import MiB

# Bytes filled in one turn.
TURN_BYTES = 8 * MiB


class Put:
    """One write: the results of its blocks, in memory and on disk."""

    def __init__(self) -> None:
        self.outcomes: Counter[int] = Counter()
        self.created_bytes = 0
        self.left: set[bytes] = set()
        """Keys without a result of the disk."""

        self.is_whole = False
        """Whether all of its blocks have been submitted."""

        self.disk_blocks = 0
        self.disk_bytes = 0
        self.began: float | None = None
        """The time at which the first of them was submitted to the disk."""

        self.ended = 0.0
        self.during: list[Interval] = []

    def on_disk(self) -> Part:
        total_s = self.ended - self.began if self.began is not None else 0.0
        return Part("disk", self.disk_blocks, self.disk_bytes, total_s, covered(self.during))


class HostWrites:
    """Writes, on the store's thread alone, except for `take_behind`."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        memory: HostMemory,
        disk: MeasuredDisk | None,
        payload: Payload,
        cascade: HostCascade | None = None,
    ) -> None:
        """With `cascade` blocks are written to disk when they are evicted from memory, and not
        behind their put."""
        self._cascade = cascade
        self._store = store
        self._namespace = namespace
        self._memory = memory
        self._disk = disk
        self._payload = payload
        self._to_disk: dict[bytes, Put] = {}
        self._behind: deque[Behind] = deque()
        if disk is not None:
            disk.tier.on_write = self._handed_over
            disk.tier.on_written = self._written
            disk.tier.on_declined = self._declined

    def write(self, blocks: Blocks) -> Turn[WriteDone]:
        submitted = time.monotonic()
        yield True
        began = time.monotonic()
        put = Put()
        window_blocks = self._memory.window
        for first in range(0, len(blocks.keys), window_blocks):
            window = blocks.part(first, first + window_blocks)
            turn = self._write_window(window, put)
            if self._cascade is not None:
                turn = self._cascade.writing(len(window.keys), self.until_on_disk, turn)
            yield from self._memory.holding(window.num_bytes, turn)
            yield True
        put.is_whole = True
        self._report_if_done(put)
        return self._done(put, time.monotonic() - began, began - submitted)

    def take_behind(self) -> list[Behind]:
        """Writes behind that ended since the last call; on any thread."""
        return [self._behind.popleft() for _ in range(len(self._behind))]

    def give_up_late(self) -> bool:
        """True once no block is in transfer to the disk. Missing blocks then never arrive, and the
        writes already answered are reported without them."""
        if self._store.tier_stack.busy:
            return False
        late = {put for put in self._to_disk.values() if put.is_whole}
        self._to_disk = {key: put for key, put in self._to_disk.items() if put not in late}
        for put in late:
            put.left.clear()
            self._report_if_done(put)
        return True

    def _write_window(self, window: Blocks, put: Put) -> Turn[None]:
        unhashed = [None] * len(window.keys)
        offered = Offered(self._namespace, window.keys, window.lengths, unhashed)
        reserved = self._store.puts.begin(offered, force=False)
        try:
            yield from self._fill(reserved)
        except BaseException:
            self._store.puts.end(reserved, None, Declined.WITHDRAWN)
            raise
        keys = [block.key for block in reserved.blocks]
        if self._disk is not None and self._cascade is None:
            self._expect_on_disk(keys, put)
        self._store.puts.end(reserved, [True] * len(keys))
        put.created_bytes += sum(block.length for block in reserved.blocks)
        put.outcomes.update(reserved.outcomes)
        if self._cascade is not None:
            self._cascade.created(keys)
        if not self._memory.keeps:
            yield from self._until_on_disk(keys, put)

    def _fill(self, reserved: Reserved) -> Turn[None]:
        filled = 0
        for block in reserved.blocks:
            view = self._memory.tier.view(block)
            self._payload.fill(view, block.key)
            block.checksum = protocol.checksum(self._namespace, block.key, view)
            filled += block.length
            if filled >= TURN_BYTES:
                filled = 0
                yield True

    def _done(self, put: Put, total_s: float, waited_s: float) -> WriteDone:
        created = put.outcomes[PutOutcome.CREATED]
        existed = put.outcomes[PutOutcome.EXISTED] + put.outcomes[PutOutcome.DUPLICATE]
        declined = put.outcomes[PutOutcome.DECLINED]
        part = Part("memory", created, put.created_bytes, total_s, 0.0)
        if not self._memory.keeps:
            declined += created - put.disk_blocks
            created = put.disk_blocks
            part = put.on_disk()._replace(total_s=total_s)
        return WriteDone(created, existed, declined, (part,) if created else (), waited_s)

    def until_on_disk(self, keys: Sequence[bytes]) -> Turn[None]:
        """Offer these blocks of memory to the disk, and end when each is written or declined."""
        put = Put()
        put.is_whole = True
        self._expect_on_disk(keys, put)
        self._store.tier_stack.asked_again(self._namespace, keys)
        yield from self._until_on_disk(keys, put)

    # ── down to disk ─────────────────────────────────────────────────────────────────────

    def _expect_on_disk(self, keys: Sequence[bytes], put: Put) -> None:
        """Blocks that an earlier put awaits and that are put again count for the new put only."""
        for key in keys:
            before = self._to_disk.get(key)
            if before is not None:
                before.left.discard(key)
                self._report_if_done(before)
        put.left.update(keys)
        self._to_disk.update(dict.fromkeys(keys, put))

    def _until_on_disk(self, keys: Sequence[bytes], put: Put) -> Turn[None]:
        """Keep `keys` in memory only until each is written to disk or declined."""
        tier_stack = self._store.tier_stack
        tier = self._memory.tier
        pinned = [block for block in tier.pin_all(self._namespace, keys) if block is not None]
        try:
            while not put.left.isdisjoint(keys) and tier_stack.busy:
                yield False
        finally:
            self._declined(keys)  # they cannot be written any more
            tier.unpin_all(pinned)
        self._memory.release(keys)

    def _handed_over(self, blocks: Sequence[DiskBlock]) -> None:
        began = time.monotonic()
        for block in blocks:
            put = self._to_disk.get(block.key)
            if put is not None and put.began is None:
                put.began = began

    def _written(self, blocks: Sequence[DiskBlock], results: Sequence[Written]) -> None:
        assert self._disk is not None
        ended = time.monotonic()
        for block, result in zip(blocks, results, strict=True):
            put = self._to_disk.pop(block.key, None)
            if put is None:
                continue
            put.left.discard(block.key)
            if result is Written.OK:
                put.disk_blocks += 1
                put.disk_bytes += block.length
                put.during.append(self._disk.calls.of("write", block))
                put.ended = ended
            self._report_if_done(put)

    def _declined(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            put = self._to_disk.pop(key, None)
            if put is not None:
                put.left.discard(key)
                self._report_if_done(put)

    def _report_if_done(self, put: Put) -> None:
        if self._memory.keeps and put.is_whole and not put.left and put.disk_blocks:
            self._behind.append(Behind(put.ended, put.on_disk()))
