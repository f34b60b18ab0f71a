"""A disk tier that a test can wait for, on a real directory with real threads."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from remote_server import protocol
from remote_server.store.disk.files import Folder, Written
from remote_server.store.disk.finding import find_segments
from remote_server.store.disk.layout import PAGE, slot_bytes_for
from remote_server.store.disk.pool import ThreadPool
from remote_server.store.disk.segments import OVERHEAD_BYTES, DiskBlock
from remote_server.store.disk.tier import DiskTier

BOUND_S = 20.0


def budget_for(num_segments: int, slots: int, block_bytes: int) -> tuple[int, int]:
    """The budget and the size of `num_segments` segments of `slots` slots each."""
    segment_bytes = PAGE + slots * slot_bytes_for(block_bytes)
    return OVERHEAD_BYTES + num_segments * segment_bytes, segment_bytes


def wait_for(tier: DiskTier, event: threading.Event, until: Callable[[], bool]) -> None:
    """Run the tier's loop until `until`, or fail after `BOUND_S`."""
    while not until():
        assert event.wait(BOUND_S), "nothing happened for long"
        event.clear()
        tier.finish_jobs()


class RealDisk:
    """A `DiskTier` over `path`. `with` ends it as a clean stop does, and checks it first."""

    def __init__(self, path: Path, budget: int, segment_bytes: int, **options: Any) -> None:
        self.event = threading.Event()
        self.files = options.pop("files", None) or Folder(path)
        self.pool = ThreadPool(self.event.set, num_threads=options.pop("num_threads", 3))
        found = find_segments(self.files, str(path))
        self.tier = DiskTier(
            self.files, found, self.pool, budget, segment_bytes=segment_bytes, **options
        )

    def drain(self) -> None:
        wait_for(self.tier, self.event, self._is_idle)

    def _is_idle(self) -> bool:
        self.tier.finish_jobs()
        return not self.tier.busy and self.tier.recovery.done

    def put(self, key: bytes, data: bytes, namespace: str = "ns", block_bytes: int = 0) -> Written:
        return self.put_all([key], [data], namespace, block_bytes)[0]

    def put_all(
        self, keys: Sequence[bytes], data: Sequence[bytes], namespace: str = "ns",
        block_bytes: int = 0,
    ) -> list[Written]:  # fmt: skip
        sums = [protocol.checksum(namespace, k, d) for k, d in zip(keys, data, strict=True)]
        lengths = [*map(len, data)]
        size = block_bytes or max(lengths)
        blocks = self.tier.begin_puts(namespace, keys, size, lengths, sums)
        assert len(blocks) == len(keys), "no room"
        results: list[list[Written]] = []
        self.tier.write(blocks, [memoryview(d) for d in data], results.append)
        wait_for(self.tier, self.event, lambda: bool(results))
        return results[0]

    def read(self, key: bytes, namespace: str = "ns") -> bytes | None:
        """None for a miss, whether it was none before or became one."""
        (block,) = self.tier.pin_all(namespace, [key])
        return None if block is None else self.read_pinned(block)

    def read_pinned(self, block: DiskBlock) -> bytes | None:
        data = bytearray(block.length)
        results: list[list[bool]] = []
        self.tier.read([block], [memoryview(data)], results.append)
        wait_for(self.tier, self.event, lambda: bool(results))
        return bytes(data) if results[0][0] else None

    def close(self) -> None:
        self.tier.recovery.stop()
        self.pool.stop()
        self.tier.close()

    def __enter__(self) -> "RealDisk":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
                self.tier.check()
        finally:
            self.close()


class DiskAsTier:
    """The disk tier in the clothes of a `Tier`, each call waiting for what it started: so that
    one suite judges both."""

    def __init__(self, disk: RealDisk) -> None:
        self._disk = disk
        self._tier = disk.tier
        self._buffers: dict[DiskBlock, bytearray] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def begin_put(self, namespace, key, block_bytes, length, checksum):
        blocks = self.begin_puts(namespace, [key], block_bytes, [length], [checksum])
        return blocks[0] if blocks else None

    def begin_puts(self, namespace, keys, block_bytes, lengths, checksums):
        blocks = self._tier.begin_puts(namespace, keys, block_bytes, lengths, checksums)
        self._buffers.update({block: bytearray(block.length) for block in blocks})
        return blocks

    def view(self, block):
        if block in self._buffers:
            return memoryview(self._buffers[block])
        self._tier.segments.pin(block)  # reading gives a pin back
        return memoryview(self._disk.read_pinned(block))

    def view_of_run(self, blocks):
        return None

    def complete_put(self, block):
        return self._complete([block]) == [Written.OK]

    def complete_puts(self, blocks):
        if blocks:
            self._complete(blocks)

    def _complete(self, blocks):
        results = []
        self._tier.write(blocks, [memoryview(self._buffers.pop(b)) for b in blocks], results.append)
        self._disk.drain()
        return results[0]

    def fail_put(self, block):
        del self._buffers[block]
        self._tier.fail_put(block)

    def pin(self, namespace, key):
        return self._tier.pin_all(namespace, (key,))[0]

    def clear(self, namespace):
        removed = self._tier.clear(namespace)
        self._disk.drain()
        return removed

    def unpin(self, block):
        self._tier.unpin(block)
        self._disk.drain()
