"""Write-behind: blocks of memory on their way into one tier below it.

A block is written soon after its publication, not at its eviction: eviction never waits for a tier,
and a server that is killed has its blocks there. Blocks that wait are not pinned; those that memory
evicts first are counted and lost. A block that is being written is pinned in memory; the tier
bounds the bytes of these.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from remote_server import protocol
from remote_server.store.eviction.paths import Path
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.admission import Admission
from remote_server.store.stack.way_down import WayDown, checksum_of
from remote_server.store.tier import Tier, Written

# Blocks of all namespaces that wait until their namespace has room of its own in the tier.
MAX_UNPLACED = 1 << 17

# Blocks handed to the tier together: neighbours in time become neighbours there.
BLOCKS_PER_DEMOTION = 64

COUNTERS = (
    "demoted", "demoted_late", "demote_declined", "declined_first_time", "declined_write_rate",
)  # fmt: skip
"""`demoted_late`: evicted from memory before the tier had time for it."""


class BlocksBelow(NamedTuple):
    """A tier below memory, and the choice of the blocks that are written there."""

    tier: Tier[Any]
    admission: Admission

    def way(
        self, memory: MemoryTier, block_bytes_of: Callable[[str], int], fetch: object
    ) -> "WriteBehind":
        return WriteBehind(memory, *self, block_bytes_of)


class WriteBehind(WayDown):
    """The way down to one tier, and the recency of its blocks. One thread.

    Blocks that `admission` declines, and with eviction that learns those that the tier declines,
    are offered again when they are got from memory, or put once more. Blocks that the tier declines
    because their namespace has no room of its own are offered again when it gets some. Blocks of
    self-tests stay in memory.
    """

    def __init__(
        self,
        memory: MemoryTier,
        tier: Tier[Any],
        admission: Admission,
        block_bytes_of: Callable[[str], int],
    ) -> None:
        """`block_bytes_of` returns the block size of a namespace with blocks."""
        super().__init__(memory, tier, COUNTERS)
        self._admission = admission
        self._block_bytes_of = block_bytes_of
        self._queue: deque[Block] = deque()
        self._unplaced: dict[str, list[Block]] = {}
        self._num_unplaced = 0
        self._num_writing = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._num_writing)

    def published(self, blocks: Sequence[Block]) -> None:
        """`blocks` have just become readable in memory by a put. The tier removes other copies of
        their keys, so that an eviction does not undo a forced put. Blocks of a self-test are not
        written: they are cleared soon, and would take the room of others."""
        if blocks and blocks[0].namespace.startswith(protocol.SELF_TESTS):
            return
        seen = [
            block
            for block in blocks
            if self.tier.remove_other(block.namespace, block.key, checksum_of(self.memory, block))
            or self._admission.is_seen_enough(block.namespace, block.key)
        ]
        self.declined(len(blocks) - len(seen), "declined_first_time")
        self._queue.extend(seen)
        self.write_some()

    def asked_again(self, namespace: str, keys: Sequence[bytes]) -> None:
        """`keys` were put again, or got: blocks of them that admission declined, and that are in
        memory, are offered to the tier once more."""
        if not self._admission.remembers:
            return
        keys = [key for key in keys if self._admission.is_due_again(namespace, key)]
        again = [block for block in self.memory.pin_all(namespace, keys) if block is not None]
        self.memory.unpin_all(again)
        again.sort(key=lambda block: block.chain.start)  # a get names the last of a prompt first
        self._queue.extend(again)
        self.write_some()

    def write_some(self) -> None:
        while self._queue:
            blocks = self._next_blocks()
            room = self.tier.room_for([block.length for block in blocks])
            self._queue.extendleft(reversed(blocks[room:]))
            if blocks[:room]:
                self._write(blocks[:room])
            if room < len(blocks):
                return

    def write_again(self) -> None:
        """Hand blocks that waited for room to the tier again, when it may have some. Without this
        none would be written before the next put of their namespace."""
        if self.tier.take_retry() and self._unplaced:
            self._queue.extendleft(reversed(self._take_unplaced(None)))
            self.write_some()

    def clear(self, namespace: str | None) -> None:
        self._take_unplaced(namespace)
        if namespace is None:
            self._queue.clear()
        else:
            self._queue = deque(b for b in self._queue if b.namespace != namespace)

    def _next_blocks(self) -> list[Block]:
        """Some blocks of one namespace that are worth writing. Where eviction learns they are of
        one prompt, because a tier that declines a block declines those behind it."""
        blocks: list[Block] = []
        learner = self.memory.learner
        path: Path | None = None
        while self._queue and len(blocks) < BLOCKS_PER_DEMOTION:
            block = self._queue[0]
            if blocks and block.namespace != blocks[0].namespace:
                break
            if learner is not None:
                own = learner.paths.of(block.namespace, block.key)
                if blocks and own is not path:
                    break
                path = own
            self._queue.popleft()
            if block.state is not BlockState.READABLE:
                self.counters["demoted_late"] += 1
            elif not self.tier.holds(block.namespace, block.key, checksum_of(self.memory, block)):
                blocks.append(block)
        return blocks

    def _write(self, offered: list[Block]) -> None:
        blocks = [block for block in offered if self._may_write(block)]
        self.declined(len(offered) - len(blocks), "declined_write_rate")
        if not blocks:
            return
        namespace = blocks[0].namespace
        block_bytes = self._block_bytes_of(namespace)
        self.recency.flush()
        places = self.tier.begin_puts(self.offer(blocks), block_bytes)
        taken, left = blocks[: len(places)], blocks[len(places) :]
        for block, place in zip(taken, places, strict=True):
            if block.parent:
                place.set_parent(block.parent)
        self.counters["demote_declined"] += len(left)
        self._admission.not_written(sum(map(self._stored_bytes, left)))
        if not self.tier.has_room_of_its_own(namespace, block_bytes):
            self._hold_unplaced(namespace, blocks)
        elif left and self.memory.learner is not None:
            self._admission.declined(namespace, [block.key for block in left])
        if not taken:
            return
        self._queue.extendleft(reversed(self._take_unplaced(namespace)))
        pinned = self.memory.pin_all(namespace, [block.key for block in taken])
        assert pinned == taken, "readable a moment ago"
        self._num_writing += len(taken)
        self.tier.write(
            places,
            [self.memory.view(block) for block in taken],
            lambda results: self._written(taken, places, results),
        )

    def _written(
        self, blocks: Sequence[Block], places: Sequence[Any], results: Sequence[Written]
    ) -> None:
        self._num_writing -= len(blocks)
        for block, place in zip(blocks, places, strict=True):
            if block.state is BlockState.DETACHED:  # removed, replaced or cleared meanwhile
                self.tier.remove(place)
        self.memory.unpin_all(blocks)
        good = sum(written is Written.OK for written in results)
        self.counters["demoted"] += good
        self.counters["demote_declined"] += len(results) - good
        for block, written in zip(blocks, results, strict=True):
            if written is Written.NO_SPACE:  # other errors may have written a part
                self._admission.not_written(self._stored_bytes(block))
        full = [
            block
            for block, written in zip(blocks, results, strict=True)
            if written is Written.NO_SPACE and block.state is BlockState.READABLE
        ]
        if full:  # also beside other segments: several that are being made may fail
            self._hold_unplaced(blocks[0].namespace, full)

    def _hold_unplaced(self, namespace: str, blocks: list[Block]) -> None:
        """Hold `blocks` until `namespace` gets room of its own. Beyond the limit the namespaces
        that have waited longest are dropped."""
        self._unplaced.setdefault(namespace, []).extend(blocks)
        self._num_unplaced += len(blocks)
        while self._num_unplaced > MAX_UNPLACED:
            self._take_unplaced(next(iter(self._unplaced)))

    def _take_unplaced(self, namespace: str | None) -> list[Block]:
        """Remove and return the waiting blocks of one namespace, or of all."""
        names = [*self._unplaced] if namespace is None else [namespace]
        blocks = [block for name in names for block in self._unplaced.pop(name, ())]
        self._num_unplaced -= len(blocks)
        return blocks

    def _may_write(self, block: Block) -> bool:
        num_bytes = self._stored_bytes(block)
        return self._admission.may_write(block.namespace, block.key, num_bytes)

    def _stored_bytes(self, block: Block) -> int:
        return self.tier.stored_bytes(block.length)
