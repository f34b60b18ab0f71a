"""Writes to the bucket: the packs that are being written."""

from collections.abc import Callable, Sequence
from functools import partial

from remote_server.store.bucket.index.contents import Contents
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.pack import (
    BucketBlock,
    Pack,
    PackState,
    header_of,
    set_places,
)
from remote_server.store.bucket.transfers.pack_io import WrittenPack, write_pack
from remote_server.store.io_threads import Priority
from remote_server.store.tier import OnWritten, Written

MAX_WRITING_BYTES = 128 << 20
"""Of rows, which the caller holds in memory: eight packs of 16 MiB, one for each thread."""


class PackWrites:
    """Packs from their first row's place to the end of their write. One thread."""

    def __init__(
        self,
        context: BucketContext,
        contents: Contents,
        compress: str,
        on_end: Callable[[Pack, bool, Failure | None], Written],
    ) -> None:
        """`on_end` gets a pack, whether it was made or was there, and why its write failed; it
        publishes the pack and returns the result of its rows."""
        self._context = context
        self._counters = context.counters
        self._index = contents.index
        self._pending = contents.pending
        self._compress = compress
        self._on_end = on_end
        self._packs: set[Pack] = set()

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self._packs)

    @property
    def num_rows(self) -> int:
        """Those that are to be readable."""
        return sum(len(pack.rows) for pack in self._packs if not pack.is_cleared)

    def room_for(self, lengths: Sequence[int]) -> int:
        """How many rows of these `lengths` may be written beside those that are."""
        room = MAX_WRITING_BYTES - sum(row.length for pack in self._packs for row in pack.rows)
        for place, length in enumerate(lengths):
            room -= length
            if room < 0 and (place or self._packs):
                return place
        return len(lengths)

    def add(self, pack: Pack) -> None:
        """The caller ends it by `write` of its rows or by `fail`."""
        self._packs.add(pack)
        self._pending.add(pack.namespace, [row.key for row in pack.rows])

    def fail(self, pack: Pack) -> None:
        """Discard `pack`, unless another of its rows has had it discarded."""
        if pack in self._packs:
            self._remove(pack)
            pack.state = PackState.GONE

    def write(
        self, blocks: Sequence[BucketBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        """`Tier.write`: all rows of some packs."""
        results: dict[BucketBlock, Written] = {}

        def one_ended(pack: Pack, written: Written) -> None:
            results.update(dict.fromkeys(pack.rows, written))
            if len(results) == len(blocks):
                on_written([results[block] for block in blocks])

        view_of = dict(zip(blocks, views, strict=True))
        for pack in dict.fromkeys(block.pack for block in blocks):
            self._write(pack, [view_of[row] for row in pack.rows], partial(one_ended, pack))

    def _write(
        self, pack: Pack, views: list[memoryview], on_end: Callable[[Written], None]
    ) -> None:
        header = header_of(
            pack.namespace, pack.block_bytes,
            [row.key for row in pack.rows], [row.length for row in pack.rows],
            [row.checksum for row in pack.rows], [row.chain for row in pack.rows],
        )  # fmt: skip
        is_new = self._index.pack(pack.namespace, pack.key) is None
        work = partial(
            write_pack, self._context.objects, self._context.name_of(pack), header, views,
            create=is_new, compress=self._compress, room=self._context.room,
        )  # fmt: skip
        self._context.call(Priority.WRITE, work, partial(self._ended, pack, on_end))

    def _ended(
        self,
        pack: Pack,
        on_end: Callable[[Written], None],
        result: WrittenPack | None,
    ) -> None:
        self._remove(pack)
        made = False
        failure: Failure | None = Failure.OTHER
        if result is not None:
            made, failure = result.made, result.failure
            set_places(pack, result.header)
        written = self._on_end(pack, made, failure)
        if pack.state is not PackState.READABLE:
            pack.state = PackState.GONE
        self._count(pack, made, written)
        on_end(written)

    def _count(self, pack: Pack, made: bool, written: Written) -> None:
        if written is not Written.OK:
            self._counters[f"write_{written}"] += len(pack.rows)
        elif made:
            self._counters["packs_written"] += 1
            self._counters["written"] += len(pack.rows)
            self._counters["written_bytes"] += pack.num_bytes
            self._counters["written_plain_bytes"] += sum(row.length for row in pack.rows)
        else:
            self._counters["packs_existed"] += 1

    def _remove(self, pack: Pack) -> None:
        self._packs.remove(pack)
        if not pack.is_cleared:
            self._pending.end(pack.namespace, [row.key for row in pack.rows])

    def clear(self, namespace: str | None) -> None:
        """Those of one namespace, or all, are to be removed when their write has ended."""
        for pack in self._packs:
            if namespace in (None, pack.namespace) and not pack.is_cleared:
                self._pending.end(pack.namespace, [row.key for row in pack.rows])
                pack.is_cleared = True

    def check(self) -> None:
        """Assert that each is still being written."""
        assert all(pack.state is PackState.WRITING for pack in self._packs)
