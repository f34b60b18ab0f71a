"""Segments and slot headers of an earlier server, read at start.

Usable segments are returned, the others deleted or renamed.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from remote_server.errors import ConfigError
from remote_server.native.job import Kind
from remote_server.store.disk import layout
from remote_server.store.disk.files import File, Files, move_view
from remote_server.store.disk.layout import FORMAT_VERSION, SegmentHeader, SlotHeader, num_slots
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.pages import PAGE, Scratch

log = logging.getLogger(__name__)

# Versions are counted up by one: a number above this is a damaged page.
_MOST_VERSIONS = 255

# Errors of a damaged file, or of another kind of file under its name. Any other error, for example
# too many open files, is no damage.
_DAMAGE = (
    errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA,
    errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV,
)  # fmt: skip


class FoundSegment(NamedTuple):
    """A segment of an earlier server. Its holder closes `file`."""

    number: int
    file: File
    header: SegmentHeader
    num_bytes: int  # as found; the file is resized to its header's `segment_bytes`


@dataclass
class Report:
    """The names of segments that cannot be used."""

    deleted: list[str] = field(default_factory=list)
    """Files of a server without a block that can be found again."""
    aside: list[str] = field(default_factory=list)
    """Renamed files, which may not be a server's."""


class _Strange(Exception):
    """The reason that a file with a segment's name is not recognised as one."""

    def __init__(self, why: str, *, is_ours: bool = False) -> None:
        super().__init__(why)
        self.is_ours = is_ours


def find_segments(
    files: Files, where: str, report: Report | None = None, *, is_known: bool = False
) -> list[FoundSegment]:
    """The segments in `files`, by number. Reads one page of each.

    A segment that a crash left unfinished is deleted, and so is a segment whose header is damaged:
    no block of it can be found again. A file that cannot be read as a segment is renamed, when the
    directory is known to be a server's: by `is_known`, or by another file in it.

    Raises `ConfigError`, before anything is changed, when a file is not a server's, may not be
    opened, or has another format.
    """
    report = report or Report()
    found: list[FoundSegment] = []
    unfinished: list[str] = []
    strange: dict[str, _Strange] = {}
    try:
        for name in sorted(files.names()):
            parsed = layout.parse(name)
            if parsed is None:
                continue
            if parsed.is_unfinished:
                unfinished.append(name)
                continue
            try:
                segment = _inspect(files, name, parsed.number, where)
            except _Strange as reason:
                strange[name] = reason
                continue
            if segment is None:
                log.warning("disk: the header of %s/%s is damaged; it is deleted", where, name)
                report.deleted.append(name)
            else:
                found.append(segment)
        is_known = is_known or bool(found or report.deleted)
        if not is_known and not any(reason.is_ours for reason in strange.values()):
            _refuse(strange, where)
        _clean_up(files, where, [*unfinished, *report.deleted], strange, report)
    except BaseException as error:
        for segment in found:
            segment.file.close()
        if isinstance(error, OSError):
            raise ConfigError(f"disk: {where}: {error.strerror}") from error
        raise
    return found


def _refuse(strange: dict[str, _Strange], where: str) -> None:
    for name, reason in strange.items():
        raise ConfigError(
            f"disk: {where}/{name} is named like a segment but is not one ({reason}), and no other "
            "file there is a server's; move it away. Nothing was changed"
        )


def make_whole(found: Sequence[FoundSegment], where: str) -> None:
    """A segment that was truncated or has grown gets its size again and keeps its intact blocks:
    its missing slots are free. `found` fit the budget. Raises `ConfigError`."""
    for number, file, header, num_bytes in found:
        if num_bytes == header.segment_bytes:
            continue
        name = f"{where}/{layout.segment_name(number)}"
        log.warning("disk: %s has %d bytes instead of %d; its intact blocks are kept",
                    name, num_bytes, header.segment_bytes)  # fmt: skip
        try:
            file.resize(header.segment_bytes)
        except OSError as error:
            raise ConfigError(
                f"disk: {name} has {num_bytes} bytes instead of {header.segment_bytes}, and cannot "
                f"be made whole: {error.strerror}; make room for it, or delete it"
            ) from error


def _clean_up(
    files: Files, where: str, to_delete: Sequence[str], strange: dict[str, _Strange], report: Report
) -> None:
    for name in to_delete:
        try:
            files.remove(name)
        except OSError as error:  # a directory, for example
            strange[name] = _Strange(os.strerror(error.errno or 0))
    taken = {*files.names()}
    for name, reason in strange.items():
        aside = layout.aside_name(name, taken)
        files.rename(name, aside)
        report.aside.append(aside)
        log.warning(
            "disk: %s/%s cannot be read as a segment (%s); it is renamed to %s, and its blocks are "
            "lost. Delete it unless you want to examine it",
            where, name, reason, aside,
        )  # fmt: skip


def _inspect(files: Files, name: str, number: int, where: str) -> FoundSegment | None:
    """None when it is a damaged segment. Raises `_Strange`, and `ConfigError` when it may not be
    opened or has another format."""
    try:
        file, num_bytes = files.open(name)
    except PermissionError as error:
        raise ConfigError(
            f"disk: {where}/{name} may not be opened: {error.strerror}; let user {os.geteuid()} "
            "read and write it, or move it away. Nothing was changed"
        ) from error
    except OSError as error:
        raise _strange_or(error) from error
    try:
        header = _read_header(file, num_bytes, f"{where}/{name}")
    except BaseException:
        file.close()
        raise
    if header is None:
        file.close()
        return None
    return FoundSegment(number, file, header, num_bytes)


def _strange_or(error: OSError) -> Exception:
    return _Strange(os.strerror(error.errno)) if error.errno in _DAMAGE else error


def _read_header(file: File, num_bytes: int, name: str) -> SegmentHeader | None:
    """None when it is damaged. Raises `_Strange`, or `ConfigError` when it has another format."""
    if num_bytes < PAGE:
        raise _Strange(f"it has {num_bytes} bytes")
    page = Scratch().take(PAGE)
    try:
        move_view(file, Kind.READ, page, 0)
    except OSError as error:
        raise _strange_or(error) from error
    version = layout.version_of(page)
    if version != FORMAT_VERSION:
        if layout.has_damaged_prefix(page):
            return None
        if version is None or not 0 < version <= _MOST_VERSIONS:
            raise _Strange("its first page is no header", is_ours=_has_slots(file, num_bytes))
        raise ConfigError(
            f"disk: {name} has format version {version}, and this server reads version "
            f"{FORMAT_VERSION}; give it another directory, or delete this one. Nothing was changed"
        )
    header = layout.unpack_segment_header(page)
    if header is None or num_slots(header.segment_bytes, header.block_bytes) <= 0:
        return None
    return header


def _has_slots(file: File, num_bytes: int) -> bool:
    """Whether the second page begins as a slot does."""
    page = Scratch().take(PAGE)
    try:
        if num_bytes >= 2 * PAGE:
            move_view(file, Kind.READ, page, PAGE)
            return layout.is_slot_magic(page)
    except OSError:
        pass
    return False


# Small slots are read with the bytes between their headers, which costs less than a call each.
_SCAN_BYTES = 256 << 10


class Found(NamedTuple):
    """An intact header. Sorted by generation: the oldest first."""

    generation: int
    slot: int
    header: SlotHeader


class Scanned(NamedTuple):
    """The slot headers of one segment."""

    found: list[Found]  # the oldest first
    num_damaged: int  # headers that are neither intact nor empty


def scan(
    file: File,
    num_slots: int,
    block_bytes: int,
    slot_bytes: int,
    incarnation: int,
    scratch: Scratch,
    stopped: Callable[[], bool] = lambda: False,
) -> Scanned:
    """The blocks named by a segment's slot headers, without those that cannot be read.

    On an I/O thread; ends early when `stopped`.
    """
    found: list[Found] = []
    num_damaged = 0
    per_read = max(1, _SCAN_BYTES // slot_bytes)
    for first in range(0, num_slots, per_read):
        if stopped():
            break
        slots = range(first, min(first + per_read, num_slots))
        for slot, page in _pages(file, slots, slot_bytes, scratch):
            header = layout.unpack_slot_header(page, slot, incarnation, block_bytes)
            if header is not None:
                found.append(Found(header.generation, slot, header))
            else:
                num_damaged += not layout.holds_nothing(page)
    return Scanned(sorted(found), num_damaged)


def _pages(
    file: File, slots: range, slot_bytes: int, scratch: Scratch
) -> Iterator[tuple[int, memoryview]]:
    whole = scratch.take((len(slots) - 1) * slot_bytes + PAGE)
    try:
        move_view(file, Kind.READ, whole, layout.slot_offset(slots[0], slot_bytes))
    except OSError:
        for slot in slots if len(slots) > 1 else ():
            yield from _pages(file, range(slot, slot + 1), slot_bytes, scratch)
        return
    for place, slot in enumerate(slots):
        yield slot, whole[place * slot_bytes :][:PAGE]


def within_budget(files: Files, found: list[FoundSegment], budget: int) -> list[FoundSegment]:
    """Those of `found` whose blocks are the newest and that fit together; the others are removed.
    Slot headers are read only when some do not fit, after the budget was made smaller, and never
    those of a segment that is larger than the budget."""
    left = budget - OVERHEAD_BYTES
    if sum(segment.header.segment_bytes for segment in found) <= left:
        return found
    small = [segment for segment in found if segment.header.segment_bytes <= left]
    kept: dict[int, FoundSegment] = {}
    for segment in sorted(small, key=_mean_generation, reverse=True):
        if segment.header.segment_bytes <= left:
            left -= segment.header.segment_bytes
            kept[segment.number] = segment
    for segment in found:
        if segment.number not in kept:
            segment.file.close()
            files.remove(layout.segment_name(segment.number))
    log.warning(
        "disk: the budget is smaller than what was found; the oldest %d of %d segments are "
        "deleted", len(found) - len(kept), len(found),
    )  # fmt: skip
    return [*kept.values()]


def _mean_generation(segment: FoundSegment) -> float:
    header = segment.header
    count = num_slots(header.segment_bytes, header.block_bytes)
    blocks, _ = scan(
        segment.file, count, header.block_bytes, layout.slot_bytes_for(header.block_bytes),
        header.incarnation, Scratch(),
    )  # fmt: skip
    return sum(block.generation for block in blocks) / max(1, len(blocks))
