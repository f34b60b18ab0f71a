"""The source's waterfall on the store of this process: a block lies in one tier, and is written to
disk when it leaves memory.

Before a write, and before a read that brings blocks up, the least recently used blocks are written
to disk until memory has room; the one that needs the room waits for it. What a read brings up from
disk leaves memory again with the read, so it stays where it was.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from benchmarks.storage_workload.host_memory import HostMemory
from benchmarks.storage_workload.turns import T, Turn
from remote_server.protocol import KeyState
from remote_server.store.admission import Admission
from remote_server.store.slabs import slot_bytes_for
from remote_server.store.store import Store

OnDisk = Callable[[Sequence[bytes]], Turn[None]]
"""Offers blocks of memory to the disk, and ends when it has them or has declined them."""


class LeavingOnly(Admission):
    """Turns away what is published, and admits what is offered because it leaves memory."""

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
    """Which blocks of memory leave next, on the store's thread alone."""

    def __init__(
        self, store: Store, namespace: str, memory: HostMemory, block_bytes: int,
        admission: LeavingOnly,
    ) -> None:  # fmt: skip
        """`admission` is the one that `store` has."""
        self.offered = 0
        """Blocks that were offered to the disk because they left memory."""

        self._store = store
        self._namespace = namespace
        self._memory = memory
        self._admission = admission
        slabs = memory.tier.slabs
        of_one = slabs.slab_bytes // slot_bytes_for(block_bytes)
        self._slots = memory.tier.stats().budget_bytes // slabs.slab_bytes * of_one
        self._taken = 0
        """Slots that turns under way may take."""

        self._order: OrderedDict[bytes, None] = OrderedDict()
        """Blocks in memory that are not on their way out, least recently used first."""

        self._num_leaving = 0

    def writing(self, num_blocks: int, on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        """`turn`, which puts so many blocks, in a memory that has slots free for them."""
        return self._with_room(lambda: num_blocks, on_disk, turn)

    def reading(self, keys: Sequence[bytes], on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        """`turn`, which reads these, in a memory that has slots free for those that do not live
        there: it brings them up, or another one has just done so."""
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)
        return self._with_room(lambda: sum(key not in self._order for key in keys), on_disk, turn)

    def _with_room(self, wanted: Callable[[], int], on_disk: OnDisk, turn: Turn[T]) -> Turn[T]:
        mine = 0
        try:
            while True:
                # More may have left while this one waited.
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
        """These have just become readable in memory."""
        self._order.update(dict.fromkeys(keys))

    def put_back(self, keys: Sequence[bytes]) -> None:
        """What a read has brought up leaves memory; blocks that live there stay."""
        self._memory.drop([key for key in keys if key not in self._order])

    def _leave(self, keys: list[bytes], on_disk: OnDisk) -> Turn[None]:
        for key in keys:
            del self._order[key]
        self._num_leaving += len(keys)
        try:
            assert self._store.disk is not None
            on_it = self._store.disk.lookup_all(self._namespace, keys)
            new = [
                key for key, state in zip(keys, on_it, strict=True)
                if state != KeyState.READABLE
            ]  # fmt: skip
            if new:  # a block that could not leave the last time is there already
                self._admission.leave(new)
                self.offered += len(new)
                yield from on_disk(new)
        finally:
            self._num_leaving -= len(keys)
            left = self._memory.drop(keys)
            self.created([key for key in keys if key not in left])  # a reader has it pinned
            self._memory.wake()
