"""Files and folders of the disk tier; tests replace them.

Every offset and length is in whole pages, and so is every address where a file is `direct`.
"""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from remote_server.store.disk.layout import PAGE, padded
from remote_server.store.tier import Written

log = logging.getLogger(__name__)

View = bytes | memoryview

# A link is never a segment, and following it could write anywhere.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def why_not_written(error: OSError) -> Written:
    full = (errno.ENOSPC, errno.EDQUOT)
    return Written.NO_SPACE if error.errno in full else Written.IO_ERROR


class File(Protocol):
    """A file of fixed size. Threads may read and write it in parallel, at different places."""

    @property
    def direct(self) -> bool:
        """Whether its bytes bypass the page cache: then buffers must begin and end at pages."""

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, one behind another, from `offset` on. Raises `OSError`, also at its end."""

    def write(self, views: Sequence[View], offset: int) -> None:
        """Write `views`, one behind another. Raises `OSError`; then any part may be written."""

    def sync(self) -> None:
        """Return when everything written would survive a power cut. Raises `OSError`."""

    def resize(self, num_bytes: int) -> None:
        """Before any other use: give it `num_bytes`, all of them allocated in the file system; new
        ones read as zeros. Raises `OSError`."""

    def close(self) -> None: ...


class Files(Protocol):
    """The files of one directory. Raises `OSError` wherever the operating system does."""

    def names(self) -> list[str]:
        """Of all its entries."""

    def create(self, name: str, num_bytes: int) -> File:
        """A new file with all its space allocated: a write cannot run out of space."""

    def open(self, name: str) -> tuple[File, int]:
        """An existing one, and its size."""

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, name: str) -> None:
        """An open file stays usable; its space is freed when it is closed."""

    def sync(self) -> None:
        """Return when names made and removed would survive a power cut."""


class Scratch:
    """Page-aligned memory of one I/O thread: for headers and for bytes that cannot be moved in
    place."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def take(self, num_bytes: int) -> memoryview:
        """`num_bytes` of it, valid until the next `take`. Old content stays in it."""
        if self._map is None or len(self._map) < num_bytes:
            self._map = mmap.mmap(-1, padded(num_bytes))  # the old map is freed with its last view
        return memoryview(self._map)[:num_bytes]


def is_aligned(view: memoryview) -> bool:
    """Whether `view` can be moved past the page cache without a copy."""
    if view.nbytes % PAGE:
        return False
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


class Folder:
    """A real directory, held by its descriptor: its files are found even when it is renamed."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """`fd` is `path`, opened, and stays the caller's. Ends with `close`."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fd = os.open(path, flags) if fd is None else os.dup(fd)
        try:
            self.direct = _offers_direct(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        if not self.direct:
            log.warning(
                "disk: the file system of %s does not offer O_DIRECT; blocks go through the "
                "page cache, which costs a copy and memory", path,
            )  # fmt: skip

    def close(self) -> None:
        """Close the directory. Open files belong to their owners."""
        os.close(self._fd)

    def taken_bytes(self, name: str) -> int:
        """The space of `name` in the file system; of a directory without its content."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks * 512

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def create(self, name: str, num_bytes: int) -> File:
        fd = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
        try:
            # Before O_DIRECT: without support in the file system the C library writes single bytes.
            os.posix_fallocate(fd, 0, num_bytes)
            if self.direct:
                _set_direct(fd)
        except BaseException:
            os.close(fd)
            os.unlink(name, dir_fd=self._fd)
            raise
        return _RealFile(fd, self.direct)

    def open(self, name: str) -> tuple[File, int]:
        fd = os.open(name, _FLAGS, dir_fd=self._fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):  # a read of a pipe would wait
                raise OSError(errno.ENXIO, "not a plain file")
            if self.direct:
                _set_direct(fd)
        except BaseException:
            os.close(fd)
            raise
        return _RealFile(fd, self.direct), status.st_size

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)


class _RealFile:
    def __init__(self, fd: int, direct: bool) -> None:
        self._fd = fd
        self.direct = direct

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        left = [*views]
        while left:
            done = os.preadv(self._fd, left, offset)
            if done == 0:
                raise OSError(errno.EIO, "the file is shorter than it was made")
            offset += done
            left = _without(left, done)

    def write(self, views: Sequence[View], offset: int) -> None:
        left = [memoryview(view) for view in views]
        while left:
            done = os.pwritev(self._fd, left, offset)
            offset += done
            left = _without(left, done)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def resize(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)
        os.posix_fallocate(self._fd, 0, num_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _without(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """`views` without the first `num_bytes`: a call may move fewer bytes than requested."""
    for place, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[place + 1 :]]
        num_bytes -= view.nbytes
    return []


def _offers_direct(folder: int) -> bool:
    """Tried out, because no flag of a file system shows it. Raises `OSError` when the directory is
    not writable."""
    probe = f"segment-{secrets.randbelow(10**8):08d}.new"  # the next start deletes such a name
    fd = os.open(probe, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    os.unlink(probe, dir_fd=folder)
    try:
        # Some file systems accept the flag and fail the first transfer, so one is made.
        _set_direct(fd)
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError as error:
        # A full file system has accepted the flag nevertheless.
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        os.close(fd)
    return True


def _set_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
