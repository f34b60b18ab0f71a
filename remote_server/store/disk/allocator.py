"""The allocator of segments: made, taken from other classes, and removed."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from remote_server.store.disk.context import DiskContext
from remote_server.store.disk.layout import SegmentHeader, num_slots
from remote_server.store.disk.removal import Removal
from remote_server.store.disk.segments import DiskBlock, Segment, SlotClass
from remote_server.store.disk.transfers import MadeSegment, dispose_segments, make_segment
from remote_server.store.io_threads import Job
from remote_server.store.pages import Scratch
from remote_server.store.tier import Written
from remote_server.values import format_bytes

log = logging.getLogger(__name__)

# The pause after a segment could not be made, for example because another program filled the disk.
# It doubles until one is made. Meanwhile each class keeps its segments: one taken from another
# would only be lost.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

# Keys are remembered as hashes, 100 bytes each. A segment with more slots than `MAX_OF_ONE` is
# granted for that many.
MAX_REMEMBERED, MAX_OF_ONE = 1 << 17, 1 << 16

Place = tuple[str, int]
"""A namespace and its block size."""


class Demand:
    """Distinct keys that were to be stored, by namespace, since its last segments were granted.

    Distinct, because one block that is offered a hundred times needs one slot. Beyond
    `MAX_REMEMBERED` the namespace with the oldest demand is dropped.
    """

    def __init__(self) -> None:
        self._wanted: dict[Place, dict[int, None]] = {}  # the latest demand is last
        self._num_remembered = 0

    def add(self, place: Place, keys: Sequence[bytes]) -> None:
        wanted = self._wanted.pop(place, {})
        self._wanted[place] = wanted
        before = len(wanted)
        wanted.update(dict.fromkeys(map(hash, islice(keys, max(0, MAX_OF_ONE - before)))))
        self._num_remembered += len(wanted) - before
        while self._num_remembered > MAX_REMEMBERED:
            self._drop(next(iter(self._wanted)))

    def is_enough(self, place: Place, num_slots: int) -> bool:
        """Whether so many slots would be used."""
        return len(self._wanted.get(place, ())) >= min(num_slots, MAX_OF_ONE)

    def granted(self, place: Place, num_slots: int) -> None:
        """Remove the keys that a segment of `num_slots` serves, the oldest first."""
        wanted = self._wanted.get(place, {})
        for key in [*islice(wanted, num_slots)]:
            del wanted[key]
            self._num_remembered -= 1
        if not wanted:
            self._wanted.pop(place, None)

    def forget(self, namespace: str | None) -> None:
        """Remove the demand of a cleared namespace, or of all."""
        for place in [place for place in self._wanted if namespace in (None, place[0])]:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self._num_remembered -= len(self._wanted.pop(place))


class SegmentAllocator:
    """Gives a class room: a new segment; the coldest segment of another class, if the class has
    none itself or that one has been idle for longer than its own oldest block; or the slots of its
    own oldest blocks.

    A segment is taken from another class only for a segment's worth of demand: otherwise one block
    of a namespace that is used once would cost another namespace all blocks of a file.

    Files are made and removed on an I/O thread, one after another in the order decided: they never
    exceed the budget, whichever job is late.
    """

    def __init__(self, context: DiskContext, removal: Removal) -> None:
        self._files, self._pool = context.files, context.pool
        self._segments, self._counters = context.segments, context.counters
        self._clock = context.clock
        self._removal = removal
        self._demand = Demand()
        self._make_again = self._clock()
        self._pause_s = FIRST_PAUSE_S
        self._is_missed = False
        """A segment could not be made, and `take_retry` has not shown that one may be."""
        self._waiting: dict[Segment, list[Job[Any]]] = {}
        self._file_jobs: deque[Callable[[], Job[Any]]] = deque()
        self._file_job_runs = False
        self._to_remove: set[Segment] = set()  # retired; their names may still exist
        self._waiting_for_gone = 0

    @property
    def clearing(self) -> bool:
        """Whether a caller waits for `when_gone`."""
        return self._waiting_for_gone > 0

    def close(self) -> None:
        """Remove retired segments. The pool must have stopped."""
        if self._to_remove:
            left = dispose_segments(self._files, [*self._to_remove], [], lambda _: None)
            left.run(Scratch())

    def wants(self, slot_class: SlotClass, keys: Sequence[bytes]) -> None:
        """Count `keys`, which are to be stored, as demand, whether there is room or not."""
        self._demand.add((slot_class.namespace, slot_class.block_bytes), keys)

    def lacks_demand(self, slot_class: SlotClass) -> bool:
        """Whether small demand is the reason that it gets no segment now."""
        may_take = self._clock() >= self._make_again and not self._segments.num_to_make
        return may_take and self._is_small(slot_class)

    def _is_small(self, slot_class: SlotClass) -> bool:
        """Its demand since its last segment is less than a segment."""
        place = slot_class.namespace, slot_class.block_bytes
        slots = num_slots(self._segments.segment_bytes, slot_class.block_bytes)
        return not self._demand.is_enough(place, slots)

    def forget_demand(self, namespace: str | None) -> None:
        """Of a namespace that was cleared, or of all."""
        self._demand.forget(namespace)

    def take_retry(self) -> bool:
        """True once after each pause that followed a failure: a segment may be made again."""
        is_due = self._is_missed and self._clock() >= self._make_again
        self._is_missed = self._is_missed and not is_due
        return is_due

    def make_room(self, slot_class: SlotClass, wanted: int) -> bool:
        """Open a segment of `slot_class`, with up to `wanted` slots. False: all are in use, or its
        policy refuses."""
        may_make = self._clock() >= self._make_again
        if may_make and self._segments.num_to_make:
            self._make(slot_class, [])
            return True
        victim = slot_class.policy.victim()
        if victim is None and slot_class.policy.refuses:
            return False
        if may_make and self._take_from_others(slot_class, victim):
            return True
        while victim is not None and wanted:
            self._removal.evict(victim)
            slot_class.evictions_until_check -= 1
            wanted -= 1
            victim = slot_class.policy.victim()
        return bool(slot_class.open)

    def when_made(self, segment: Segment, job: Job[Any]) -> None:
        """Submit `job` as soon as `segment` has a file, or cannot have one."""
        if segment in self._waiting:
            self._waiting[segment].append(job)
        else:
            self._pool.submit(job)

    def clear(self, segments: Iterable[Segment]) -> None:
        """Remove `segments` with all their blocks. Their names are removed first, so that no
        restart finds them; the space of those in use is freed when their last user is done."""
        idle: list[Segment] = []
        busy: list[Segment] = []
        for segment in segments:
            self._retire(segment)
            if segment.num_busy == 0:
                self._segments.forget(segment)
                idle.append(segment)
            else:
                busy.append(segment)
        if idle or busy:
            self._dispose(idle, busy)

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then` when no restart would find cleared blocks: now, or from `finish_jobs`. With
        False when the file system fails to remove or to sync."""
        if not self._to_remove:
            then(True)
            return
        self._waiting_for_gone += 1

        def finish(done: bool) -> None:
            self._waiting_for_gone -= 1
            then(done)

        # Behind all earlier jobs. Removals that failed there are tried once more.
        self._dispose([], [*self._to_remove], finish)

    def dispose_when_idle(self, segment: Segment) -> None:
        """Remove it if it is retired and its last user is done."""
        if segment.num_busy == 0 and segment in self._segments.retired:
            self._segments.forget(segment)
            self._to_remove.add(segment)
            self._dispose([segment])

    # ── new segments ─────────────────────────────────────────────────────────────────────

    def _take_from_others(self, slot_class: SlotClass, victim: DiskBlock | None) -> bool:
        """Replace another class's coldest segment, if it has been idle for longer than `victim`.

        With a victim at hand all segments are searched only once per segment's worth of evictions,
        so that the cost of a put does not depend on their number.
        """
        if self._is_small(slot_class):
            return False
        if victim is not None and slot_class.evictions_until_check > 0:
            return False
        gone: list[Segment] = []
        while not self._segments.num_to_make:  # more than one only where they are smaller
            other = self._segments.coldest_of_others(slot_class)
            if other is None or (victim is not None and other.mean_tick >= victim.tick):
                break
            for block in [*other.blocks]:  # none is pinned, so all are in the index
                self._removal.evict(block)
            self._retire(other)
            self._segments.forget(other)
            gone.append(other)
        if self._segments.num_to_make:
            self._counters["segments_taken"] += len(gone)
            self._make(slot_class, gone)
            return True
        if gone:
            self._dispose(gone)
        slot_class.evictions_until_check = self._segments.segment_bytes // slot_class.slot_bytes
        return False

    def _make(self, slot_class: SlotClass, gone: list[Segment]) -> None:
        """A new segment in place of those `gone`; its slots can be reserved at once."""
        segment = self._segments.add(slot_class, secrets.randbits(64))
        place = slot_class.namespace, slot_class.block_bytes
        self._demand.granted(place, segment.num_slots)
        self._waiting[segment] = []
        header = SegmentHeader(
            slot_class.namespace,
            slot_class.block_bytes,
            segment.num_bytes,
            segment.incarnation,
            self._segments.next_generation(),
        )
        finish = partial(self._made, segment, gone)
        self._queue_file_job(
            partial(make_segment, self._files, segment.number, header, gone, finish)
        )

    def _made(self, segment: Segment, gone: list[Segment], made: MadeSegment | None) -> None:
        self._to_remove.difference_update(gone)
        if made is None or made.file is None:
            self._give_up(segment, made.why if made is not None else Written.IO_ERROR)
        else:
            segment.file = made.file
            self._pause_s = FIRST_PAUSE_S
            self._counters["segments_made"] += 1
        for job in self._waiting.pop(segment):
            self._pool.submit(job)

    def _give_up(self, segment: Segment, why: Written) -> None:
        """The segment could not be made. Writes to it fail, and its slots are lost."""
        self._counters["segments_failed"] += 1
        if self._clock() >= self._make_again:  # of several under way the first one
            self._make_again = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._is_missed = True
        log.warning(
            "disk: no new segment of %s (%s); trying again in %.3g s",
            format_bytes(segment.num_bytes), why, self._make_again - self._clock(),
        )  # fmt: skip
        segment.failure = why
        if not segment.retired:
            self._retire(segment)
            self.dispose_when_idle(segment)

    # ── removed segments ─────────────────────────────────────────────────────────────────

    def _retire(self, segment: Segment) -> None:
        self._removal.retire(segment)
        self._to_remove.add(segment)

    def _dispose(
        self,
        idle: list[Segment],
        busy: Sequence[Segment] = (),
        then: Callable[[bool], None] = lambda _: None,
    ) -> None:
        def finish(done: bool | None) -> None:
            if done:
                self._to_remove.difference_update(idle, busy)
            then(bool(done))

        self._queue_file_job(partial(dispose_segments, self._files, idle, busy, finish))

    def _queue_file_job(self, make_job: Callable[[], Job[Any]]) -> None:
        self._file_jobs.append(make_job)
        self._start_file_job()

    def _start_file_job(self) -> None:
        if self._file_job_runs or not self._file_jobs:
            return
        job = self._file_jobs.popleft()()
        finish = job.finish

        def finish_and_start_next(result: Any) -> None:
            self._file_job_runs = False
            finish(result)
            self._start_file_job()

        job.finish = finish_and_start_next
        self._file_job_runs = True
        self._pool.submit(job)
