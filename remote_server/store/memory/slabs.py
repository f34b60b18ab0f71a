"""The division of the arena: equal slabs, each cut into equal slots for one size class; and the
blocks in them, pending ones by key.

Each slot has a generation word. The words are in a table behind all slabs. A word behind each block
would separate blocks that one copy moves, and one frame carries, as a run of neighbours. Words at
the head of a slab would cost a slab of few large blocks a whole slot, and a block as large as a
slab would not fit. The table has room for the smallest slots, so the words of a slab keep their
place when it is cut anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from remote_server.protocol import ChainTable, Stretch, select
from remote_server.shm.mapping import BYTES_PER_WORD
from remote_server.store.eviction.lru import LRU, EvictionPolicy, MakePolicy
from remote_server.values import MiB

SLOT_ALIGNMENT = 64  # one cache line, so that no two blocks share one
_PAGE = 4096


def slab_bytes_for(memory: int) -> int:
    """The size of a slab: a sixteenth of the budget, up to 64 MiB, then a sixty-fourth.

    At least 16 slabs, so that several namespaces can share a small budget; larger ones with a large
    budget, so that the waste of an empty slab stays below 2 %.
    """
    return max(memory // 64, min(memory // 16, 64 * MiB)) // _PAGE * _PAGE


def memory_for_block(block_bytes: int) -> int:
    """The least budget whose slabs hold a block of `block_bytes`."""
    return 16 * (-(-slot_bytes_for(block_bytes) // _PAGE) * _PAGE)


def slot_bytes_for(block_bytes: int) -> int:
    return max(-(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, BYTES_PER_WORD)


class BlockState(Enum):
    WRITING = auto()  # has a slot; only the writer may touch its bytes
    READABLE = auto()  # in the index; its bytes never change again
    DETACHED = auto()  # out of the index, held by its pins; its bytes never change again


class Block(msgspec.Struct, eq=False, gc=False):
    """One copy of a block's bytes, in one slot. Immutable once readable; compared by identity.

    `pins` counts its users: its writer, each message that is being sent from its bytes, each lease,
    and an operator's pin. A pinned block is never evicted or overwritten.

    A msgspec struct, because thousands are made at once, in a third of the time of a dataclass. Not
    tracked by the garbage collector, because a pass over a million blocks stops all clients.
    """

    namespace: str
    key: bytes
    length: int
    checksum: int | None  # None when its sender sent none and no reader has needed it
    slab: "Slab"
    slot: int
    offset: int  # where its bytes start in the arena
    tick: int  # when it was last used, in the tier's own count of uses
    pins: int = 1  # the writer's
    state: BlockState = BlockState.WRITING
    generation: int = 0  # the value of its word while it is readable
    branch: Any = None  # its segment in the tree of a policy that learns
    created_at: float = 0.0  # when it was first published, by the store's clock; 0 without a TTL

    @property
    def word(self) -> int:
        """The index of its generation word in the arena's table."""
        return self.slab.first_word + self.slot

    @property
    def chain(self) -> Stretch:
        """Its chain fields."""
        return self.slab.chains[self.slot]

    @property
    def parent(self) -> int:
        """The `chains.row_id` of the row before it in its prompt; 0: not known."""
        return self.slab.chains.parent(self.slot)

    def set_parent(self, parent: int) -> None:
        self.slab.chains.set_parent(self.slot, self.slab.num_slots, parent)


class PendingWrites:
    """Pending writes. A key can have several: a forced put does not wait for the one before."""

    def __init__(self) -> None:
        self.of: dict[str, dict[bytes, list[Block]]] = {}
        """By namespace and key, of those that have any. Changed by this class alone."""

    def __iter__(self) -> Iterator[Block]:
        for by_key in self.of.values():
            for same_key in by_key.values():
                yield from same_key

    def newest(self, namespace: str, key: bytes) -> Block | None:
        """The last one of `key`."""
        same_key = self.of.get(namespace, {}).get(key)
        return same_key[-1] if same_key else None

    def check(self) -> None:
        assert all(block.state is BlockState.WRITING and block.pins == 1 for block in self)

    def add(self, namespace: str, blocks: Sequence[Block]) -> None:
        if blocks:
            by_key = self.of.setdefault(namespace, {})
            for block in blocks:
                by_key.setdefault(block.key, []).append(block)

    def remove(self, block: Block) -> None:
        """`block` was published, or failed."""
        by_key = self.of[block.namespace]
        same_key = by_key[block.key]
        if len(same_key) > 1:
            same_key.remove(block)
            return
        del by_key[block.key]
        if not by_key:
            del self.of[block.namespace]

    def publish(self, block: Block) -> Sequence[Block]:
        """Remove `block`, which is published. Returns the older pending blocks of its key, which
        are removed as well: `block` has replaced them already."""
        same_key = self.of[block.namespace][block.key]
        older: Sequence[Block] = ()
        if len(same_key) > 1:
            older = same_key[: same_key.index(block)]
            for one in older:
                self.remove(one)
        self.remove(block)
        return older

    def take(self, namespace: str | None) -> list[Block]:
        """Remove all of one namespace, or of all."""
        names = [*self.of] if namespace is None else [namespace]
        taken = [self.of.pop(name, {}) for name in names]
        return [block for by_key in taken for same_key in by_key.values() for block in same_key]


@dataclass(slots=True, eq=False)
class Slab:
    """One part of the arena. `slot_bytes` is 0 while it belongs to no size class."""

    number: int
    offset: int
    first_word: int
    slot_bytes: int = 0
    num_slots: int = 0
    free: list[int] = field(default_factory=list)  # a stack: the next slot to use is last
    blocks: set[Block] = field(default_factory=set)
    num_pinned: int = 0
    tick_sum: int = 0  # of `blocks`
    chains: ChainTable = field(default_factory=ChainTable)

    @property
    def mean_tick(self) -> float:
        return self.tick_sum / len(self.blocks)


class SizeClass:
    """The slabs of all namespaces whose blocks need the same slot, and their eviction policy."""

    def __init__(self, slot_bytes: int, policy: EvictionPolicy[Block]) -> None:
        self.slot_bytes = slot_bytes
        self.slabs: list[Slab] = []
        self.open: dict[Slab, None] = {}  # those with a free slot, in the order they got one
        self.policy = policy
        self.evictions_until_check = 0  # until the next search in other classes' slabs


class Slabs:
    """The slabs of an arena of `memory` bytes: each is free or belongs to a size class."""

    def __init__(
        self, memory: int, slab_bytes: int | None = None, make_policy: MakePolicy = LRU
    ) -> None:
        self._make_policy = make_policy
        self.slab_bytes = slab_bytes or slab_bytes_for(memory)
        words = self.slab_bytes // BYTES_PER_WORD
        self.slabs = [
            Slab(number, number * self.slab_bytes, number * words)
            for number in range(memory // self.slab_bytes)
        ]
        self.free = self.slabs[::-1]
        self.classes: dict[int, SizeClass] = {}
        self.used_bytes = 0

    def can_hold(self, block_bytes: int) -> bool:
        """Whether a slab has a slot for a block of that size."""
        return slot_bytes_for(block_bytes) <= self.slab_bytes

    def size_class(self, block_bytes: int) -> SizeClass:
        """The class of blocks of that size, which a slab must be able to hold. It is in `classes`
        only while it has slabs, so that unused sizes take no memory."""
        if not self.can_hold(block_bytes):
            raise ValueError(f"no slab of {self.slab_bytes} bytes holds {block_bytes}")
        slot_bytes = slot_bytes_for(block_bytes)
        return self.classes.get(slot_bytes) or SizeClass(slot_bytes, self._make_policy())

    def num_places(self, block_bytes: int) -> int:
        """Slots, if free slabs are cut for blocks of that size."""
        per_slab = self.slab_bytes // slot_bytes_for(block_bytes)
        cut = sum(len(c.slabs) * c.slabs[0].num_slots for c in self.classes.values())
        return len(self.free) * per_slab + cut

    @property
    def pinned_bytes(self) -> int:
        """The size of all slots whose blocks are pinned or being written."""
        return sum(slab.num_pinned * slab.slot_bytes for slab in self.slabs)

    def cut(self, size_class: SizeClass) -> None:
        """Give a free slab to `size_class`. There must be one."""
        slab = self.free.pop()
        self.classes[size_class.slot_bytes] = size_class
        slab.slot_bytes = size_class.slot_bytes
        slab.num_slots = self.slab_bytes // size_class.slot_bytes
        # The first slot is used first: neighbours in time become neighbours in memory, and a
        # run of neighbours can be sent as one frame.
        slab.free = list(range(slab.num_slots - 1, -1, -1))
        size_class.slabs.append(slab)
        size_class.open[slab] = None

    def place(
        self,
        size_class: SizeClass,
        namespace: str,
        wanted: Iterator[tuple[bytes, int, int | None]],
        at_most: int,
        tick: int,
        chain: Sequence[Stretch],
        first: int,
    ) -> list[Block]:
        """Up to `at_most` blocks in the slots of an open slab, neighbours where possible. There
        must be one. `wanted` has their keys, lengths and checksums. `chain` has the stretches of
        all keys of the put, or none; the next of `wanted` is the key number `first` of these."""
        slab = next(iter(size_class.open))
        slots = slab.free[-at_most:]
        del slab.free[-at_most:]
        slots.reverse()
        if not slab.free:
            del size_class.open[slab]
        start, slot_bytes = slab.offset, slab.slot_bytes
        self.used_bytes += slot_bytes * len(slots)
        new = [  # `slots` is first in the zip, so that its end consumes no key
            Block(namespace, key, length, checksum, slab, slot, start + slot * slot_bytes, tick)
            for slot, (key, length, checksum) in zip(slots, wanted, strict=False)
        ]
        slab.blocks.update(new)
        slab.tick_sum += tick * len(new)
        slab.num_pinned += len(new)
        slab.chains.set(
            slots, slab.num_slots, chain and select(chain, range(first, first + len(new)))
        )
        return new

    def free_slot(self, block: Block) -> None:
        """Free the slot of `block`, which must have no users.

        A slab that becomes empty is removed from its size class: any class may have it next.
        """
        slab = block.slab
        size_class = self.classes[slab.slot_bytes]
        slab.blocks.remove(block)
        slab.tick_sum -= block.tick
        slab.free.append(block.slot)
        self.used_bytes -= slab.slot_bytes
        size_class.open[slab] = None
        if not slab.blocks:
            del size_class.open[slab]
            size_class.slabs.remove(slab)
            if not size_class.slabs:
                del self.classes[size_class.slot_bytes]
            slab.slot_bytes = slab.num_slots = 0
            slab.free = []
            slab.chains = ChainTable()
            self.free.append(slab)

    def coldest_of_others(self, size_class: SizeClass) -> Slab | None:
        """The least recently used slab of the other classes, without pinned blocks."""
        others = [other.slabs for other in self.classes.values() if other is not size_class]
        idle = [slab for slabs in others for slab in slabs if slab.num_pinned == 0]
        return min(idle, key=lambda slab: slab.mean_tick, default=None)

    def check(self, blocks: list[Block]) -> None:
        """Assert that every slot is free or holds exactly one of `blocks`, and that all sums agree.

        Lists are compared, not sets: a set cannot show two blocks in one slot.
        """
        taken: dict[int, list[Block]] = {slab.number: [] for slab in self.slabs}
        for block in blocks:
            taken[block.slab.number].append(block)
        owned = [slab.number for c in self.classes.values() for slab in c.slabs]
        assert sorted([*owned, *(slab.number for slab in self.free)]) == [*range(len(self.slabs))]
        for slab in self.slabs:
            here = taken[slab.number]
            slots = sorted([*slab.free, *(block.slot for block in here)])
            assert slots == [*range(slab.num_slots)], f"slab {slab.number}: {slots}"
            assert len(here) == len(slab.blocks)
            assert set(here) == slab.blocks
            assert slab.tick_sum == sum(block.tick for block in here)
            assert slab.num_pinned == sum(block.pins > 0 for block in here)
            assert (slab.slot_bytes == 0) == (slab.number in {free.number for free in self.free})
        for slot_bytes, size_class in self.classes.items():
            assert all(slab.slot_bytes == slot_bytes for slab in size_class.slabs)
            assert all(slab.blocks for slab in size_class.slabs), "an empty slab is kept"
            assert size_class.slabs, "a size class without a slab is kept"
            assert set(size_class.open) == {slab for slab in size_class.slabs if slab.free}
        assert self.used_bytes == sum(block.slab.slot_bytes for block in blocks)

    def check_words(
        self, words: memoryview, readable: Sequence[Block], detached: Sequence[Block]
    ) -> None:
        """Assert that these blocks have generation words of their own, and free slots 0."""
        generations = {words[block.word] for block in readable}
        assert generations == {block.generation for block in readable}
        assert len(generations) == len(readable), "two blocks have one generation"
        assert 0 not in generations
        assert all(words[block.word] == block.generation for block in detached)
        for slab in self.slabs:
            assert not any(words[slab.first_word + slot] for slot in slab.free)
