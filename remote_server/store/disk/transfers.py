"""Work of I/O threads on segment files.

Files are made and removed. Blocks are written, read, erased and verified; neighbours in one call.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum, auto
from itertools import islice
from typing import NamedTuple

import numpy as np

from remote_server import protocol
from remote_server.store.disk.files import File, Files, Scratch, View, is_aligned, why_not_written
from remote_server.store.disk.layout import (
    ERASED,
    PAGE,
    SegmentHeader,
    new_name,
    pack_segment_header,
    pack_slot_header,
    padded,
    segment_name,
    unpack_slot_header,
)
from remote_server.store.disk.pool import Job, Priority
from remote_server.store.disk.segments import DiskBlock, Segment
from remote_server.store.tier import Written

log = logging.getLogger(__name__)

# Bytes of one call: enough for the full speed of a device, few enough for a read not to wait long
# behind a write. A block that is larger is moved in one call nevertheless.
PIECE_BYTES = 4 << 20

# Two views a block, and the kernel takes 1024 a call (IOV_MAX).
PIECE_BLOCKS = 256


class ReadResult(StrEnum):
    OK = auto()
    DAMAGED = auto()  # not the bytes that were written
    IO_ERROR = auto()


class Piece(NamedTuple):
    """Neighbours in one segment, in its order, and the views of their bytes."""

    blocks: list[DiskBlock]
    views: list[memoryview]


def pieces_of(blocks: Sequence[DiskBlock], views: Sequence[memoryview]) -> Iterator[Piece]:
    """Cut into pieces of one call each, in the order of the files."""
    assert all(v.nbytes == b.length for b, v in zip(blocks, views, strict=True))
    places = sorted(range(len(blocks)), key=lambda place: _position(blocks[place]))
    ordered = [blocks[place] for place in places]
    left = iter(views[place] for place in places)
    for run in runs_of(ordered):
        yield Piece(run, [*islice(left, len(run))])


def runs_of(blocks: Sequence[DiskBlock]) -> Iterator[list[DiskBlock]]:
    """Runs of neighbours, each at most what one call may move, in the order of the files."""
    run: list[DiskBlock] = []
    for block in sorted(blocks, key=_position):
        if run and not _continues(run, block):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _position(block: DiskBlock) -> tuple[int, int]:
    return block.segment.number, block.slot


def _continues(run: list[DiskBlock], block: DiskBlock) -> bool:
    last = run[-1]
    return (
        block.segment is last.segment
        and block.slot == last.slot + 1
        and len(run) < PIECE_BLOCKS
        and (len(run) + 1) * block.segment.slot_bytes <= PIECE_BYTES
    )


# ── writing ──────────────────────────────────────────────────────────────────────────────────


def write_piece(file: File, piece: Piece, scratch: Scratch) -> Written:
    """Write header and bytes of every block, in one call. After a failure any part may be written,
    whole blocks included, and none counts."""
    try:
        if all(_in_place(file, b, v) for b, v in zip(piece.blocks, piece.views, strict=True)):
            views = _headers_between(piece, scratch)
        else:
            views = [_gathered(piece, scratch)]
        file.write(views, piece.blocks[0].offset)
    except OSError as error:
        return why_not_written(error)
    return Written.OK


def erase(file: File, block: DiskBlock, scratch: Scratch) -> bool:
    """Overwrite its header, so that no restart finds it."""
    page = scratch.take(PAGE)
    page[:] = ERASED
    try:
        file.write([page], block.offset)
    except OSError:
        return False
    return True


def _in_place(file: File, block: DiskBlock, view: memoryview) -> bool:
    """Its bytes fill its slot, and can be moved without a copy."""
    whole = padded(block.length) == block.segment.slot_bytes - PAGE == block.length
    return whole and (not file.direct or is_aligned(view))


def _headers_between(piece: Piece, scratch: Scratch) -> list[View]:
    headers = scratch.take(PAGE * len(piece.blocks))
    views: list[View] = []
    for place, (block, view) in enumerate(zip(piece.blocks, piece.views, strict=True)):
        page = headers[place * PAGE : (place + 1) * PAGE]
        page[:] = _header_page(block)
        views += [page, view]
    return views


def _gathered(piece: Piece, scratch: Scratch) -> memoryview:
    """A copy of the piece as it will be in the file, where O_DIRECT cannot take it in place."""
    slot_bytes = piece.blocks[0].segment.slot_bytes
    whole = scratch.take(slot_bytes * len(piece.blocks))
    for place, (block, view) in enumerate(zip(piece.blocks, piece.views, strict=True)):
        slot = whole[place * slot_bytes : (place + 1) * slot_bytes]
        slot[:PAGE] = _header_page(block)
        _copy(slot[PAGE : PAGE + block.length], view)
        slot[PAGE + block.length :] = bytes(slot_bytes - PAGE - block.length)
    return whole


def _header_page(block: DiskBlock) -> bytes:
    return pack_slot_header(block.header, block.slot, block.segment.incarnation)


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def read_piece(file: File, piece: Piece, scratch: Scratch) -> list[ReadResult]:
    """Fill each view, and hash its bytes. A view that is not OK may hold anything."""
    try:
        if all(_in_place(file, b, v) for b, v in zip(piece.blocks, piece.views, strict=True)):
            _read_in_place(file, piece, scratch)
        else:
            slots = _read_slots(file, piece.blocks, scratch)
            for slot, view in zip(slots, piece.views, strict=True):
                _copy(view, slot[PAGE : PAGE + view.nbytes])
    except OSError:
        return _one_by_one(file, piece, scratch)
    return [
        ReadResult.OK if _is_intact(block, view) else ReadResult.DAMAGED
        for block, view in zip(piece.blocks, piece.views, strict=True)
    ]


def verify_piece(file: File, blocks: list[DiskBlock], scratch: Scratch) -> list[ReadResult]:
    """Whether header and bytes of each match those found at start, read into `scratch`."""
    try:
        slots = _read_slots(file, blocks, scratch)
        return [
            ReadResult.OK
            if _has_header(block, slot[:PAGE])
            and _is_intact(block, slot[PAGE : PAGE + block.length])
            else ReadResult.DAMAGED
            for block, slot in zip(blocks, slots, strict=True)
        ]
    except OSError:
        if len(blocks) == 1:
            return [ReadResult.IO_ERROR]
        return [verify_piece(file, [block], scratch)[0] for block in blocks]


def _one_by_one(file: File, piece: Piece, scratch: Scratch) -> list[ReadResult]:
    """One bad sector must not cost the neighbours."""
    if len(piece.blocks) == 1:
        return [ReadResult.IO_ERROR]
    results = []
    for block, view in zip(piece.blocks, piece.views, strict=True):
        results += read_piece(file, Piece([block], [view]), scratch)
    return results


def _read_in_place(file: File, piece: Piece, scratch: Scratch) -> None:
    between = scratch.take(PAGE)  # all headers in between are read to here, and ignored
    views = [piece.views[0]]
    for view in piece.views[1:]:
        views += [between, view]
    file.read(views, piece.blocks[0].offset + PAGE)


def _read_slots(file: File, blocks: list[DiskBlock], scratch: Scratch) -> list[memoryview]:
    """The slots of neighbours, as they are in the file."""
    slot_bytes = blocks[0].segment.slot_bytes
    whole = scratch.take(slot_bytes * len(blocks))
    file.read([whole], blocks[0].offset)
    return [whole[start : start + slot_bytes] for start in range(0, len(whole), slot_bytes)]


def _has_header(block: DiskBlock, page: memoryview) -> bool:
    segment = block.segment
    found = unpack_slot_header(
        page, block.slot, segment.incarnation, segment.slot_class.block_bytes
    )
    return found == block.header


def _is_intact(block: DiskBlock, view: memoryview) -> bool:
    return protocol.checksum(block.namespace, block.key, view) == block.checksum


def _copy(target: memoryview, source: memoryview) -> None:
    """Releases the GIL, as slicing does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


# ── segment files ────────────────────────────────────────────────────────────────────────────


class MadeSegment(NamedTuple):
    """The file of a new segment, or None and the reason."""

    file: File | None
    why: Written = Written.OK


def make_segment(
    files: Files,
    number: int,
    header: SegmentHeader,
    gone: Sequence[Segment],
    finish: Callable[[MadeSegment | None], None],
) -> Job[MadeSegment]:
    """Remove those `gone`, then make a segment."""

    def work(scratch: Scratch) -> MadeSegment:
        try:
            _remove_segments(files, gone)
            return MadeSegment(_make_file(files, number, header, scratch))
        except OSError as error:
            return MadeSegment(None, why_not_written(error))

    return Job(Priority.READ, work, finish)


def _make_file(files: Files, number: int, header: SegmentHeader, scratch: Scratch) -> File:
    """The file gets its name when it is complete and permanent. Raises `OSError`, with no file left
    behind."""
    unfinished = new_name(number)
    file = files.create(unfinished, header.segment_bytes)
    try:
        page = scratch.take(PAGE)
        page[:] = pack_segment_header(header)
        file.write([page], 0)
        file.sync()
        files.rename(unfinished, segment_name(number))
        files.sync()
    except OSError:
        file.close()
        for name in (unfinished, segment_name(number)):
            with suppress(OSError):
                files.remove(name)
        raise
    return file


def dispose_segments(
    files: Files,
    idle: Sequence[Segment],
    busy: Sequence[Segment],
    finish: Callable[[bool | None], None],
) -> Job[bool]:
    """Remove the files of `idle`, which have no users, and close them; remove the names of `busy`.
    The result is whether no restart would find any of them: all removed, and permanently."""

    def work(_: Scratch) -> bool:
        _close_segments(idle)
        done = True
        for segment in (*idle, *busy):
            try:
                _remove_name(files, segment)
            except OSError as error:
                done = False
                _warn(error)
        try:
            files.sync()
        except OSError as error:
            done = False
            _warn(error)
        return done

    return Job(Priority.READ, work, finish)


def _warn(error: OSError) -> None:
    log.warning("disk: a cleared segment could not be removed, a restart may find it: %s", error)


def _remove_segments(files: Files, segments: Sequence[Segment]) -> None:
    """Close and remove. A file without a name, or closed before, is skipped. Raises `OSError`."""
    _close_segments(segments)
    for segment in segments:
        _remove_name(files, segment)


def _close_segments(segments: Sequence[Segment]) -> None:
    """Close files without users. A closed file is skipped."""
    for segment in segments:
        if segment.file is not None:
            segment.file.close()
            segment.file = None


def _remove_name(files: Files, segment: Segment) -> None:
    with suppress(FileNotFoundError):  # never made, or removed before
        files.remove(segment_name(segment.number))
