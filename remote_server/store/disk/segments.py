"""Which slot is free, whose it is, and who leaves next. Accounting only: no I/O, one thread."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from remote_server.sizes import GiB
from remote_server.store.disk.files import File, Written
from remote_server.store.disk.layout import (
    PAGE,
    SlotHeader,
    num_slots,
    slot_bytes_for,
    slot_offset,
)
from remote_server.store.eviction import LRU, EvictionPolicy

# What the directory holds besides segments: README, LOCK, and its own entries.
OVERHEAD_BYTES = 16 * PAGE

# Recovered blocks are counted up from 0: all of them are older than any use in this process.
FIRST_TICK = 1 << 40


def segment_bytes_for(budget: int) -> int:
    """A sixteenth of the budget, up to 1 GiB, then a sixty-fourth: room for several namespaces,
    and never more than some tens of files."""
    available = budget - OVERHEAD_BYTES
    return max(available // 64, min(available // 16, GiB)) // PAGE * PAGE


def largest_block(segment_bytes: int) -> int:
    """The largest block with a slot in a segment of that size."""
    return segment_bytes // PAGE * PAGE - 2 * PAGE


class BlockState(Enum):
    WRITING = auto()  # has a slot, which holds nothing that counts yet
    UNVERIFIED = auto()  # its header was found at start; its bytes were not hashed yet
    READABLE = auto()  # written or hashed by this process
    GONE = auto()  # out of the index; keeps its slot for its pins, or until it is erased


class DiskBlock(msgspec.Struct, eq=False, gc=False):
    """One copy of a block, in one slot. Compared by identity.

    `pins` counts its users: its writer, its readers, and whoever is hashing or erasing it. A
    pinned block is never evicted, and its slot never written to.
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

    @property
    def offset(self) -> int:
        """Where its header is in its segment; its bytes are a page behind."""
        return slot_offset(self.slot, self.segment.slot_bytes)

    @property
    def header(self) -> SlotHeader:
        return SlotHeader(self.key, self.length, self.checksum, self.generation)


class SlotClass:
    """The segments of one namespace and one block size."""

    def __init__(self, namespace: str, block_bytes: int) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes_for(block_bytes)
        self.segments: dict[int, Segment] = {}
        self.open: dict[Segment, None] = {}  # those with a free slot, in the order they got one
        self.policy: EvictionPolicy[DiskBlock] = LRU()  # of what is readable or unverified
        self.evictions_until_check = 0  # until other classes' segments are looked at again

    @property
    def used_bytes(self) -> int:
        return len(self.policy) * self.slot_bytes


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `file` is None until it was made, and for good when it could not be."""

    number: int
    num_bytes: int
    incarnation: int
    slot_class: SlotClass
    num_slots: int
    file: File | None = None
    failure: Written | None = None  # why it could not be made
    retired: bool = False  # out of its class; stays until nobody uses it
    free: list[int] = field(default_factory=list)  # a stack: the next slot to use is last
    unapplied: set[int] = field(default_factory=set)  # slots whose blocks recovery will name
    blocks: set[DiskBlock] = field(default_factory=set)
    num_busy: int = 0  # blocks pinned, and 1 for a recovery that is not done with it
    tick_sum: int = 0  # of `blocks`

    @property
    def slot_bytes(self) -> int:
        return self.slot_class.slot_bytes

    @property
    def mean_tick(self) -> float:
        """The lower, the colder; below all others when it is empty."""
        return self.tick_sum / len(self.blocks) if self.blocks else -1.0


class Segments:
    """Every segment, and how much of the budget they take."""

    def __init__(
        self, budget: int, segment_bytes: int, age_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.budget = budget
        self.segment_bytes = segment_bytes
        self.file_bytes = OVERHEAD_BYTES
        """What the files will take when all that was decided is done. What was decided is done
        in that order, so that they never take more than the budget in between either."""
        self.classes: dict[tuple[str, int], SlotClass] = {}
        self.retired: set[Segment] = set()  # still open
        self.unsettled: dict[str, set[Segment]] = {}
        """By namespace: those whose blocks recovery has not all taken up yet."""
        self._next_number = 1
        self._tick = FIRST_TICK
        self._generation = 0
        self._age_clock_ns = age_clock_ns
        self.ahead_ns = 0
        """How far what was found on disk is ahead of `age_clock_ns`."""

    def next_tick(self) -> int:
        """The time of a use, in this process's own count."""
        self._tick += 1
        return self._tick

    def now_ns(self) -> int:
        """The time as generations have it: never before what was found on disk."""
        return self._age_clock_ns() + self.ahead_ns

    def next_generation(self) -> int:
        """Higher than all before, also those of earlier servers once these were seen."""
        self._generation = max(self._generation + 1, self.now_ns())
        return self._generation

    def saw_generation(self, generation: int) -> None:
        """It was found on disk: what is written from now on must be higher. Where the clock is
        behind it, because it was set back between two boots, the block is as old as can be told:
        written now."""
        self._generation = max(self._generation, generation)
        self.ahead_ns = max(self.ahead_ns, generation - self._age_clock_ns())

    @property
    def all(self) -> Iterator[Segment]:
        """Those in use, of all classes."""
        for slot_class in self.classes.values():
            yield from slot_class.segments.values()

    @property
    def num_to_make(self) -> int:
        return max(0, (self.budget - self.file_bytes) // self.segment_bytes)

    def slot_class(self, namespace: str, block_bytes: int) -> SlotClass:
        key = namespace, block_bytes
        if key not in self.classes:
            self.classes[key] = SlotClass(namespace, block_bytes)
        return self.classes[key]

    def add(self, slot_class: SlotClass, incarnation: int) -> Segment:
        """A new one, all of whose slots are free. There must be budget for it."""
        count = num_slots(self.segment_bytes, slot_class.block_bytes)
        segment = Segment(
            self._next_number, self.segment_bytes, incarnation, slot_class, count,
            free=list(range(count - 1, -1, -1)),  # handed out from the first on
        )  # fmt: skip
        self._enter(segment)
        slot_class.open[segment] = None
        return segment

    def add_found(
        self, number: int, num_bytes: int, incarnation: int, slot_class: SlotClass, file: File
    ) -> Segment:
        """One that an earlier server left; none of its slots is usable yet."""
        count = num_slots(num_bytes, slot_class.block_bytes)
        segment = Segment(number, num_bytes, incarnation, slot_class, count, file)
        segment.unapplied = set(range(count))
        segment.num_busy = 1
        self.unsettled.setdefault(slot_class.namespace, set()).add(segment)
        self._enter(segment)
        return segment

    def settle(self, segment: Segment) -> None:
        """All its blocks are known, or none of them is announced."""
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
        """Some slots of an open segment, neighbours where it can be. There must be one."""
        segment = next(iter(slot_class.open))
        slots = segment.free[-at_most:]
        del segment.free[-at_most:]
        slots.reverse()
        if not segment.free:
            del slot_class.open[segment]
        return segment, slots

    def place(self, block: DiskBlock) -> None:
        """`block` has its slot from here on."""
        block.segment.blocks.add(block)
        block.segment.tick_sum += block.tick
        block.segment.num_busy += block.pins > 0

    def free_slot(self, block: DiskBlock) -> None:
        """Take back the slot of `block`, which nobody uses any more."""
        segment = block.segment
        segment.blocks.remove(block)
        segment.tick_sum -= block.tick
        self.add_free(segment, [block.slot])

    def add_free(self, segment: Segment, slots: Iterable[int]) -> None:
        segment.free.extend(slots)
        if segment.free and not segment.retired:
            segment.slot_class.open[segment] = None

    def use(self, block: DiskBlock, tick: int) -> None:
        """It was written, read or touched at `tick`."""
        block.segment.tick_sum += tick - block.tick
        block.tick = tick
        block.segment.slot_class.policy.use(block)

    def pin(self, block: DiskBlock) -> None:
        block.segment.num_busy += block.pins == 0
        block.pins += 1

    def unpin(self, block: DiskBlock) -> bool:
        """Give back one pin; True when it was the last."""
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        block.segment.num_busy -= block.pins == 0
        return block.pins == 0

    def retire(self, segment: Segment) -> None:
        """Nobody gets a slot of it again. Its bytes count until `forget`."""
        segment.retired = True
        self.settle(segment)
        slot_class = segment.slot_class
        del slot_class.segments[segment.number]
        slot_class.open.pop(segment, None)
        self.retired.add(segment)
        if not slot_class.segments:
            del self.classes[slot_class.namespace, slot_class.block_bytes]

    def forget(self, segment: Segment) -> None:
        """Its file will be gone before anything else is made."""
        self.retired.remove(segment)
        self.file_bytes -= segment.num_bytes

    def coldest_of_others(self, slot_class: SlotClass) -> Segment | None:
        """The least recently used segment of the other classes that nobody is using now."""
        idle = [s for s in self.all if s.slot_class is not slot_class and s.num_busy == 0]
        return min(idle, key=lambda segment: segment.mean_tick, default=None)

    def check(self, blocks: Sequence[DiskBlock]) -> None:
        """Assert that every slot is free, or is recovery's, or holds exactly one of `blocks`.

        Lists are compared, not sets: a set cannot see two blocks in one slot.
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
            assert busy in (0, 1), f"segment {segment.number}: {busy} users nobody knows of"
            assert busy or not segment.unapplied
            unsettled = segment in self.unsettled.get(segment.slot_class.namespace, ())
            assert unsettled == (bool(segment.unapplied) and not segment.retired)
            assert not segment.retired or segment.num_busy, "a retired segment is kept"
        for slot_class in self.classes.values():
            assert slot_class.segments, "a class without a segment is kept"
            assert set(slot_class.open) == {s for s in slot_class.segments.values() if s.free}
        total = sum(segment.num_bytes for segment in taken)
        assert self.file_bytes == OVERHEAD_BYTES + total <= self.budget
