"""The accounting of segments, slots and their recency. No I/O; one thread."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from remote_server.protocol import ChainTable, Stretch
from remote_server.store.disk.files import File
from remote_server.store.disk.layout import SlotHeader, num_slots, slot_bytes_for, slot_offset
from remote_server.store.eviction.lru import LRU, EvictionPolicy, MakePolicy
from remote_server.store.pages import PAGE
from remote_server.store.tier import Written
from remote_server.store.use_times import UseTimes
from remote_server.values import GiB

# The size of everything in the directory besides segments: README, LOCK, and its own entries.
OVERHEAD_BYTES = 16 * PAGE

# Recovered blocks have ticks from 0: all of them are older than any use in this process.
FIRST_TICK = 1 << 40


def segment_bytes_for(budget: int) -> int:
    """A sixteenth of the budget, up to 1 GiB, then a sixty-fourth: room for several namespaces, and
    never more than some tens of files."""
    available = budget - OVERHEAD_BYTES
    return max(available // 64, min(available // 16, GiB)) // PAGE * PAGE


def largest_block(segment_bytes: int) -> int:
    """The largest block that fits a slot in a segment of that size."""
    return segment_bytes // PAGE * PAGE - 2 * PAGE


class BlockState(Enum):
    WRITING = auto()  # has a slot, whose content is not valid yet
    UNVERIFIED = auto()  # its header was found at start; its bytes are not hashed yet
    READABLE = auto()  # written or hashed by this process
    GONE = auto()  # out of the index; holds its slot until it is unpinned and erased


class DiskBlock(msgspec.Struct, eq=False, gc=False):
    """One copy of a block, in one slot. Compared by identity.

    `pins` counts its users: its writer, its readers, and jobs that hash or erase it. A pinned block
    is never evicted, and its slot never written to.
    """

    namespace: str
    key: bytes
    length: int
    checksum: int
    generation: int
    segment: "Segment"
    slot: int
    tick: int
    pins: int = 1
    state: BlockState = BlockState.WRITING
    branch: Any = None  # its segment in the tree of a policy that learns

    @property
    def offset(self) -> int:
        """The offset of its header in its segment; its bytes begin a page behind."""
        return slot_offset(self.slot, self.segment.slot_bytes)

    @property
    def block_bytes(self) -> int:
        """The size that its namespace was declared with."""
        return self.segment.slot_class.block_bytes

    @property
    def chain(self) -> Stretch:
        """Its chain fields."""
        return self.segment.chains[self.slot]

    @property
    def parent(self) -> int:
        """The `chains.row_id` of the row before it in its prompt; 0: not known."""
        return self.segment.chains.parent(self.slot)

    def set_parent(self, parent: int) -> None:
        self.segment.chains.set_parent(self.slot, self.segment.num_slots, parent)

    @property
    def header(self) -> SlotHeader:
        return SlotHeader(
            self.key, self.length, self.checksum, self.generation, self.chain, self.parent
        )


class SlotClass:
    """The segments of one namespace and one block size."""

    def __init__(self, namespace: str, block_bytes: int, policy: EvictionPolicy[DiskBlock]) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes_for(block_bytes)
        self.segments: dict[int, Segment] = {}
        self.open: dict[Segment, None] = {}  # those with a free slot, in the order they got one
        self.policy = policy  # of readable and unverified blocks
        self.evictions_until_check = 0  # until the next search in other classes' segments

    @property
    def used_bytes(self) -> int:
        return len(self.policy) * self.slot_bytes


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `file` is None until it is made, and stays None if that fails."""

    number: int
    num_bytes: int
    incarnation: int
    slot_class: SlotClass
    num_slots: int
    file: File | None = None
    failure: Written | None = None  # the reason that it could not be made
    retired: bool = False  # out of its class; stays until its last user is done
    free: list[int] = field(default_factory=list)  # a stack: the next slot to use is last
    unapplied: set[int] = field(default_factory=set)  # slots that recovery has not decided yet
    blocks: set[DiskBlock] = field(default_factory=set)
    num_busy: int = 0  # blocks pinned, and 1 for a recovery that is not done with it
    tick_sum: int = 0  # of `blocks`
    chains: ChainTable = field(default_factory=ChainTable)

    @property
    def slot_bytes(self) -> int:
        return self.slot_class.slot_bytes

    @property
    def mean_tick(self) -> float:
        """The recency of the segment: lower is colder; an empty one is below all others."""
        return self.tick_sum / len(self.blocks) if self.blocks else -1.0


class Segments:
    """All segments, and their part of the budget."""

    def __init__(
        self,
        budget: int,
        segment_bytes: int,
        age_clock_ns: Callable[[], int] = time.time_ns,
        make_policy: MakePolicy = LRU,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_policy = make_policy
        self.budget = budget
        self.segment_bytes = segment_bytes
        self.file_bytes = OVERHEAD_BYTES
        """The size of all files when everything decided is done. Files are removed and made in the
        order decided, so they do not exceed the budget in between either."""
        self.classes: dict[tuple[str, int], SlotClass] = {}
        self.retired: set[Segment] = set()  # still open
        self.unsettled: dict[str, set[Segment]] = {}
        """By namespace: segments whose blocks recovery has not all adopted yet."""
        self._next_number = 1
        self._tick = FIRST_TICK
        self.use_times = UseTimes(clock, FIRST_TICK)
        """A block that was found at the start counts as used then."""
        self._generation = 0
        self._age_clock_ns = age_clock_ns
        self.ahead_ns = 0
        """How far the generations found on disk are ahead of `age_clock_ns`."""

    def next_tick(self) -> int:
        """The time of a use, in this process's own count."""
        self._tick += 1
        self.use_times.used(self._tick)
        return self._tick

    def now_ns(self) -> int:
        """The time in units of generations: never before those found on disk."""
        return self._age_clock_ns() + self.ahead_ns

    def cutoff(self, max_age_s: float) -> int:
        """The generation of blocks written that long ago."""
        return self.now_ns() - int(max_age_s * 1e9)

    def next_generation(self) -> int:
        """Higher than all before, those of earlier servers included once they were seen."""
        self._generation = max(self._generation + 1, self.now_ns())
        return self._generation

    def saw_generation(self, generation: int) -> None:
        """Record a generation found on disk: new ones must be higher. When the clock is behind it,
        because it was set back between two boots, the true age is unknown, and the block counts as
        written now."""
        self._generation = max(self._generation, generation)
        self.ahead_ns = max(self.ahead_ns, generation - self._age_clock_ns())

    @property
    def all(self) -> Iterator[Segment]:
        """The segments in use, of all classes."""
        for slot_class in self.classes.values():
            yield from slot_class.segments.values()

    @property
    def num_to_make(self) -> int:
        return max(0, (self.budget - self.file_bytes) // self.segment_bytes)

    def slot_class(self, namespace: str, block_bytes: int) -> SlotClass:
        key = namespace, block_bytes
        if key not in self.classes:
            self.classes[key] = SlotClass(namespace, block_bytes, self._make_policy())
        return self.classes[key]

    def add(self, slot_class: SlotClass, incarnation: int) -> Segment:
        """A new segment, all of whose slots are free. There must be budget for it."""
        count = num_slots(self.segment_bytes, slot_class.block_bytes)
        segment = Segment(
            self._next_number, self.segment_bytes, incarnation, slot_class, count,
            free=list(range(count - 1, -1, -1)),  # the first slot is used first
        )  # fmt: skip
        self._enter(segment)
        slot_class.open[segment] = None
        return segment

    def add_found(
        self, number: int, num_bytes: int, incarnation: int, slot_class: SlotClass, file: File
    ) -> Segment:
        """A segment of an earlier server; none of its slots is usable yet."""
        count = num_slots(num_bytes, slot_class.block_bytes)
        segment = Segment(number, num_bytes, incarnation, slot_class, count, file)
        segment.unapplied = set(range(count))
        segment.num_busy = 1
        self.unsettled.setdefault(slot_class.namespace, set()).add(segment)
        self._enter(segment)
        return segment

    def settle(self, segment: Segment) -> None:
        """All its blocks are known, or it is retired."""
        namespace = segment.slot_class.namespace
        unsettled = self.unsettled.get(namespace, set())
        unsettled.discard(segment)
        if not unsettled:
            self.unsettled.pop(namespace, None)

    def _enter(self, segment: Segment) -> None:
        self._next_number = max(self._next_number, segment.number + 1)
        self.file_bytes += segment.num_bytes
        segment.slot_class.segments[segment.number] = segment

    def take_slots(self, slot_class: SlotClass, at_most: int) -> tuple[Segment, Sequence[int]]:
        """Up to `at_most` slots of an open segment, neighbours if possible. There must be one."""
        segment = next(iter(slot_class.open))
        slots = segment.free[-at_most:]
        del segment.free[-at_most:]
        slots.reverse()
        if not segment.free:
            del slot_class.open[segment]
        return segment, slots

    def place(self, block: DiskBlock) -> None:
        """Account for `block` in its slot."""
        block.segment.blocks.add(block)
        block.segment.tick_sum += block.tick
        block.segment.num_busy += block.pins > 0

    def free_slot(self, block: DiskBlock) -> None:
        """Free the slot of `block`, which must have no users."""
        segment = block.segment
        segment.slot_class.policy.abandon(block)
        segment.blocks.remove(block)
        segment.tick_sum -= block.tick
        self.add_free(segment, [block.slot])

    def add_free(self, segment: Segment, slots: Iterable[int]) -> None:
        segment.free.extend(slots)
        if segment.free and not segment.retired:
            segment.slot_class.open[segment] = None

    def use_all(self, blocks: Sequence[DiskBlock], tick: int) -> None:
        """`blocks` of one namespace were read or touched at `tick`."""
        by_class: dict[SlotClass, list[DiskBlock]] = {}
        for block in blocks:
            self.set_tick(block, tick)
            by_class.setdefault(block.segment.slot_class, []).append(block)
        for slot_class, used in by_class.items():
            slot_class.policy.use_all(used)

    def set_tick(self, block: DiskBlock, tick: int) -> None:
        """Its last use is `tick`, for the age of its segment."""
        block.segment.tick_sum += tick - block.tick
        block.tick = tick

    def pin(self, block: DiskBlock) -> None:
        block.segment.num_busy += block.pins == 0
        block.pins += 1

    def unpin(self, block: DiskBlock) -> bool:
        """Release one pin; True when it was the last."""
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        block.segment.num_busy -= block.pins == 0
        return block.pins == 0

    def retire(self, segment: Segment) -> None:
        """Take no more slots of it. Its bytes count until `forget`."""
        segment.retired = True
        self.settle(segment)
        slot_class = segment.slot_class
        del slot_class.segments[segment.number]
        slot_class.open.pop(segment, None)
        self.retired.add(segment)
        if not slot_class.segments:
            del self.classes[slot_class.namespace, slot_class.block_bytes]

    def forget(self, segment: Segment) -> None:
        """Its file will be removed before another one is made."""
        self.retired.remove(segment)
        self.file_bytes -= segment.num_bytes

    def coldest_of_others(self, slot_class: SlotClass) -> Segment | None:
        """The least recently used segment of the other classes, without users."""
        idle = [s for s in self.all if s.slot_class is not slot_class and s.num_busy == 0]
        return min(idle, key=lambda segment: segment.mean_tick, default=None)

    def check(self, blocks: Sequence[DiskBlock]) -> None:
        """Assert that every slot is free, or is recovery's, or holds exactly one of `blocks`.

        Lists are compared, not sets: a set cannot show two blocks in one slot.
        """
        taken: dict[Segment, list[DiskBlock]] = {s: [] for s in (*self.all, *self.retired)}
        for block in blocks:
            taken[block.segment].append(block)
        numbers = [segment.number for segment in taken]
        assert len(numbers) == len(set(numbers))
        for segment, here in taken.items():
            slots = sorted([*segment.free, *segment.unapplied, *(block.slot for block in here)])
            assert slots == [*range(segment.num_slots)], f"segment {segment.number}: {slots}"
            assert len(here) == len(segment.blocks)
            assert set(here) == segment.blocks
            assert segment.tick_sum == sum(block.tick for block in here)
            busy = segment.num_busy - sum(block.pins > 0 for block in here)
            assert busy in (0, 1), f"segment {segment.number}: {busy} unknown users"
            assert busy or not segment.unapplied
            unsettled = segment in self.unsettled.get(segment.slot_class.namespace, ())
            assert unsettled == (bool(segment.unapplied) and not segment.retired)
            assert not segment.retired or segment.num_busy, "a retired segment is kept"
        for slot_class in self.classes.values():
            assert slot_class.segments, "a class without a segment is kept"
            assert set(slot_class.open) == {s for s in slot_class.segments.values() if s.free}
        total = sum(segment.num_bytes for segment in taken)
        assert self.file_bytes == OVERHEAD_BYTES + total <= self.budget
