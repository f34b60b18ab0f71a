"""Creation and removal of segment files, on an I/O thread."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from remote_server.store.disk.files import File, Files, Scratch, Written, why_not_written
from remote_server.store.disk.layout import (
    PAGE,
    SegmentHeader,
    new_name,
    pack_segment_header,
    segment_name,
)
from remote_server.store.disk.pool import Job, Priority
from remote_server.store.disk.segments import Segment

log = logging.getLogger(__name__)


class Made(NamedTuple):
    """The file of a new segment, or None and the reason."""

    file: File | None
    why: Written = Written.OK


def make(
    files: Files,
    number: int,
    header: SegmentHeader,
    gone: Sequence[Segment],
    finish: Callable[[Made | None], None],
) -> Job[Made]:
    """Remove those `gone`, then make a segment."""

    def work(scratch: Scratch) -> Made:
        try:
            remove(files, gone)
            return Made(make_file(files, number, header, scratch))
        except OSError as error:
            return Made(None, why_not_written(error))

    return Job(Priority.READ, work, finish)


def make_file(files: Files, number: int, header: SegmentHeader, scratch: Scratch) -> File:
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


def dispose(
    files: Files,
    idle: Sequence[Segment],
    busy: Sequence[Segment],
    finish: Callable[[bool | None], None],
) -> Job[bool]:
    """Remove the files of `idle`, which have no users, and close them; remove the names of `busy`.
    The result is whether no restart would find any of them: all removed, and permanently."""

    def work(_: Scratch) -> bool:
        close(idle)
        done = True
        for segment in (*idle, *busy):
            try:
                _take_name(files, segment)
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


def remove(files: Files, segments: Sequence[Segment]) -> None:
    """Close and remove. A file without a name, or closed before, is skipped. Raises `OSError`."""
    close(segments)
    for segment in segments:
        _take_name(files, segment)


def close(segments: Sequence[Segment]) -> None:
    """Close files without users. A closed file is skipped."""
    for segment in segments:
        if segment.file is not None:
            segment.file.close()
            segment.file = None


def _take_name(files: Files, segment: Segment) -> None:
    with suppress(FileNotFoundError):  # never made, or removed before
        files.remove(segment_name(segment.number))
