"""Reads of blocks: pinned, read, hashed and unpinned; and touches."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from remote_server.store.disk.files import Scratch
from remote_server.store.disk.index import Index, Leaving
from remote_server.store.disk.pool import Job, Pool, Priority
from remote_server.store.disk.segments import BlockState, DiskBlock, Segments
from remote_server.store.disk.transfers import (
    Piece,
    ReadResult,
    pieces_of,
    read_piece,
    runs_of,
    verify_piece,
)

OnRead = Callable[[list[bool]], None]


class Reading:
    """`pin_all`, `touch_all`, `read` and `verify` of `DiskTier`."""

    def __init__(
        self,
        index: Index,
        segments: Segments,
        leaving: Leaving,
        pool: Pool,
        counters: Counter[str],
    ) -> None:
        self._index = index
        self._segments = segments
        self._leaving = leaving
        self._pool = pool
        self._counters = counters

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        index = self._index.readable.get(namespace, {})
        tick = self._segments.next_tick()
        blocks = [*map(index.get, keys)]
        for block in blocks:
            if block is not None:
                self._segments.use(block, tick)
                self._segments.pin(block)
        return blocks

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        index = self._index.readable.get(namespace, {})
        tick, use = self._segments.next_tick(), self._segments.use
        blocks = [block for block in map(index.get, keys) if block is not None]
        for block in blocks:
            use(block, tick)
        return len(blocks)

    def read(
        self, blocks: Sequence[DiskBlock], views: Sequence[memoryview], on_read: OnRead
    ) -> None:
        results: dict[int, bool] = {}
        places = {id(view): place for place, view in enumerate(views)}
        assert len(places) == len(blocks), "a view for each block, and no view twice"

        def finish(piece: Piece, found: list[ReadResult] | None) -> None:
            verdicts = found or [ReadResult.IO_ERROR] * len(piece.blocks)
            for block, view, verdict in zip(piece.blocks, piece.views, verdicts, strict=True):
                results[places[id(view)]] = verdict is ReadResult.OK
                self._end(block, verdict)
            if len(results) == len(blocks):
                on_read([results[place] for place in range(len(blocks))])

        for piece in pieces_of(blocks, views):
            self._submit(piece, finish)

    def verify(self, blocks: Sequence[DiskBlock], on_read: OnRead) -> None:
        good: dict[DiskBlock, bool] = {}

        def finish(run: list[DiskBlock], found: list[ReadResult] | None) -> None:
            verdicts = found or [ReadResult.IO_ERROR] * len(run)
            for block, verdict in zip(run, verdicts, strict=True):
                good[block] = verdict is ReadResult.OK
                self._judge(block, verdict)
            if len(good) == len(blocks):
                on_read([good[block] for block in blocks])

        for run in runs_of(blocks):
            file = run[0].segment.file
            assert file is not None
            work = partial(verify_piece, file, run)
            self._pool.submit(Job(Priority.READ, work, partial(finish, run)))

    def _end(self, block: DiskBlock, verdict: ReadResult) -> None:
        if verdict is ReadResult.OK:
            self._counters["read"] += 1
            self._counters["read_bytes"] += block.length
        self._judge(block, verdict)

    def _judge(self, block: DiskBlock, verdict: ReadResult) -> None:
        """Releases the pin."""
        if verdict is not ReadResult.OK:
            self._counters[f"read_{verdict}"] += 1
            if block.state is BlockState.READABLE:
                self._leaving.let_go(block)
        self._leaving.unpin(block)

    def _submit(
        self, piece: Piece, finish: Callable[[Piece, list[ReadResult] | None], None]
    ) -> None:
        file = piece.blocks[0].segment.file
        assert file is not None

        def work(scratch: Scratch) -> list[ReadResult]:
            return read_piece(file, piece, scratch)

        self._pool.submit(Job(Priority.READ, work, partial(finish, piece)))
