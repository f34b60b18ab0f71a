"""The directory of a disk tier: taken by one server at a time, and read once when it starts."""

import fcntl
import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

from remote_server.errors import ConfigError
from remote_server.store.disk.files import File, Files, Folder, Scratch
from remote_server.store.disk.layout import (
    FORMAT_VERSION,
    PAGE,
    SegmentHeader,
    has_damaged_prefix,
    num_slots,
    unpack_segment_header,
    version_of,
)

log = logging.getLogger(__name__)

README = "README.txt"
LOCK = "LOCK"
_OURS = (README, LOCK, "lost+found")  # the last is the file system's, at its root
_SEGMENT_NAME = re.compile(r"segment-(\d{8})(\.new)?")

_README_TEXT = """\
This directory belongs to a kvferry cache server: blocks of KV cache that had no room in memory.

Everything here is a cache. When no server is running, the whole directory can be deleted; what
is lost is time, because engines compute again what they do not find. Do not put other files
here: the server refuses to start when it finds something that is not its own.

segment-NNNNNNNN   blocks of one namespace, in slots of one size. The first page says whose.
LOCK               held by the running server, so that no second one uses this directory.

Format version {version}. The format is described in remote_server/store/disk/__init__.py.
"""


class FoundSegment(NamedTuple):
    """A segment that an earlier server left. Whoever has it closes `file`."""

    number: int
    file: File
    header: SegmentHeader


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


def new_name(number: int) -> str:
    """What a segment is called until it is complete."""
    return segment_name(number) + ".new"


class TakenFolder:
    """`path`, made if it was not there, and kept from other servers until `release`.

    Raises `ConfigError` when it cannot be used, or another server has it. Changes nothing there
    in that case, and deletes nothing that is not ours in any.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Before our own first file: somebody's home must not get a README of ours.
            _refuse_foreign(os.listdir(path), str(path))
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"disk: {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = Folder(path)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"disk: {path} is in use by another server; give each its own directory"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"disk: {path}: {error.strerror}") from error

    def write_readme(self) -> None:
        """Raises `ConfigError`. After everything else, so that a refusal changes nothing."""
        try:
            (self._path / README).write_text(_README_TEXT.format(version=FORMAT_VERSION))
        except OSError as error:
            raise ConfigError(f"disk: {self._path / README}: {error.strerror}") from error

    def release(self) -> None:
        """Let the next server have it."""
        os.close(self._lock)


def _refuse_foreign(names: list[str], where: str) -> None:
    """Raise `ConfigError` when one of `names` is not ours."""
    for name in sorted(names):
        if name not in _OURS and _SEGMENT_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"disk: {where} holds {name!r}, which is not a file of this server; give it a "
                "directory of its own. Nothing was changed there"
            )


def find_segments(files: Files, where: str, damaged: list[str] | None = None) -> list[FoundSegment]:
    """The segments in `files`, by number. Reads one page of each.

    What a crash left half made is deleted, and so is a segment whose header is damaged: no
    block of it can be found again. Its name is added to `damaged`. Raises `ConfigError`, before
    anything is deleted, when a file is not ours or was written in another format.
    """
    found: list[FoundSegment] = []
    useless: list[str] = []
    try:
        for name in sorted(files.names()):
            match = _SEGMENT_NAME.fullmatch(name)
            if match is None:
                continue
            if match[2]:
                useless.append(name)
                continue
            file, num_bytes = files.open(name)
            header = _read_header(file, num_bytes, f"{where}/{name}")
            if header is None:
                log.warning("disk: the header of %s/%s is damaged; it is deleted", where, name)
                file.close()
                useless.append(name)
                if damaged is not None:
                    damaged.append(name)
            else:
                found.append(FoundSegment(int(match[1]), file, header))
    except BaseException as error:
        for segment in found:
            segment.file.close()
        if isinstance(error, OSError):
            raise ConfigError(f"disk: {where}: {error.strerror}") from error
        raise
    try:
        for name in useless:
            files.remove(name)
    except OSError as error:
        raise ConfigError(f"disk: {where}: {error.strerror}") from error
    return found


def _read_header(file: File, num_bytes: int, name: str) -> SegmentHeader | None:
    """None when it is damaged. Raises `ConfigError` when it is not of this format."""
    try:
        page = Scratch().take(PAGE)
        if num_bytes >= PAGE:
            file.read([page], 0)
        version = version_of(page)
        if version != FORMAT_VERSION and has_damaged_prefix(page):
            return None
        if version is None:
            raise ConfigError(
                f"disk: {name} is not a segment of this server, though it is named like one; "
                "move it away. Nothing was changed"
            )
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"disk: {name} has format version {version}, and this server reads version "
                f"{FORMAT_VERSION}; give it another directory, or delete this one. Nothing was "
                "changed"
            )
    except BaseException:
        file.close()
        raise
    header = unpack_segment_header(page)
    if header is None or header.segment_bytes != num_bytes:
        return None
    return header if num_slots(num_bytes, header.block_bytes) > 0 else None
