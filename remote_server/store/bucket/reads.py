"""Reads from the bucket: a pack is read whole, once for all that wait for its rows.

A streamed get asks for a few rows at a time. The rows of a pack that are asked for later come from
its body, which stays here for a while.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from remote_server.store.bucket import transfers
from remote_server.store.bucket.index import BucketBlock, Pack
from remote_server.store.bucket.objects import Failure, Objects
from remote_server.store.bucket.transfers import ReadBody, Want
from remote_server.store.disk.pool import Job, Pool, Priority
from remote_server.store.tier import OnRead

BODY_BYTES = 64 << 20
"""Bodies that stay after their first read."""


class Waiter(NamedTuple):
    """A row that is wanted, and the function that gets whether it came intact."""

    want: Want
    on_end: Callable[[bool], None]


class PackReads:
    """The reads under way and the bodies read last. One thread."""

    def __init__(
        self,
        objects: Objects,
        pool: Pool,
        counters: Counter[str],
        name_of: Callable[[Pack], str],
        unpin: Callable[[BucketBlock], None],
        on_failed: Callable[[Pack, Failure | None], None],
        max_body_bytes: int = BODY_BYTES,
    ) -> None:
        """`on_failed` gets a pack whose bytes did not come, with the reason, or were damaged."""
        self._objects = objects
        self._pool = pool
        self._counters = counters
        self._name_of = name_of
        self._unpin = unpin
        self._on_failed = on_failed
        self._max_body_bytes = max_body_bytes
        self._waiting: dict[Pack, list[Waiter]] = {}
        """Rows that wait for a body which is on its way."""
        self._bodies: OrderedDict[Pack, memoryview] = OrderedDict()
        self._body_bytes = 0

    def read(
        self,
        blocks: Sequence[BucketBlock],
        views: Sequence[memoryview | None],
        on_read: OnRead,
    ) -> None:
        """`Tier.read`; rows without a view are verified."""
        results: dict[int, bool] = {}

        def one_came(place: int, good: bool) -> None:
            results[place] = good
            if len(results) == len(blocks):
                on_read([results[each] for each in range(len(blocks))])

        by_pack: dict[Pack, list[Waiter]] = {}
        for place, (block, view) in enumerate(zip(blocks, views, strict=True)):
            want = Want(block, view)
            by_pack.setdefault(block.pack, []).append(Waiter(want, partial(one_came, place)))
        for pack, wants in by_pack.items():
            self._read_pack(pack, wants)

    def _read_pack(self, pack: Pack, wants: list[Waiter]) -> None:
        if pack in self._waiting:
            self._waiting[pack] += wants
        elif pack in self._bodies:
            self._bodies.move_to_end(pack)
            self._copy(pack, self._bodies[pack], wants)
        else:
            self._waiting[pack] = []
            name, rows = self._name_of(pack), [each.want for each in wants]
            work = partial(transfers.read_rows, self._objects, name, rows)
            finish = partial(self._body_read, pack, wants)
            self._pool.submit(Job(Priority.READ, lambda _: work(), finish))

    def _copy(self, pack: Pack, body: memoryview, wants: list[Waiter]) -> None:
        rows, begin = [each.want for each in wants], pack.rows[0].offset
        work = partial(transfers.copy_rows, body, begin, rows)
        self._counters["packs_copied"] += 1
        self._pool.submit(Job(Priority.READ, lambda _: work(), partial(self._end, pack, wants)))

    def _body_read(self, pack: Pack, wants: list[Waiter], read: ReadBody | None) -> None:
        waiting = self._waiting.pop(pack)
        read = read or ReadBody(None, [False] * len(wants), Failure.OTHER)
        if read.body is not None:
            self._counters["packs_read"] += 1
            self._counters["read_bytes"] += read.body.nbytes
            self._keep(pack, read.body)
            if waiting:
                self._copy(pack, read.body, waiting)
        elif read.failure is not None:
            self._counters["read_failed"] += len(wants) + len(waiting)
            self._on_failed(pack, read.failure)
            self._answer([*wants, *waiting], [False] * (len(wants) + len(waiting)))
            return
        self._end(pack, wants, read.intact)

    def _end(
        self,
        pack: Pack,
        wants: list[Waiter],
        intact: Sequence[bool] | None,
    ) -> None:
        intact = intact or [False] * len(wants)
        if not all(intact):
            self._counters["read_damaged"] += len(intact) - sum(intact)
            self._forget(pack)
            self._on_failed(pack, None)
        self._counters["read"] += sum(intact)
        self._answer(wants, intact)

    def _answer(self, wants: Sequence[Waiter], intact: Sequence[bool]) -> None:
        for each in wants:
            self._unpin(each.want.block)
        for each, good in zip(wants, intact, strict=True):
            each.on_end(good)

    def _keep(self, pack: Pack, body: memoryview) -> None:
        self._bodies[pack] = body
        self._body_bytes += body.nbytes
        while self._body_bytes > self._max_body_bytes:
            self._forget(next(iter(self._bodies)))

    def _forget(self, pack: Pack) -> None:
        body = self._bodies.pop(pack, None)
        if body is not None:
            self._body_bytes -= body.nbytes
