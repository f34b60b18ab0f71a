"""A disk tier that a test can wait for, on a real directory with real threads."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from one_by_one import OneByOne

from remote_server import protocol
from remote_server.protocol import KeyState, Stretch
from remote_server.shm.mapping import Arena
from remote_server.store.disk.files import Folder
from remote_server.store.disk.finding import find_segments
from remote_server.store.disk.layout import slot_bytes_for
from remote_server.store.disk.segments import OVERHEAD_BYTES, DiskBlock
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.io_threads import ThreadPool
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.pages import PAGE
from remote_server.store.stack.admission import Admission
from remote_server.store.stack.tier_stack import TierStack
from remote_server.store.stack.write_behind import WriteBehind
from remote_server.store.tier import Offered, Tier, TierBlock, Written

BOUND_S = 60.0
BLOCK = 4096


def budget_for(num_segments: int, slots: int, block_bytes: int) -> tuple[int, int]:
    """The budget and the size of `num_segments` segments of `slots` slots each."""
    segment_bytes = PAGE + slots * slot_bytes_for(block_bytes)
    return OVERHEAD_BYTES + num_segments * segment_bytes, segment_bytes


def state_of(tier: DiskTier, namespace: str, key: bytes) -> KeyState:
    return KeyState(tier.lookup_all(namespace, (key,))[0])


def wait_for(tier: DiskTier, event: threading.Event, until: Callable[[], bool]) -> None:
    """Run the tier's loop until `until`, or fail after `BOUND_S`."""
    while not until():
        assert event.wait(BOUND_S), "nothing happened for long"
        event.clear()
        tier.finish_jobs()


class RealTier:
    """A tier below memory with real threads. `with` waits for its jobs, checks it and ends it."""

    tier: Any

    def drain(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
                self.tier.check()
        finally:
            self.close()


class RealDisk(RealTier):
    """A `DiskTier` over `path`. `with` ends it as a clean stop does, and checks it first."""

    def __init__(self, path: Path, budget: int, segment_bytes: int, **options: Any) -> None:
        self.event = threading.Event()
        self.files = options.pop("files", None) or Folder(path)
        self.pool = ThreadPool(self.event.set, num_threads=options.pop("num_threads", 3))
        found = find_segments(self.files, str(path))
        given = {name: options.pop(name) for name in DiskSettings._fields if name in options}
        settings = DiskSettings(budget, segment_bytes, **given)
        self.tier = DiskTier(self.files, found, self.pool, settings, **options)

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
        blocks = self.tier.begin_puts(Offered(namespace, keys, lengths, sums), size)
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


def stack_of(
    memory: MemoryTier,
    disk: DiskTier,
    block_bytes_of: Callable[[str], int],
    admission: Admission | None = None,
) -> TierStack:
    """Memory above disk."""
    return TierStack(memory, [WriteBehind(memory, disk, admission or Admission(), block_bytes_of)])


class MemoryAboveDisk:
    """Both real, without a server, for blocks of `BLOCK` bytes. What a test has moved is settled
    and checked by `close`."""

    def __init__(
        self, folder: Path, in_memory: int, budget: int, segment_bytes: int,
        admission: Admission | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.arena = Arena(in_memory * BLOCK)
        learner = options.get("learner")
        self.memory = MemoryTier(self.arena, slab_bytes=4 * BLOCK, learner=learner)
        self.disk = RealDisk(folder, budget, segment_bytes, **options)
        self.tier_stack = stack_of(self.memory, self.disk.tier, lambda _: BLOCK, admission)

    def write(
        self, namespace: str, keys: Sequence[bytes], data: Sequence[bytes],
        chain: Sequence[Stretch] = (),
    ) -> None:  # fmt: skip
        """As a put does; the disk may still be writing."""
        sums = protocol.checksums(namespace, keys, data)
        lengths = [*map(len, data)]
        blocks = self.memory.begin_puts(Offered(namespace, keys, lengths, sums, chain), BLOCK)
        assert len(blocks) == len(keys)
        for block, each in zip(blocks, data, strict=True):
            self.memory.view(block)[:] = each
        self.memory.complete_puts(blocks[::-1])
        self.tier_stack.published(blocks)

    def settle(self) -> None:
        def is_idle() -> bool:
            self.tier_stack.finish_jobs()
            return not self.disk.tier.busy and self.disk.tier.recovery.done

        wait_for(self.disk.tier, self.disk.event, is_idle)

    def close(self) -> None:
        self.settle()
        self.memory.check()
        self.disk.tier.check()
        assert self.memory.stats().pinned == 0
        assert self.disk.tier.stats().pinned == 0
        self.disk.close()
        self.arena.close()


class Waiting(OneByOne):
    """A tier below memory, each of whose calls waits for what it started: the calls of the memory
    tier in terms of `Tier`, so that one suite judges both."""

    def __init__(self, tier: Tier[Any], settle: Callable[[], None]) -> None:
        """`settle` returns when the tier is idle."""
        super().__init__(tier)
        self._settle = settle
        self._buffers: dict[TierBlock, bytearray] = {}

    def begin_puts(self, offered, block_bytes):
        blocks = self.tier.begin_puts(offered, block_bytes)
        self._buffers.update({block: bytearray(block.length) for block in blocks})
        return blocks

    def view(self, block):
        """Of a block that is being written."""
        return memoryview(self._buffers[block])

    def bytes_of(self, block):
        """The bytes of a pinned block, whose pin is released."""
        data = bytearray(block.length)
        results = []
        self.tier.read([block], [memoryview(data)], results.append)
        self._settle()
        assert results == [[True]]
        return bytes(data)

    def complete_put(self, block):
        return self.complete_puts([block]) == [Written.OK]

    def complete_puts(self, blocks):
        results = []
        if blocks:
            views = [memoryview(self._buffers.pop(block)) for block in blocks]
            self.tier.write(blocks, views, results.append)
            self._settle()
        return results[0] if results else []

    def fail_put(self, block):
        del self._buffers[block]
        self.tier.fail_put(block)

    def clear(self, namespace):
        removed = self.tier.clear(namespace)
        self._settle()
        return removed

    def unpin_all(self, blocks):
        self.tier.unpin_all(blocks)
        self._settle()
