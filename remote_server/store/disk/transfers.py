"""Work of I/O threads on segment files.

Files are made and removed. Blocks are written, read, erased and verified by the mover; neighbours
in one call.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum, auto
from itertools import accumulate, chain, islice
from typing import NamedTuple

from remote_server import protocol
from remote_server.native.job import Job as MoverJob
from remote_server.native.job import Kind, address_of
from remote_server.native.mover import run
from remote_server.store.disk.files import File, Files, Moved, move_view, why_not_written
from remote_server.store.disk.layout import (
    ERASED,
    SegmentHeader,
    new_name,
    pack_segment_header,
    pack_slot_header,
    segment_name,
    unpack_slot_header,
)
from remote_server.store.disk.segments import DiskBlock, Segment
from remote_server.store.io_threads import Job, Priority
from remote_server.store.pages import PAGE, Scratch, padded
from remote_server.store.tier import Written

log = logging.getLogger(__name__)

# Bytes of blocks in one job: enough for the full speed of a device, few enough for a read not to
# wait long behind a write. A block that is larger is one job nevertheless.
PIECE_BYTES = 4 << 20

# Two parts a block, and the mover takes 512 a call.
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
    """Cut into pieces of one job each, in the order of the files."""
    assert all(v.nbytes == b.length for b, v in zip(blocks, views, strict=True))
    places = sorted(range(len(blocks)), key=lambda place: _position(blocks[place]))
    ordered = [blocks[place] for place in places]
    left = iter(views[place] for place in places)
    for neighbours in runs_of(ordered):
        yield Piece(neighbours, [*islice(left, len(neighbours))])


def runs_of(blocks: Sequence[DiskBlock]) -> Iterator[list[DiskBlock]]:
    """Runs of neighbours, each at most what one job may move, in the order of the files."""
    neighbours: list[DiskBlock] = []
    for block in sorted(blocks, key=_position):
        if neighbours and not _continues(neighbours, block):
            yield neighbours
            neighbours = []
        neighbours.append(block)
    if neighbours:
        yield neighbours


def _position(block: DiskBlock) -> tuple[int, int]:
    return block.segment.number, block.slot


def _continues(neighbours: list[DiskBlock], block: DiskBlock) -> bool:
    last = neighbours[-1]
    return (
        block.segment is last.segment
        and block.slot == last.slot + 1
        and len(neighbours) < PIECE_BLOCKS
        and (len(neighbours) + 1) * block.block_bytes <= PIECE_BYTES
    )


# ── writing ──────────────────────────────────────────────────────────────────────────────────


def write_piece(file: File, piece: Piece, scratch: Scratch) -> list[Written]:
    """Write header and bytes of every block. Of one that fails any part may be written, all of it
    included, and it does not count."""
    blocks = piece.blocks
    memory = [*map(address_of, piece.views)]
    lengths: Sequence[int] = [block.length for block in blocks]
    in_place = _is_in_place(file, memory, lengths)
    slots = _Slots(scratch, [0 if in_place else padded(length) for length in lengths])
    for header, block in zip(slots.headers, blocks, strict=True):
        page = pack_slot_header(block.header, block.slot, block.segment.incarnation)
        slots.view[header : header + PAGE] = page
    errors: Sequence[int] = [0] * len(blocks)
    if not in_place:
        job = MoverJob(Kind.COPY, slots.memory, memory, lengths)
        run(job)
        errors = job.errors
        for start, length, size in zip(slots.headers, lengths, slots.lengths, strict=True):
            slots.view[start + PAGE + length : start + PAGE + size] = bytes(size - length)
        memory, lengths = slots.memory, slots.lengths
    written = _move(Kind.WRITE, file, blocks, slots.header_memory, memory, lengths)
    return [*map(_written, _either(errors, written.errors))]


def _written(error: int) -> Written:
    return why_not_written(error) if error else Written.OK


def erase(file: File, block: DiskBlock, scratch: Scratch) -> bool:
    """Overwrite its header, so that no restart finds it."""
    page = scratch.take(PAGE)
    page[:] = ERASED
    try:
        move_view(file, Kind.WRITE, page, block.offset)
    except OSError:
        return False
    return True


class _Slots:
    """Scratch memory for the headers of neighbours, each with room for bytes behind it."""

    def __init__(self, scratch: Scratch, lengths: Sequence[int]) -> None:
        """`lengths` are the room behind each header, in whole pages."""
        *self.headers, end = accumulate((PAGE + length for length in lengths), initial=0)
        """Where they begin in `view`."""
        self.lengths = lengths
        self.view = scratch.take(end)
        address = address_of(self.view)
        self.header_memory = [address + start for start in self.headers]
        self.memory = [start + PAGE for start in self.header_memory]


def _is_in_place(file: File, memory: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether blocks can be moved without a copy."""
    return not (file.direct and any(number % PAGE for number in (*memory, *lengths)))


def _move(
    kind: Kind,
    file: File,
    blocks: Sequence[DiskBlock],
    headers: Sequence[int],
    memory: Sequence[int],
    lengths: Sequence[int],
    seeds: Sequence[int] | None = None,
) -> Moved:
    """Move headers and bytes of neighbours. The result has one entry for each block: the error of
    either, and the digest of its bytes."""
    first, count, slot_bytes = blocks[0].offset, len(blocks), blocks[0].segment.slot_bytes
    offsets = range(first, first + count * slot_bytes, slot_bytes)
    moved = file.move(
        kind,
        _in_turns(headers, memory),
        _in_turns(offsets, [offset + PAGE for offset in offsets]),
        _in_turns([PAGE] * count, lengths),
        seeds and _in_turns([0] * count, seeds),
    )
    return Moved(_either(moved.errors[::2], moved.errors[1::2]), moved.digests[1::2])


def _in_turns(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [*chain.from_iterable(zip(one, other, strict=True))]


def _either(errors: Sequence[int], others: Sequence[int]) -> list[int]:
    return [error or other for error, other in zip(errors, others, strict=True)]


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def read_piece(file: File, piece: Piece, scratch: Scratch) -> list[ReadResult]:
    """Fill each view, and hash its bytes. A view that is not OK may hold anything."""
    blocks = piece.blocks
    memory = [*map(address_of, piece.views)]
    lengths = [block.length for block in blocks]
    if _is_in_place(file, memory, lengths):
        # All headers are read to one page, and ignored: with them neighbours are one call.
        headers = [address_of(scratch.take(PAGE))] * len(blocks)
        moved = _move(Kind.READ, file, blocks, headers, memory, lengths, _seeds(blocks))
    else:
        moved = _read_slots(file, blocks, memory, _slots_of(blocks, scratch))
    return [*map(_result, blocks, moved.errors, moved.digests)]


def verify_piece(file: File, blocks: list[DiskBlock], scratch: Scratch) -> list[ReadResult]:
    """Whether header and bytes of each match those found at start, read into `scratch`."""
    slots = _slots_of(blocks, scratch)
    if all(block.length % PAGE == 0 for block in blocks):
        moved = _move(
            Kind.READ,
            file,
            blocks,
            slots.header_memory,
            slots.memory,
            slots.lengths,
            _seeds(blocks),
        )
    else:
        moved = _read_slots(file, blocks, [0] * len(blocks), slots)
    pages = (slots.view[start : start + PAGE] for start in slots.headers)
    return [*map(_result, blocks, moved.errors, moved.digests, map(_has_header, blocks, pages))]


def _slots_of(blocks: Sequence[DiskBlock], scratch: Scratch) -> _Slots:
    return _Slots(scratch, [padded(block.length) for block in blocks])


def _read_slots(
    file: File, blocks: Sequence[DiskBlock], targets: Sequence[int], slots: _Slots
) -> Moved:
    """Read into `slots`, then copy the bytes to `targets` and hash them on the way; with 0 as a
    target, only hash them."""
    read = _move(Kind.READ, file, blocks, slots.header_memory, slots.memory, slots.lengths)
    lengths = [block.length for block in blocks]
    job = MoverJob(Kind.COPY, targets, slots.memory, lengths, seeds=_seeds(blocks), stream=True)
    run(job)
    return Moved(_either(read.errors, job.errors), job.digests)


def _seeds(blocks: Sequence[DiskBlock]) -> list[int]:
    """Neighbours are of one namespace."""
    return protocol.identities(blocks[0].namespace, [block.key for block in blocks])


def _result(block: DiskBlock, error: int, digest: int, has_header: bool = True) -> ReadResult:
    if error:
        return ReadResult.IO_ERROR
    intact = has_header and digest == block.checksum
    return ReadResult.OK if intact else ReadResult.DAMAGED


def _has_header(block: DiskBlock, page: memoryview) -> bool:
    segment = block.segment
    found = unpack_slot_header(
        page, block.slot, segment.incarnation, segment.slot_class.block_bytes
    )
    return found == block.header


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
            return MadeSegment(None, why_not_written(error.errno))

    return Job(Priority.READ, work, finish)


def _make_file(files: Files, number: int, header: SegmentHeader, scratch: Scratch) -> File:
    """The file gets its name when it is complete and permanent. Raises `OSError`, with no file left
    behind."""
    unfinished = new_name(number)
    file = files.create(unfinished, header.segment_bytes)
    try:
        page = scratch.take(PAGE)
        page[:] = pack_segment_header(header)
        move_view(file, Kind.WRITE, page, 0)
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
