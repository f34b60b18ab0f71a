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
from typing import NamedTuple, Protocol

from remote_server.native.job import Job, Kind, address_of
from remote_server.native.mover import run
from remote_server.store.pages import PAGE
from remote_server.store.tier import Written

log = logging.getLogger(__name__)

# A link is never a segment, and following it could write anywhere.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def why_not_written(code: int | None) -> Written:
    """`code` is the errno of a write that failed."""
    return Written.NO_SPACE if code in (errno.ENOSPC, errno.EDQUOT) else Written.IO_ERROR


class Moved(NamedTuple):
    """The results of reads or writes, one of each."""

    errors: Sequence[int]  # 0 or an errno; ENODATA at the end of the file
    digests: Sequence[int]  # with seeds, the XXH3-64 of the bytes where there is no error


class File(Protocol):
    """A file of fixed size. Threads may read and write it in parallel, at different places."""

    @property
    def direct(self) -> bool:
        """Whether its bytes bypass the page cache: then buffers must begin and end at pages."""

    def move(
        self,
        kind: Kind,
        addresses: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> Moved:
        """Read or write on the calling thread, to or from memory at `addresses`, neighbours in the
        file in one call. Each fails by itself; then any part of it may be moved."""

    def sync(self) -> None:
        """Return when everything written would survive a power cut. Raises `OSError`."""

    def resize(self, num_bytes: int) -> None:
        """Before any other use: give it `num_bytes`, all of them allocated in the file system; new
        ones read as zeros. Raises `OSError`, and the file has its size then."""

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


def move_view(file: File, kind: Kind, view: memoryview, offset: int) -> None:
    """One read or write. Raises `OSError`."""
    (error,) = file.move(kind, [address_of(view)], [offset], [view.nbytes]).errors
    if error:
        raise OSError(error, os.strerror(error))


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

    def move(
        self,
        kind: Kind,
        addresses: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> Moved:
        sides = (addresses, offsets) if kind is Kind.READ else (offsets, addresses)
        job = Job(kind, *sides, lengths, seeds=seeds, files=[self._fd] * len(lengths))
        run(job)
        return Moved(job.errors, job.digests)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def resize(self, num_bytes: int) -> None:
        before = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, num_bytes)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError:  # else the next start finds the right size, and space that is not there
            os.ftruncate(self._fd, before)
            raise

    def close(self) -> None:
        os.close(self._fd)


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
