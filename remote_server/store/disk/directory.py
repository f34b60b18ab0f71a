"""The directory of a disk tier: private, and locked by one server at a time."""

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from remote_server.errors import ConfigError
from remote_server.store.disk.files import Folder
from remote_server.store.disk.layout import (
    FORMAT_VERSION,
    LOCK,
    OURS,
    README,
    README_NEW,
    is_of_a_segment,
)

log = logging.getLogger(__name__)

_README_START = "This directory belongs to a kvferry cache server"

_README_TEXT = (
    _README_START
    + """: blocks of KV cache that had no room in memory.

Everything here is a cache. When no server is running, the whole directory can be deleted; that
costs only time, because engines compute missing blocks again. Do not put other files here: the
server refuses to start when it finds a file that is not its own.

segment-NNNNNNNN           blocks of one namespace, in slots of one size. The first page names it.
segment-NNNNNNNN.damaged   was found with a first page that cannot be read. It counts against the
                           budget. Delete it unless you want to examine it.
LOCK                       locked by the running server, as the directory itself is, so that no
                           second one uses this directory. It holds the clock of the blocks' age.

Format version {version}. The format is described in docs/disk.md of kvferry.
"""
)

_MOST_READ = 4096
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def make_private(path: Path) -> int:
    """A descriptor of the directory `path`. A missing directory is made with its parents, for this
    user alone. The caller closes the descriptor.

    Raises `ConfigError` when another user owns the directory or can write to it: a user who
    replaces files would choose the blocks that this server sends.
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # made meanwhile; it is checked below
                folder.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"disk: {path}: {error.strerror}") from error
    try:
        _check_private(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"disk: {path} belongs to user {status.st_uid}, and this server runs as user "
            f"{os.geteuid()}: give it a directory of its own, for example {path / 'kvferry'}, "
            "which it makes itself where it may. Nothing was changed there"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"disk: {path} can be written by other users (mode {status.st_mode & 0o7777:04o}): "
            f"chmod go-w {path}, or give the server {path / 'kvferry'}, which it makes itself. "
            "Nothing was changed there"
        )


class TakenFolder:
    """`path`, made if it was missing, and locked against other servers until `release`.

    Raises `ConfigError` when it cannot be used, or another server has it; nothing is changed then.
    Files that are not the server's are never deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1
        self._fd = make_private(path)
        try:
            # Before the first file is made: a home directory must not get a README.
            _refuse_foreign(os.listdir(self._fd), str(path))
            self._take()
            self.files = Folder(path, self._fd)
        except OSError as error:
            self._close()
            raise ConfigError(f"disk: {path}: {error.strerror}") from error
        except BaseException:
            self._close()
            raise

    @property
    def is_known(self) -> bool:
        """Whether its README is a server's: then so are files that are named like a server's."""
        return self._read(README).startswith(_README_START)

    @property
    def note(self) -> str:
        """The note that an earlier server stored with `store_note`, or any other text."""
        return os.pread(self._lock, _MOST_READ, 0).decode("ascii", "replace")

    def store_note(self, note: str) -> None:
        """Stored in LOCK, whose content servers of earlier versions ignore."""
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, note.encode("ascii"), 0)
        except OSError as error:
            log.warning("disk: %s: %s", self._path / LOCK, error.strerror)

    def write_readme(self) -> None:
        """For people, so a failure does not prevent the start. The name is given to a new file:
        nothing is written through a link."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(README_NEW, dir_fd=self._fd)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(README_NEW, flags, 0o644, dir_fd=self._fd)
            with os.fdopen(fd, "w") as file:
                file.write(_README_TEXT.format(version=FORMAT_VERSION))
            os.rename(README_NEW, README, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            log.warning("disk: %s: %s", self._path / README, error.strerror)
            with suppress(OSError):
                os.unlink(README_NEW, dir_fd=self._fd)

    def release(self) -> None:
        """Unlock it for the next server."""
        self.files.close()
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        if self._lock >= 0:
            os.close(self._lock)

    def _take(self) -> None:
        """The directory's own descriptor is the lock: a file in it can be deleted or replaced while
        a server runs. LOCK is held as well, for servers of the previous version, and for file
        systems that cannot lock directories (NFS)."""
        try:
            self._flock(self._fd)
        except OSError as error:
            log.warning("disk: %s cannot be locked itself: %s", self._path, error.strerror)
        self._lock = self._open_lock()
        self._flock(self._lock)

    def _flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"disk: {self._path} is in use by another server; give each its own directory"
            ) from error

    def _open_lock(self) -> int:
        where = self._path / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(LOCK, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES):
                raise
            raise ConfigError(
                f"disk: {where} is a link, a directory or a file that cannot be opened "
                f"({error.strerror}); remove it. Nothing was changed there"
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ConfigError(f"disk: {where} is not a plain file; remove it")
        return fd

    def _read(self, name: str) -> str:
        """The beginning of a plain file; empty when there is none."""
        try:
            fd = os.open(name, _READ_ONLY, dir_fd=self._fd)
        except OSError:
            return ""
        try:
            return os.read(fd, _MOST_READ).decode("utf-8", "replace")
        except OSError:
            return ""
        finally:
            os.close(fd)


def _refuse_foreign(names: list[str], where: str) -> None:
    """Raise `ConfigError` when one of `names` is not a server's."""
    for name in sorted(names):
        if name not in OURS and not is_of_a_segment(name):
            raise ConfigError(
                f"disk: {where} holds {name!r}, which is not a file of this server; move it away, "
                "or give the server a directory of its own. Nothing was changed there"
            )
