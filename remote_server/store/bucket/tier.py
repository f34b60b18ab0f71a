"""The bucket tier: packs in an object store, shared with other servers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from remote_server.protocol import UNKNOWN, TierStats, select
from remote_server.store.bucket.ends import Ends
from remote_server.store.bucket.index.contents import Contents
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.codecs import NONE
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.pack import (
    BucketBlock,
    PackState,
    by_pack,
    header_of,
    make_pack,
)
from remote_server.store.bucket.transfers import reads
from remote_server.store.bucket.transfers.headers import HeaderReads
from remote_server.store.bucket.transfers.pack_io import Largest
from remote_server.store.bucket.transfers.reads import PackReads
from remote_server.store.bucket.transfers.writes import PackWrites
from remote_server.store.bucket.upkeep import renewals
from remote_server.store.bucket.upkeep.removals import Removals
from remote_server.store.bucket.upkeep.renewals import Renewals
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.chains import Group
from remote_server.store.pages import padded
from remote_server.store.presence import Journal
from remote_server.store.tier import Offered, OnRead, OnWritten

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


class BucketSettings(NamedTuple):
    """The settings of a tenant's bucket."""

    largest: Largest = Largest(1 << 32, 16 << 20)
    """Of the rows and packs that are used; no pack is written with more."""
    limits: Limits = Limits()
    """What sweeps keep, and the age at which they remove packs that were not renewed."""
    compress: str = NONE
    """The codec of packs that are written."""


class BucketTier:
    """A `Tier` of packs under a soft budget that sweeping keeps. One thread.

    Other servers write into the same bucket, so a lookup can learn of a pack that this server never
    saw. No lookup waits for that: an unknown pack is absent, and its header is read meanwhile. The
    bytes of a pinned row may be gone when it is read: that row is a miss.
    """

    name = "bucket"
    window_bytes = reads.WINDOW_BYTES
    is_remote = True

    def __init__(self, context: BucketContext, settings: BucketSettings) -> None:
        """Its parts are made in the order in which they meet a pack: it is looked up, written,
        read, renewed. `ends` updates the contents when each of that has ended."""
        context.counters.update(dict.fromkeys(COUNTERS, 0))
        self.context = context
        self._counters = context.counters
        self.availability = context.availability
        self._settings = settings
        self.pack_bytes = settings.largest.pack_bytes
        self._contents = Contents(context.clock, context.counters)
        self._index, self._names = self._contents.index, self._contents.names
        self.store_clock = self._contents.clock
        self._removals = Removals(context)
        ends = Ends(context, self._contents, self._removals)
        self.swept = ends.swept
        self._headers = HeaderReads(context, self._contents, settings.largest, ends.header_read)
        self._writes = PackWrites(context, self._contents, settings.compress, ends.written)
        self.reads = PackReads(context, ends.read_failed)
        limits = settings.limits
        renew_age_s = limits.max_age_s if limits.can_renew else 0.0
        self._renewals = Renewals(context, self.store_clock, renew_age_s, ends.renewed)

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
        return f"{self.context.name_of(block.pack)}, one of {len(block.pack.rows)} rows"

    def age_s(self, block: BucketBlock) -> float:
        return self.store_clock.age_s(block.pack.modified)

    def stored_bytes(self, length: int) -> int:
        return padded(length)

    @property
    def busy(self) -> bool:
        return self.context.pool.busy or self.context.reads.busy

    @property
    def num_names(self) -> int:
        """Packs that are known to be in the bucket."""
        return len(self._names)

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def room_for(self, lengths: Sequence[int]) -> int:
        return self._writes.room_for(lengths)

    def begin_puts(self, offered: Offered[int], block_bytes: int) -> list[BucketBlock]:
        """Rows of packs that the chain fields make whole, and a pack of its own for each other."""
        namespace, keys, lengths, checksums, chain = offered
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

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        blocks = self.pin_all(namespace, keys)
        self.unpin_all(found := [block for block in blocks if block is not None])
        return len(found)

    def listed(self, names: Mapping[str, Sequence[int]], now: float) -> None:
        """The packs that a list of the bucket has shown, and the store's time then."""
        self._contents.listed(names, now)

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
        self._removals.clear(namespace)
        return self._contents.clear(namespace)

    def when_gone(self, then: Callable[[bool], None]) -> None:
        self._removals.when_gone(then)

    @property
    def removing(self) -> bool:
        """A store that fails is not waited for."""
        removals = self._removals
        return removals.is_awaited or (removals.under_way and self.availability.is_open)

    # ── the loop, and accounts ───────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        for pool in {self.context.pool, self.context.reads}:
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
            budget_bytes=self._settings.limits.num_bytes,
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
