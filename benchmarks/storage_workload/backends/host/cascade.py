"""The source's waterfall on the store of this process: a block is in one tier, and is written to
disk when it is evicted from memory.

Before a write, and before a read that loads blocks from disk, the least recently used blocks are
written to disk until memory has room; the requester waits for it. Blocks that a read loads from
disk are dropped from memory after the read, so they stay on disk only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from benchmarks.storage_workload.backends.host.memory import HostMemory
from benchmarks.storage_workload.backends.host.turns import T, Turn
from remote_server.protocol import KeyState
from remote_server.store.memory.slabs import slot_bytes_for
from remote_server.store.stack.admission import Admission
from remote_server.store.store import Store

OnDisk = Callable[[Sequence[bytes]], Turn[None]]
"""Offers blocks of memory to the disk, and ends when each is written or declined."""


class LeavingOnly(Admission):
    """Declines published blocks, and admits those that are offered on eviction from memory."""

    def __init__(self) -> None:
        super().__init__()
        self._leaving: set[bytes] = set()

    def leave(self, keys: Sequence[bytes]) -> None:
        """The next offer of these is admitted."""
        self._leaving.update(keys)

    @property
    def remembers(self) -> bool:
        return bool(self._leaving)

    def is_due_again(self, namespace: str, key: bytes) -> bool:
        if key not in self._leaving:
            return False
        self._leaving.remove(key)
        return True

    def is_seen_enough(self, namespace: str, key: bytes) -> bool:
        return False


class HostCascade:
    """The eviction order of memory, on the store's thread alone."""

    def __init__(
        self, store: Store, namespace: str, memory: HostMemory, block_bytes: int,
        admission: LeavingOnly,
    ) -> None:  # fmt: skip
        """`admission` is that of `store`."""
        self.offered = 0
        """Blocks offered to the disk on eviction from memory."""

        self._store = store
        self._namespace = namespace
        self._memory = memory
        self._admission = admission
        slabs = memory.tier.slabs
        of_one = slabs.slab_bytes // slot_bytes_for(block_bytes)
        self._slots = memory.tier.stats().budget_bytes // slabs.slab_bytes * of_one
        self._taken = 0
        """Slots reserved for the present turns."""

        self._order: OrderedDict[bytes, None] = OrderedDict()
        """Blocks in memory that are not being evicted, least recently used first."""

        self._num_leaving = 0

    def writing(self, num_blocks: int, on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        """Run `turn`, which puts `num_blocks`, once memory has free slots for them."""
        return self._with_room(lambda: num_blocks, on_disk, turn)

    def reading(self, keys: Sequence[bytes], on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        """Run `turn`, which reads `keys`, once memory has free slots for those that it lacks: the
        turn loads them, or another one has just done so."""
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)
        return self._with_room(lambda: sum(key not in self._order for key in keys), on_disk, turn)

    def _with_room(self, wanted: Callable[[], int], on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        mine = 0
        try:
            while True:
                # More blocks may have been evicted while this one waited.
                now = wanted()
                self._taken += now - mine
                mine = now
                if (excess := self._excess) <= 0:
                    break
                leaving = list(islice(self._order, max(0, excess - self._num_leaving)))
                if leaving:
                    yield from self._leave(leaving, on_disk)
                else:
                    yield False
            return (yield from turn)
        finally:
            self._taken -= mine
            self._memory.wake()

    @property
    def _excess(self) -> int:
        return len(self._order) + self._num_leaving + self._taken - self._slots

    def created(self, keys: Sequence[bytes]) -> None:
        """Record `keys` as readable in memory."""
        self._order.update(dict.fromkeys(keys))

    def put_back(self, keys: Sequence[bytes]) -> None:
        """Drop the blocks that a read loaded from memory; resident blocks stay."""
        self._memory.drop([key for key in keys if key not in self._order])

    def _leave(self, keys: list[bytes], on_disk: OnDisk) -> Turn[None]:
        for key in keys:
            del self._order[key]
        self._num_leaving += len(keys)
        try:
            (disk,) = self._store.tier_stack.tiers
            on_it = disk.lookup_all(self._namespace, keys)
            new = [
                key for key, state in zip(keys, on_it, strict=True)
                if state != KeyState.READABLE
            ]  # fmt: skip
            if new:  # a block that was pinned at its last eviction is on disk already
                self._admission.leave(new)
                self.offered += len(new)
                yield from on_disk(new)
        finally:
            self._num_leaving -= len(keys)
            left = self._memory.drop(keys)
            self.created([key for key in keys if key not in left])  # a reader has pinned them
            self._memory.wake()
