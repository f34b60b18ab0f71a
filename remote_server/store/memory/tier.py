"""The memory tier: blocks in an arena, under one hard budget that all namespaces share."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from remote_server.protocol import KeyState, TierStats
from remote_server.shm.mapping import Arena
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.policy import policy_maker
from remote_server.store.memory.block_bytes import BlockBytes
from remote_server.store.memory.operator_pins import OperatorPins, PinCount
from remote_server.store.memory.reclaim import SlotReclaim
from remote_server.store.memory.slabs import (
    Block,
    BlockState,
    PendingWrites,
    SizeClass,
    Slabs,
    slot_bytes_for,
)
from remote_server.store.presence import Journal
from remote_server.store.tier import Offered
from remote_server.store.use_times import UseTimes

_NONE: Mapping[bytes, object] = {}
_READABLE = bytes.maketrans(b"\x01", bytes([KeyState.READABLE]))


class MemoryTier(BlockBytes):
    """Blocks in the slots of an arena, from which every request is served.

    Blocks that are not pinned are evicted for new ones as `SlotReclaim` decides; within a quota
    of a namespace, the longest published first.

    A slot's generation word is set when its block becomes readable, to a number that no other block
    of this tier ever has, and to 0 before the slot is free. A reader that copied without a pin, or
    past the end of its lease, compares the word to detect that the bytes have changed.

    Not thread-safe: one thread calls it. Other threads touch only the bytes of a `Block`: its
    writer while it is WRITING, holders of a pin afterwards. Calls are for many keys, and take well
    under a microsecond a key.
    """

    name = "memory"

    def __init__(
        self,
        arena: Arena,
        slab_bytes: int | None = None,
        namespace_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        learner: Learner | None = None,
    ) -> None:
        """`namespace_bytes` limits the blocks of one namespace; 0 for no limit. Without a `learner`
        eviction is LRU."""
        super().__init__(arena)
        self._namespace_bytes = namespace_bytes
        self.learner = learner
        self.slabs = Slabs(arena.num_bytes, slab_bytes, policy_maker(learner, self._find))
        self._reclaim = SlotReclaim(self.slabs, self._evict)
        self.operator_pins = OperatorPins(len(self.slabs.slabs), namespace_bytes)
        self._evicted = 0
        self.journal: Journal | None = None
        """Learns what becomes readable and what leaves."""
        self.refused = False
        """Whether the policy is why the last `begin_puts` had no room for all."""
        self._index: dict[str, dict[bytes, Block]] = {}  # readable blocks
        self._writing = PendingWrites()
        self._detached: set[Block] = set()
        self._tick = 0
        self._use_times = UseTimes(clock, 0)
        # A random start: a word of an earlier server must not match by chance.
        self._generation = secrets.randbits(62)

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The `KeyState` of each key, one byte each. Not a use."""
        # No bytecode per key: 50 ns each, most of it for the hash of the key.
        readable = self._index.get(namespace, _NONE)
        states = bytes(map(readable.__contains__, keys)).translate(_READABLE)
        if writing := self._writing.of.get(namespace):
            pending = bytes(map(writing.__contains__, keys))
            if KeyState.PENDING in pending:
                return bytes(map(max, states, pending))
        return states

    def report_to(self, journal: Journal) -> None:
        """From now on `journal` learns what becomes readable and what leaves."""
        self.journal = journal

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether the block of `key` is readable. Not a use."""
        return key in self._index.get(namespace, _NONE)

    def peek(self, namespace: str, key: bytes) -> Block | None:
        """The readable block of `key`. Not a use."""
        return self._index.get(namespace, {}).get(key)

    def begin_puts(
        self, offered: Offered[int | None], block_bytes: int, *, may_refuse: bool = False
    ) -> list[Block]:
        """A slot for each of the first keys, as many as there is room for now, after evictions;
        none for blocks that no slab can hold. The namespace has blocks of at most `block_bytes`.
        With `may_refuse` there is no room for those that rank below all that would be evicted.

        The caller fills `view(block)` of each, and ends it once, with `complete_puts` or
        `fail_put`. Until then readers see the previous copy, or nothing.
        """
        if not self.slabs.can_hold(block_bytes):
            self.refused = False
            return []
        namespace, keys, lengths, checksums, chain = offered
        size_class = self.slabs.size_class(block_bytes)
        if self._namespace_bytes:
            quota = self._namespace_bytes // size_class.slot_bytes
            oldest_first = self._index.get(namespace, {}).values()
            taken = self._num_slots_of(namespace)
            room = self._reclaim.room_in_quota(oldest_first, taken, quota, len(keys))
            keys, lengths, checksums = keys[:room], lengths[:room], checksums[:room]
        wanted = zip(keys, lengths, checksums, strict=True)
        blocks: list[Block] = []
        tick = self._next_tick()
        policy = size_class.policy
        if keys:
            policy.arrive(namespace, keys[0], may_refuse=may_refuse)
        while (missing := len(keys) - len(blocks)) and self._reclaim.has_slot(size_class, missing):
            at = len(blocks)
            blocks += self.slabs.place(size_class, namespace, wanted, missing, tick, chain, at)
        self.refused = len(blocks) < len(keys) and policy.refuses
        policy.arrived()
        policy.reserve(blocks)
        self._writing.add(namespace, blocks)
        return blocks

    def complete_puts(self, blocks: Sequence[Block]) -> None:
        """Publish `blocks`, which are filled and correct, in place of previous copies: the last one
        is the most recently used. Those that were cleared meanwhile are gone. All are of one
        `begin_puts`."""
        if not blocks:
            return
        index = self._index.setdefault(blocks[0].namespace, {})
        words, generation = self._arena.words, self._generation
        tick = self._next_tick()
        readable = BlockState.READABLE
        policy = self._class_of(blocks[0]).policy
        new: list[Block] = []
        for block in blocks:
            if block.state is BlockState.DETACHED:
                self.unpin_all((block,))
                continue
            key, slab = block.key, block.slab
            for older in self._writing.publish(block):
                self._set_detached(older)
            was_kept = False
            if key in index:
                replaced = index.pop(key)  # popped, so that the index stays in order of age
                was_kept = replaced in self.operator_pins
                self._detach(replaced)
            elif self.journal is not None:
                new.append(block)
            index[key] = block
            block.state = readable
            generation += 1
            block.generation = generation
            words[slab.first_word + block.slot] = generation
            slab.tick_sum += tick - block.tick
            block.tick = tick
            policy.add(block)
            block.pins = 0
            slab.num_pinned -= 1
            if was_kept:
                self.operator_pins.pin((block,))
        self._generation = generation
        if self.journal is not None:
            self.journal.came(new)

    def fail_put(self, block: Block) -> None:
        """Discard `block`. A previous copy stays."""
        if block.state is BlockState.WRITING:
            self._writing.remove(block)
            self._set_detached(block)
        self.unpin_all((block,))

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[Block | None]:
        """The readable block of each key or None, used now, and not evicted until `unpin_all`: the
        last one is the most recently used. Keys of a prompt come from its last to its first."""
        index = self._index.get(namespace)
        if index is None:
            return [None] * len(keys)
        tick = self._next_tick()
        blocks = [*map(index.get, keys)]
        for block in blocks:
            if block is not None:
                slab = block.slab
                slab.tick_sum += tick - block.tick
                block.tick = tick
                if block.pins == 0:
                    slab.num_pinned += 1
                block.pins += 1
        self._use([block for block in blocks if block is not None])
        return blocks

    def unpin_all(self, blocks: Iterable[Block]) -> None:
        """Release one pin of each."""
        for block in blocks:
            block.pins -= 1
            if block.pins > 0:
                continue
            assert block.pins == 0, "unpinned more often than pinned"
            block.slab.num_pinned -= 1
            if block.state is BlockState.DETACHED:
                self._detached.remove(block)
                self._free(block)
            else:
                self._class_of(block).policy.unpin(block)

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Mark as used now: the last one is the most recently used. Returns how many are
        readable."""
        index = self._index.get(namespace, {})
        blocks = [block for block in map(index.get, keys) if block is not None]
        tick = self._next_tick()
        for block in blocks:
            block.slab.tick_sum += tick - block.tick
            block.tick = tick
        self._use(blocks)
        return len(blocks)

    def pin_for_operator(self, namespace: str, keys: Iterable[bytes]) -> PinCount:
        """Add an operator's pin to the readable blocks of `keys`, once each. Not a use.

        The tier owns this pin. It ends when its block is removed, and moves to a block that
        replaces it.
        """
        return self.operator_pins.pin(self._readable(namespace, keys))

    def unpin_for_operator(self, namespace: str, keys: Iterable[bytes]) -> PinCount:
        """Remove the operator's pins of `keys`. The result counts the pins that were removed."""
        blocks, count = self.operator_pins.unpin(self._readable(namespace, keys))
        self.unpin_all(blocks)
        return count

    def readable_keys(self, namespace: str) -> list[bytes]:
        """The keys of all readable blocks, the longest published first."""
        return [*self._index.get(namespace, ())]

    def remove(self, block: Block) -> bool:
        """Remove `block` from the index; False when it was not in it. Pins keep its bytes."""
        if block.state is not BlockState.READABLE:
            return False
        del self._index[block.namespace][block.key]
        self._detach(block)
        if self.journal is not None:
            self.journal.went((block,))
        return True

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all, and drop those being written. Returns how
        many of them were readable."""
        removed = 0
        for name in [*self._index] if namespace is None else [namespace]:
            blocks = self._index.pop(name, {})
            removed += len(blocks)
            for block in blocks.values():
                self._detach(block)
            if self.journal is not None:
                self.journal.went(blocks.values())
        for block in self._writing.take(namespace):
            self._set_detached(block)
        return removed

    def expire(self, namespace: str, keys: Sequence[bytes], before: float) -> int:
        """Remove those of `keys` that were first put at `before` or earlier. Returns how many."""
        index = self._index.get(namespace, {})
        found = [index[key] for key in {*keys} if key in index]
        return sum(self.remove(block) for block in found if block.created_at <= before)

    def expire_some(self, before: float, at_most: int) -> int:
        """Remove up to `at_most` such blocks of any namespace. Returns how many."""
        removed = 0
        for index in self._index.values():
            # Blocks read from disk may be out of order; `expire` removes them when requested.
            old = takewhile(lambda block: block.created_at <= before, index.values())
            for block in [*islice(old, at_most - removed)]:
                removed += self.remove(block)
        return removed

    def at_quota(self, namespace: str, block_bytes: int) -> bool:
        """Whether the quota is why `begin_puts` had no room for a block of `namespace`."""
        slot_bytes = slot_bytes_for(block_bytes)
        taken = self._num_slots_of(namespace) * slot_bytes
        return 0 < self._namespace_bytes < taken + slot_bytes

    @property
    def pinned_bytes(self) -> int:
        """The size of all slots whose blocks are pinned or being written."""
        return self.slabs.pinned_bytes

    def is_empty(self, namespace: str) -> bool:
        """Whether no block of it is readable or being written."""
        return not self._index.get(namespace) and namespace not in self._writing.of

    def is_in_use(self, namespace: str) -> bool:
        """Whether a block of it is pinned or being written."""
        readable = self._index.get(namespace, {}).values()
        return namespace in self._writing.of or any(block.pins for block in readable)

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""
        return len(self._index.get(namespace, ()))

    def used_bytes(self, namespace: str) -> int:
        """The part of the budget that the readable blocks of one namespace take."""
        blocks = self._index.get(namespace)
        if not blocks:
            return 0
        return len(blocks) * next(iter(blocks.values())).slab.slot_bytes

    def stats(self) -> TierStats:
        """Occupancy now."""
        return TierStats(
            budget_bytes=self._arena.num_bytes,
            used_bytes=self.slabs.used_bytes,
            blocks=sum(len(blocks) for blocks in self._index.values()),
            pending=sum(1 for _ in self._writing),
            pinned=sum(slab.num_pinned for slab in self.slabs.slabs),
            free_slabs=len(self.slabs.free),
            kept=len(self.operator_pins),
            evicted_age_s=self._use_times.evicted_age_s,
        )

    def counters(self) -> dict[str, int]:
        """Counts of events since the start; names as in PROTOCOL.md."""
        return {
            "evicted": self._evicted,
            "slabs_recut": self._reclaim.slabs_recut,
            "keep_declined": self.operator_pins.num_declined,
        }

    def check(self) -> None:
        """Every slot is free or holds exactly one block, and every block is in one place."""
        readable = [block for blocks in self._index.values() for block in blocks.values()]
        self.slabs.check([*readable, *self._writing, *self._detached])
        assert all(block.state is BlockState.READABLE for block in readable)
        self._writing.check()
        assert all(b.state is BlockState.DETACHED and b.pins > 0 for b in self._detached)
        assert all(self._index[b.namespace][b.key] is b for b in readable)
        assert all(block in self._class_of(block).policy for block in readable)
        assert sum(len(c.policy) for c in self.slabs.classes.values()) == len(readable)
        assert all(self._index[b.namespace][b.key] is b and b.pins > 0 for b in self.operator_pins)
        self.operator_pins.check()
        if not self._arena.closed:
            words = self._arena.words
            self.slabs.check_words(words, readable, [*self._detached])
            assert all(words[block.word] == 0 for block in self._writing)

    # ── accounting ───────────────────────────────────────────────────────────────────────

    def _num_slots_of(self, namespace: str) -> int:
        """Slots of readable blocks, of pending writes, and of removed blocks still pinned."""
        writing = self._writing.of.get(namespace, {}).values()
        detached = sum(block.namespace == namespace for block in self._detached)
        return len(self._index.get(namespace, ())) + sum(map(len, writing)) + detached

    def _evict(self, block: Block) -> None:
        self._use_times.evicted(block.tick)
        self.remove(block)
        self._evicted += 1

    def _detach(self, block: Block) -> None:
        """`block` was removed from the index: free its slot now, or at its last unpin."""
        self._class_of(block).policy.remove(block)
        if block in self.operator_pins:
            self.operator_pins.remove(block)
            block.pins -= 1
            block.slab.num_pinned -= block.pins == 0
        if block.pins == 0:
            self._free(block)
            block.state = BlockState.DETACHED
        else:
            self._set_detached(block)

    def _readable(self, namespace: str, keys: Iterable[bytes]) -> Iterator[Block]:
        """The readable blocks of `keys`, once each."""
        index = self._index.get(namespace, {})
        return (index[key] for key in dict.fromkeys(keys) if key in index)

    def _free(self, block: Block) -> None:
        """Free the slot of `block`, which has no users. Its word is cleared first: it must be wrong
        before another block has the slot."""
        self._arena.words[block.word] = 0
        self.slabs.free_slot(block)

    def _use(self, blocks: Sequence[Block]) -> None:
        """A request used `blocks`, all of one namespace and so of one class."""
        if blocks:
            self._class_of(blocks[0]).policy.use_all(blocks)

    def _find(self, namespace: str, key: bytes) -> Block | None:
        """The block of `key`, also one that is being written."""
        return self.peek(namespace, key) or self._writing.newest(namespace, key)

    def _set_detached(self, block: Block) -> None:
        self._class_of(block).policy.abandon(block)
        block.state = BlockState.DETACHED
        self._detached.add(block)

    def _next_tick(self) -> int:
        self._tick += 1
        self._use_times.used(self._tick)
        return self._tick

    def _class_of(self, block: Block) -> SizeClass:
        return self.slabs.classes[block.slab.slot_bytes]
