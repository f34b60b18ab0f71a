"""The bucket tier: packs in an object store, shared with other servers."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from remote_server.protocol import UNKNOWN, Stretch, TierStats, select
from remote_server.store.bucket.index.contents import Contents
from remote_server.store.bucket.index.names import Doubts
from remote_server.store.bucket.objects.availability import Availability
from remote_server.store.bucket.objects.objects import Failure, Objects
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.packs.pack import (
    BucketBlock,
    Pack,
    PackState,
    by_pack,
    header_of,
    make_pack,
)
from remote_server.store.bucket.transfers import reads
from remote_server.store.bucket.transfers.headers import HeaderReads
from remote_server.store.bucket.transfers.pack_io import Largest, ReadHeader
from remote_server.store.bucket.transfers.reads import PackReads
from remote_server.store.bucket.transfers.writes import PackWrites
from remote_server.store.bucket.upkeep import renewals
from remote_server.store.bucket.upkeep.removals import Removals
from remote_server.store.bucket.upkeep.renewals import Renewals
from remote_server.store.bucket.upkeep.sweep import Swept
from remote_server.store.chains import Group
from remote_server.store.io_threads import Pool
from remote_server.store.pages import padded
from remote_server.store.presence import Journal
from remote_server.store.tier import OnRead, OnWritten, Written

log = logging.getLogger(__name__)

COUNTERS = (
    *reads.COUNTERS, *renewals.COUNTERS,
    "packs_written", "packs_existed", "headers_read", "headers_absent",
    "headers_damaged", "headers_declined", "headers_version", "headers_codec", "headers_too_large",
    "written", "written_bytes", "written_plain_bytes", "write_io_error", "write_cleared",
    "dropped_absent", "removed", "cleared", "expired", "declined_busy", "declined_unavailable",
    "pauses", "listed", "sweeps", "swept_packs", "evicted",
    *(f"failed_{failure}" for failure in Failure),
)  # fmt: skip
"""Always present, from zero. `failed_*` counts calls of the store by the reason of their failure;
`failed_absent` a pack that was known and is gone."""


class BucketTier:
    """A `Tier` of packs under a soft budget that sweeping keeps. One thread.

    Other servers write into the same bucket, so a lookup can learn of a pack that this server never
    saw. No lookup waits for that: an unknown pack is absent, and its header is read meanwhile. The
    bytes of a pinned row may be gone when it is read: that row is a miss.
    """

    name = "bucket"
    window_bytes = reads.WINDOW_BYTES
    is_remote = True

    def __init__(
        self,
        objects: Objects,
        pool: Pool,
        tenant: str = "",
        *,
        budget: int = 0,
        pack_bytes: int = 16 << 20,
        block_bytes: int = 1 << 32,
        renew_age_s: float = 0.0,
        compress: str = "none",
        clock: Callable[[], float] = time.monotonic,
        readers: Pool | None = None,
        room: Room | None = None,
    ) -> None:
        """`budget` is what sweeps keep, 0 for none; no pack has more than `pack_bytes`, and no row
        more than `block_bytes`; `renew_age_s` the age at which they remove
        packs that were not renewed. `objects` and `pool` are the caller's, and so are `readers`,
        whose threads read packs: without them `pool` does. `room` is shared with other tenants."""
        room = room or Room()
        self.objects = objects
        self.pack_bytes = pack_bytes
        self._pool = pool
        self._readers = readers or pool
        self._tenant = tenant
        self._budget = budget
        self.availability = Availability(clock, objects.url)
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._contents = Contents(clock, self._counters)
        self._index, self._names = self._contents.index, self._contents.names
        self.store_clock = self._contents.clock
        self._doubts = Doubts(clock)
        self._writes = PackWrites(
            objects, pool, self._index, self._contents.pending, self._counters, self._name_of,
            self._written, compress, room)  # fmt: skip
        self._removals = Removals(objects, pool, tenant, self._failed)
        self._headers = HeaderReads(
            objects,
            pool,
            tenant,
            self._names,
            self._contents.pending,
            self._counters,
            self._header_read,
            Largest(block_bytes, pack_bytes),
        )
        self._renewals = Renewals(
            objects, pool, self.store_clock, renew_age_s, self._counters, self._name_of,
            self._renewed, room,
        )  # fmt: skip
        self.reads = PackReads(
            objects, self._readers, self._counters, self._name_of, self._unpin, self._read_failed,
            self.availability, clock, room,
        )  # fmt: skip

    # ── state ────────────────────────────────────────────────────────────────────────────

    def expect(self, namespace: str, groups: Sequence[Group]) -> None:
        """A lookup of the rows of `groups` follows: the headers that it needs are read in the
        background."""
        if not self.availability.is_open:
            self.availability.refuse()
            return
        rows = self._index.rows(namespace)
        self._headers.read(namespace, [group for group in groups if group.name not in rows])

    def is_known(self, namespace: str, key: bytes) -> bool:
        """Whether the pack that `key` names need not be written."""
        return self._contents.has(namespace, key)

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        return self._contents.states(namespace, keys, are_readable=self.availability.is_open)

    known_states = lookup_all

    def holds(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._index.row(namespace, key)
        return block is not None and block.checksum == checksum

    def peek(self, namespace: str, key: bytes) -> BucketBlock | None:
        return self._index.row(namespace, key)

    def take_retry(self) -> bool:
        return False

    def num_places(self, block_bytes: int) -> int:
        return 0

    def namespaces(self) -> Mapping[str, int]:
        return self._index.namespaces()

    def has_room_of_its_own(self, namespace: str, block_bytes: int) -> bool:
        return True

    def where(self, block: BucketBlock) -> str:
        return f"{self._name_of(block.pack)}, one of {len(block.pack.rows)} rows"

    def age_s(self, block: BucketBlock) -> float:
        return self.store_clock.age_s(block.pack.modified)

    def stored_bytes(self, length: int) -> int:
        return padded(length)

    @property
    def busy(self) -> bool:
        return self._pool.busy or self._readers.busy

    @property
    def num_names(self) -> int:
        """Packs that are known to be in the bucket."""
        return len(self._names)

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def room_for(self, lengths: Sequence[int]) -> int:
        return self._writes.room_for(lengths)

    def begin_puts(
        self,
        namespace: str,
        keys: Sequence[bytes],
        block_bytes: int,
        lengths: Sequence[int],
        checksums: Sequence[int],
        chain: Sequence[Stretch] = (),
    ) -> list[BucketBlock]:
        """Rows of packs that `chain` makes whole, and a pack of its own for each other row."""
        if not self.availability.is_open:
            self._counters["declined_unavailable"] += len(keys)
            return []
        num = self.room_for(lengths)
        self._counters["declined_busy"] += len(keys) - num
        fields = [one.part(i, 1) for one in chain for i in range(one.rows)] or [UNKNOWN] * len(keys)
        rows: dict[int, BucketBlock] = {}
        for group in packs_in(
            keys[:num], select(chain, range(num)), block_bytes, self.pack_bytes, with_tails=True
        ):
            if self._removals.has(namespace, group.name):
                self._counters["declined_busy"] += num - len(rows)
                break
            header = header_of(
                namespace, block_bytes, group.keys,
                [lengths[place] for place in group.places],
                [checksums[place] for place in group.places],
                [fields[place] for place in group.places],
            )  # fmt: skip
            pack = make_pack(header, self.store_clock.date(), PackState.WRITING)
            self._writes.add(pack)
            rows.update(zip(group.places, pack.rows, strict=True))
        return [rows[place] for place in range(len(rows))]

    def write(
        self, blocks: Sequence[BucketBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        self._writes.write(blocks, views, on_written)

    def _written(self, pack: Pack, made: bool, failure: Failure | None) -> Written:
        """The write of `pack` has ended; not `made`: it was there."""
        if failure is not None:
            self._failed(failure, (pack.namespace, pack.key))
            return Written.IO_ERROR
        self.availability.succeeded()
        if pack.is_cleared:
            self._removals.remove(pack.namespace, pack.key)
            return Written.CLEARED
        self._names.is_there(pack.namespace, pack.key)
        self._headers.is_written(pack.namespace, pack.key)
        if made:  # the rows of another server's may differ in bits: a lookup reads its header
            self._index.add(pack)
        return Written.OK

    def fail_put(self, block: BucketBlock) -> None:
        self._writes.fail(block.pack)

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[BucketBlock | None]:
        rows = self._index.rows(namespace) if self.availability.is_open else {}
        blocks = [rows.get(key) for key in keys]
        for block in blocks:
            if block is not None:
                block.pack.pins += 1
                self._index.use(block.pack)
                self._renewals.used(block.pack)
        return blocks

    def unpin_all(self, blocks: Iterable[BucketBlock]) -> None:
        for block in blocks:
            self._unpin(block)

    def _unpin(self, block: BucketBlock) -> None:
        block.pack.pins -= 1

    together = staticmethod(by_pack)

    def read(
        self, blocks: Sequence[BucketBlock], views: Sequence[memoryview], on_read: OnRead,
        deadline: float = inf,
    ) -> None:  # fmt: skip
        self.reads.read(blocks, views, on_read, deadline)

    def verify(self, blocks: Sequence[BucketBlock], on_read: OnRead) -> None:
        """A call that fails proves nothing about the bytes: a row is bad when it is damaged or
        gone."""

        def ended(results: list[bool]) -> None:
            there = [self._names.has(block.namespace, block.pack.key) for block in blocks]
            on_read([good or here for good, here in zip(results, there, strict=True)])

        self.reads.read(blocks, [None] * len(blocks), ended)

    def _read_failed(self, pack: Pack, failure: Failure | None) -> None:
        """A pack's bytes did not come, or were damaged (no `failure`)."""
        if failure is not None:
            self._failed(failure, (pack.namespace, pack.key))
        else:
            self.availability.succeeded()
        if failure in (None, Failure.ABSENT, Failure.SHORT):
            self._counters["dropped_absent"] += failure is Failure.ABSENT
            self._contents.drop(pack)
            if failure is not Failure.ABSENT:
                self._is_wrong(pack.namespace, pack.key, pack.seal)
        elif pack.state is PackState.READABLE:
            self._index.drop(pack)  # a lookup reads its header again: none promises it meanwhile

    def _is_wrong(self, namespace: str, key: bytes, seal: int | None = None) -> None:
        """The bytes of a pack were wrong, which is a miss. It is asked for again in a minute."""
        if self._doubts.are_confirmed(namespace, key):
            self._removals.remove(namespace, key, seal)

    def _renewed(self, pack: Pack, failure: Failure | None) -> None:
        """The renewal of `pack` has ended."""
        if failure is not None:
            self._failed(failure, (pack.namespace, pack.key))
        elif not self._names.has(pack.namespace, pack.key):  # removed or cleared meanwhile
            self._removals.remove(pack.namespace, pack.key)

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        blocks = self.pin_all(namespace, keys)
        self.unpin_all(found := [block for block in blocks if block is not None])
        return len(found)

    # ── headers ──────────────────────────────────────────────────────────────────────────

    def _header_read(self, namespace: str, key: bytes, read: ReadHeader) -> None:
        """The header of the pack that `key` names has come, or not."""
        if read.failure not in (None, Failure.ABSENT):
            if read.failure is Failure.LOST:  # perhaps by this pack: no lookup waits for it soon
                self._names.is_gone(namespace, key)
            self._failed(read.failure, (namespace, key))
            return
        self.availability.succeeded()
        if read.foreign:
            self._names.cannot_be_read(namespace, key)
        elif read.header is None:
            self._names.is_gone(namespace, key)
            if read.damage:
                log.warning("bucket: a pack of %s is damaged: %s", namespace, read.damage)
                self._is_wrong(namespace, key)
        else:
            self._names.is_there(namespace, key)
            self.store_clock.saw(read.modified)
            if self._index.pack(namespace, key) is None and not self._removals.has(namespace, key):
                self._index.add(
                    make_pack(read.header, read.modified, PackState.READABLE, read.start)
                )

    def listed(self, names: Mapping[str, Sequence[int]], now: float) -> None:
        """The packs that a list of the bucket has shown, and the store's time then."""
        self._contents.listed(names, now)

    def swept(self, swept: Swept) -> None:
        """A sweep has ended."""
        if swept.failure is not None:
            self._failed(swept.failure)
        else:
            self._contents.swept(swept)

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: BucketBlock) -> bool:
        """Remove the pack of `block`: a row cannot be removed from an object."""
        if block.pack.state is not PackState.READABLE:
            return False
        self._counters["removed"] += len(block.pack.rows)
        self._contents.drop(block.pack)
        self._removals.remove(block.namespace, block.pack.key)
        return True

    def remove_other(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._index.row(namespace, key)
        return block is not None and block.checksum != checksum and self.remove(block)

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> None:
        self._contents.expire(namespace, keys, max_age_s)

    def expire_some(self, max_age_s: float, at_most: int) -> None:
        self._contents.expire_some(max_age_s, at_most)

    def clear(self, namespace: str | None) -> int:
        self._writes.clear(namespace)
        self._headers.forget(namespace)
        self._removals.clear(namespace)
        return self._contents.clear(namespace)

    def when_gone(self, then: Callable[[bool], None]) -> None:
        self._removals.when_gone(then)

    @property
    def clearing(self) -> bool:
        return self._removals.is_awaited

    # ── the loop, and accounts ───────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        for pool in {self._pool, self._readers}:
            pool.finish_jobs()

    def report_to(self, journal: Journal) -> None:
        self._index.journal = journal

    def has(self, namespace: str, key: bytes) -> bool:
        return self._index.row(namespace, key) is not None

    def readable_keys(self, namespace: str) -> list[bytes]:
        return [*self._index.rows(namespace)]

    def num_blocks(self, namespace: str) -> int:
        return len(self._index.rows(namespace))

    def used_bytes(self, namespace: str) -> int:
        return sum(pack.num_bytes for pack in self._index.packs(namespace))

    def stats(self) -> TierStats:
        packs = self._index.packs(None)
        return TierStats(
            budget_bytes=self._budget,
            used_bytes=self._index.used_bytes + self._writes.num_bytes,
            blocks=self._index.num_rows,
            pending=self._writes.num_rows,
            pinned=sum(pack.pins for pack in packs),
            free_slabs=0,
        )

    def counters(self) -> dict[str, int]:
        refused = self.availability.num_refused
        return dict(self._counters) | {"names": self.num_names, "lookups_refused": refused}

    def check(self) -> None:
        self._index.check()
        self._writes.check()

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _name_of(self, pack: Pack) -> str:
        return object_name(self._tenant, pack.namespace, pack.key)

    def _failed(self, failure: Failure, of: tuple[str, bytes] | None = None) -> None:
        """`of` is the namespace and key of the pack that a call was for."""
        self._counters[f"failed_{failure}"] += 1
        if self.availability.failed(failure, of):
            self._counters["pauses"] += 1
