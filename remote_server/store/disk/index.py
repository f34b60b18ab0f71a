"""The index of blocks by namespace and key, and the removal of blocks from it.

An evicted block frees its slot at once, any other after it is erased.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from remote_server.protocol import KeyState
from remote_server.store.disk.segments import BlockState, DiskBlock, Segment, Segments
from remote_server.store.disk.transfers import erase
from remote_server.store.io_threads import Job, Pool, Priority
from remote_server.store.presence import Journal

_NONE: Mapping[bytes, object] = {}
_READABLE = bytes.maketrans(b"\x01", bytes([KeyState.READABLE]))

ByKey = dict[str, dict[bytes, DiskBlock]]


class Index:
    """Readable, unverified, being written, or gone and not yet free.

    A key has one readable or one unverified block, never both, and any number being written.
    Readable and unverified blocks are in their class's policy as well, and can be evicted.
    """

    def __init__(self) -> None:
        self.readable: ByKey = {}
        self.unverified: ByKey = {}
        self.gone: set[DiskBlock] = set()
        self.journal: Journal | None = None
        """Learns what becomes readable and what leaves."""
        self._writing: dict[str, dict[bytes, list[DiskBlock]]] = {}

    # ── queries ──────────────────────────────────────────────────────────────────────────

    def states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The `KeyState` of each key, one byte each. No bytecode per key."""
        readable = self.readable.get(namespace, _NONE)
        states = bytes(map(readable.__contains__, keys)).translate(_READABLE)
        for place in (self._writing, self.unverified):
            if here := place.get(namespace):
                pending = bytes(map(here.__contains__, keys))
                if KeyState.PENDING in pending:
                    states = bytes(map(max, states, pending))
        return states

    def find(self, namespace: str, key: bytes) -> DiskBlock | None:
        """The readable or unverified block of `key`."""
        for place in (self.readable, self.unverified):
            if (block := place.get(namespace, {}).get(key)) is not None:
                return block
        return None

    def find_any(self, namespace: str, key: bytes) -> DiskBlock | None:
        """The block of `key`, also one that is being written."""
        if (block := self.find(namespace, key)) is not None:
            return block
        writing = self._writing.get(namespace, {}).get(key)
        return writing[-1] if writing else None

    @property
    def num_readable(self) -> int:
        return sum(map(len, self.readable.values()))

    @property
    def num_unverified(self) -> int:
        return sum(map(len, self.unverified.values()))

    def writing(self) -> Iterator[DiskBlock]:
        for by_key in self._writing.values():
            for same_key in by_key.values():
                yield from same_key

    # ── changes of place ─────────────────────────────────────────────────────────────────

    def begin(self, block: DiskBlock) -> None:
        """A new block is being written."""
        block.segment.slot_class.policy.reserve((block,))
        self._writing.setdefault(block.namespace, {}).setdefault(block.key, []).append(block)

    def end_writing(self, block: DiskBlock) -> None:
        """Out of writing; it is in no place then."""
        writing = self._writing[block.namespace]
        same_key = writing[block.key]
        same_key.remove(block)
        if not same_key:
            del writing[block.key]
        if not writing:
            del self._writing[block.namespace]

    def publish(self, block: DiskBlock) -> None:
        """From no place to readable. Its key must have no other block."""
        self.readable.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        block.segment.slot_class.policy.add(block)
        if self.journal is not None:
            self.journal.came((block,))

    def adopt(self, block: DiskBlock) -> None:
        """From no place to unverified. Its key must have no other block."""
        self.unverified.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.UNVERIFIED
        block.segment.slot_class.policy.add(block)

    def verified(self, block: DiskBlock) -> None:
        """From unverified to readable. Its place in the policy stays."""
        _delete(self.unverified, block)
        self.readable.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        if self.journal is not None:
            self.journal.came((block,))

    def take_out(self, block: DiskBlock) -> None:
        """From readable or unverified to no place."""
        was_readable = block.state is BlockState.READABLE
        _delete(self.readable if was_readable else self.unverified, block)
        block.segment.slot_class.policy.remove(block)
        block.state = BlockState.GONE
        if self.journal is not None and was_readable:
            self.journal.went((block,))

    def set_gone(self, block: DiskBlock) -> None:
        """From no place to gone: its slot is still in use."""
        block.segment.slot_class.policy.abandon(block)
        block.state = BlockState.GONE
        self.gone.add(block)

    def check(self) -> list[DiskBlock]:
        """Assert that every block is in one place and in its state. Returns all of them."""
        readable = [b for by_key in self.readable.values() for b in by_key.values()]
        unverified = [b for by_key in self.unverified.values() for b in by_key.values()]
        writing = [*self.writing()]
        assert all(b.state is BlockState.READABLE for b in readable)
        assert all(b.state is BlockState.UNVERIFIED for b in unverified)
        assert all(b.state is BlockState.WRITING and b.pins == 1 for b in writing)
        assert all(b.state is BlockState.GONE and b.pins > 0 for b in self.gone)
        assert all(self.find(b.namespace, b.key) is b for b in (*readable, *unverified))
        assert all(b in b.segment.slot_class.policy for b in (*readable, *unverified))
        return [*readable, *unverified, *writing, *self.gone]


def _delete(place: ByKey, block: DiskBlock) -> None:
    by_key = place[block.namespace]
    del by_key[block.key]
    if not by_key:
        del place[block.namespace]


class Removal:
    """Eviction, removal, and the pins that delay both.

    An evicted block was correct, and the next server may find it again until its slot is
    overwritten. A block that is removed, replaced or damaged must not be found again: it keeps its
    slot until its header is overwritten, which waits for its readers.
    """

    def __init__(
        self,
        index: Index,
        segments: Segments,
        pool: Pool,
        counters: Counter[str],
        on_free: Callable[[Segment], None],
    ) -> None:
        """`on_free` is called with each segment in which a gone block has freed its slot."""
        self._index = index
        self._segments = segments
        self._pool = pool
        self._counters = counters
        self._on_free = on_free
        self._older: dict[DiskBlock, DiskBlock] = {}

    def evict(self, block: DiskBlock) -> None:
        """Its slot may be written to at once. It must not be pinned."""
        self._segments.use_times.evicted(block.tick)
        self._take_out(block)
        self._segments.free_slot(block)
        self._counters["evicted"] += 1

    def discard(self, block: DiskBlock) -> None:
        """Out of the index now, and erased when its last pin is released."""
        self._take_out(block)
        self._index.set_gone(block)
        if block.pins == 0:
            self._erase(block)

    def erase(self, block: DiskBlock) -> None:
        """Erase a block that is in no place of the index and not pinned."""
        self._index.set_gone(block)
        self._erase(block)

    def retire(self, segment: Segment) -> None:
        """Remove all its blocks, and take it out of its class. Blocks in use keep their slots; the
        file is removed with the last of them."""
        for block in [*segment.blocks]:
            if block.state is BlockState.WRITING:
                self._index.end_writing(block)
                self._index.set_gone(block)
            elif block.state is not BlockState.GONE:
                self._take_out(block)
                if block.pins:
                    self._index.set_gone(block)
                else:
                    self._segments.free_slot(block)
        self._segments.retire(segment)

    def unpin(self, block: DiskBlock) -> None:
        """Release one pin of a block that was published or adopted."""
        if not self._segments.unpin(block):
            return
        if block.state is BlockState.GONE:
            self._erase(block)
        else:
            block.segment.slot_class.policy.unpin(block)

    def release(self, block: DiskBlock) -> None:
        """Free the slot of a gone block without users."""
        self._index.gone.discard(block)
        self._segments.free_slot(block)
        self._on_free(block.segment)

    # ── copies of one key, until the newer one is verified ───────────────────────────────

    def hold_older(self, newer: DiskBlock, older: DiskBlock) -> None:
        """Hold the slot of `older` until `newer` is verified: a kill during the replacement may
        have left the header of `newer` with damaged bytes."""
        self._index.take_out(older)
        self._segments.pin(older)
        self._index.set_gone(older)
        self._older[newer] = older

    def release_older(self, newer: DiskBlock) -> None:
        """`newer` is good, or gone as well: release its older copies."""
        while (older := self._older.pop(newer, None)) is not None:
            self.unpin(older)
            newer = older

    def replace_by_older(self, newer: DiskBlock) -> DiskBlock | None:
        """Remove `newer`, which is bad. Returns the copy before it, unverified again, or None."""
        older = self._older.pop(newer, None)
        self.discard(newer)
        if older is not None:
            self._index.gone.remove(older)
            self._index.adopt(older)
            self.unpin(older)
        return older

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _take_out(self, block: DiskBlock) -> None:
        self._index.take_out(block)
        self.release_older(block)

    def _erase(self, block: DiskBlock) -> None:
        file = block.segment.file
        if block.segment.retired or file is None:
            self.release(block)
            return
        self._segments.pin(block)

        def finish(erased: bool | None) -> None:
            self._counters["erase_failed"] += not erased
            self._segments.unpin(block)
            self.release(block)

        self._pool.submit(Job(Priority.WRITE, lambda scratch: erase(file, block, scratch), finish))
