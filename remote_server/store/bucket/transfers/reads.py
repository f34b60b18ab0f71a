"""Reads from the bucket: rows of a pack that are wanted together come with one call of the store.

A row waits for half of the time that its reader has: then it is a miss, and the reader has the
other half for rows of other packs. A call that takes unusually long gets a second one beside it. A
call that brings nothing at all is stuck: its pack is a miss at once until the call has ended.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.pack import BucketBlock, Pack
from remote_server.store.bucket.transfers.hedging import Hedging
from remote_server.store.bucket.transfers.pack_io import Want
from remote_server.store.bucket.transfers.pack_read import Answer, PackRead, Waiter
from remote_server.store.io_threads import Job, Priority
from remote_server.store.tier import OnRead

NUM_READERS = 16
"""Reads of packs at a time, of all tenants, where there is room for them."""

WINDOW_BYTES = 128 << 20
"""Read ahead of one get: eight packs of 16 MiB at a time."""

MAX_COPYING = 4
"""Reads of a tenant whose rows are copied and hashed at a time: the calls wait for the store, but
copies take the processor from the loop."""

MAX_STUCK = NUM_READERS // 2
"""Stuck reads of a tenant beyond which no pack is read, so that threads are left for others."""

COUNTERS = (
    "packs_read", "read", "read_bytes", "read_damaged", "read_failed", "read_late", "read_stuck",
    "hedged", "hedge_won", "read_unused", "rows_fetched",
)  # fmt: skip


class PackReads:
    """The reads under way. One thread; `tick` is to be called often while there are some."""

    def __init__(
        self, context: BucketContext, on_failed: Callable[[Pack, Failure | None], None]
    ) -> None:
        """`on_failed` gets a pack whose bytes did not come, with the reason, or were damaged."""
        self._context = context
        self._counters = context.counters
        self._clock = context.clock
        self._on_failed = on_failed
        self._hedging = Hedging(context.clock)
        self._copying = threading.Semaphore(MAX_COPYING)
        self._reads: dict[Pack, list[PackRead]] = {}

    @property
    def are_under_way(self) -> bool:
        return bool(self._reads)

    def read(
        self,
        blocks: Sequence[BucketBlock],
        views: Sequence[memoryview | None],
        on_read: OnRead,
        deadline: float = inf,
    ) -> None:
        """`Tier.read`."""
        results: dict[int, bool] = {}

        def one_ended(place: int, good: bool) -> None:
            results[place] = good
            if len(results) == len(blocks):
                on_read([results[each] for each in range(len(blocks))])

        now = self._clock()
        ends_at = now + (deadline - now) / 2
        by_pack: dict[Pack, list[Waiter]] = {}
        for place, (block, view) in enumerate(zip(blocks, views, strict=True)):
            waiter = Waiter(Want(block, view), ends_at, partial(one_ended, place))
            by_pack.setdefault(block.pack, []).append(waiter)
        for pack, waiters in by_pack.items():
            self._read_pack(pack, waiters)

    def _read_pack(self, pack: Pack, waiters: list[Waiter]) -> None:
        under_way = self._reads.get(pack, ())
        stuck = sum(read.is_stuck for read in self._all())
        if stuck >= MAX_STUCK or any(read.is_stuck for read in under_way):
            self._counters["read_stuck"] += len(waiters)
            self._answer(waiters, [False] * len(waiters))
            return
        if any(read.add(waiters) for read in under_way):
            return
        rows = [waiter.want.block for waiter in waiters]
        begin, end = min(row.offset for row in rows), max(row.offset + row.stored for row in rows)
        read = PackRead(pack, begin, end, self._clock, self._copying, self._context.room)
        read.add(waiters)
        self._reads.setdefault(pack, []).append(read)
        self._hedging.first_call()
        self._call(read)

    def _call(self, read: PackRead, *, is_second: bool = False) -> None:
        read.num_calls += 1
        work = partial(read.run, self._context.objects, self._context.name_of(read.pack))
        finish = partial(self._ended, read, is_second)
        self._context.reads.submit(Job(Priority.READ, lambda _: work(), finish))

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _ended(self, read: PackRead, is_second: bool, answer: Answer | None) -> None:
        """One call of `read` has ended."""
        read.num_calls -= 1
        answer = answer or Answer(failure=Failure.OTHER)
        if answer.failure is not None:
            self._failed(read, answer.failure)
        elif not answer.skipped:
            self._context.availability.succeeded()
            self._hedging.took(read.num_bytes, answer.took_s)
            self._counters["packs_read"] += 1
            self._counters["read_bytes"] += answer.num_bytes
            self._counters["rows_fetched"] += read.num_rows
            self._counters["read_unused"] += not answer.waiters
            self._counters["hedge_won"] += is_second and bool(answer.waiters)
            self._filled(read.pack, answer)
        if read.num_calls:
            return
        self._miss(read.take_late(self._clock()), "read_late")
        if answer.skipped and read.has_waiters:  # they came after the thread had looked
            self._call(read)
            return
        self._forget(read)
        self._miss(read.take_all(), "read_failed")

    def _filled(self, pack: Pack, answer: Answer) -> None:
        num_damaged = len(answer.intact) - sum(answer.intact)
        if num_damaged:
            self._counters["read_damaged"] += num_damaged
            self._on_failed(pack, None)
        self._counters["read"] += sum(answer.intact)
        self._answer(answer.waiters, answer.intact)

    def _failed(self, read: PackRead, failure: Failure) -> None:
        """A call has failed. The rows go on waiting for another one, unless the pack is gone."""
        self._hedging.failed(failure)
        if not read.is_stuck:  # else its failure was counted
            self._on_failed(read.pack, failure)
        if failure is Failure.ABSENT:
            self._miss(read.take_all(), "read_failed")

    def _forget(self, read: PackRead) -> None:
        self._reads[read.pack].remove(read)
        if not self._reads[read.pack]:
            del self._reads[read.pack]

    # ── time ─────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """End the rows whose time is over, and begin the second calls that are due."""
        now = self._clock()
        for read in [*self._all()]:
            self._miss(read.take_late(now), "read_late")
            if read.began_at is None or read.is_stuck:
                continue
            running_s = now - read.began_at
            if self._hedging.is_stuck(read.num_bytes, running_s):
                self._is_stuck(read)
            elif self._may_hedge(read, running_s) and self._hedging.take():
                read.is_hedged = True
                self._counters["hedged"] += 1
                self._call(read, is_second=True)

    def _may_hedge(self, read: PackRead, running_s: float) -> bool:
        return (
            not read.is_hedged
            and read.has_waiters
            and self._context.availability.is_open
            and sum(each.num_calls for each in self._all()) < NUM_READERS
            and self._hedging.is_due(read.num_bytes, running_s)
        )

    def _is_stuck(self, read: PackRead) -> None:
        """Nothing has come for long: the rows are misses, and the store has failed once."""
        if read.is_won:
            return
        read.is_stuck = True
        self._on_failed(read.pack, Failure.TIMEOUT)
        self._miss(read.take_all(), "read_stuck")

    def _all(self) -> Iterator[PackRead]:
        return (read for reads in self._reads.values() for read in reads)

    def _miss(self, waiters: Sequence[Waiter], counter: str) -> None:
        self._counters[counter] += len(waiters)
        self._answer(waiters, [False] * len(waiters))

    def _answer(self, waiters: Sequence[Waiter], intact: Sequence[bool]) -> None:
        for each in waiters:
            each.want.block.pack.pins -= 1
        for each, good in zip(waiters, intact, strict=True):
            each.on_end(good)
