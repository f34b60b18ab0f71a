"""How many files this process may open: raised at start, compared with what it may need, and what
becomes of connections when there are no more.

libzmq goes on trying to accept a connection for which there is no descriptor, on a core of its own.
So a part of the limit is kept back. When the rest is used up, new connections are dropped before
they reach the listening socket, and what is kept back is enough for those that wait in it.
"""

import ctypes
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from remote_server.errors import ConfigError
from remote_server.sizes import format_bytes

log = logging.getLogger(__name__)

NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)

# Where there is no limit, or one beyond all use, so many are enough.
MOST_FILES = 1 << 20

# Connections that wait in a listening socket until they are accepted, at most.
BACKLOG = 100
KEPT_BACK = BACKLOG + 12

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, but for what is kept back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    wanted = most - min(KEPT_BACK, most // 4)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


def backlog() -> int:
    """How many connections may wait to be accepted: no more than there are descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(BACKLOG, (hard - soft) * 3 // 4)) if 0 < soft < hard else BACKLOG


def may_open() -> int:
    """The soft limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def warn_if_too_few(max_connections: int, others: int) -> bool:
    """Warn, in one line, when the limit is less than `max_connections` and `others` need together.
    Says whether it did."""
    limit = may_open()
    if max_connections + others <= limit:
        return False
    fits = f", or set --max-connections {limit - others}" if limit > others else ""
    log.warning(
        "max_connections: %d connections and up to %d other files are more than the %d files that "
        "this process may open; connections without one will wait: raise the limit (ulimit -n, "
        "LimitNOFILE=)%s", max_connections, others, limit, fits,
    )  # fmt: skip
    return True


def check_file_sizes(largest: int, setting: str) -> None:
    """Raise `ConfigError` when this process may not make a file of `largest` bytes, which
    `setting` needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest:
        raise ConfigError(
            f"{setting}: it needs a file of {format_bytes(largest)}, and this process may make "
            f"files of at most {format_bytes(limit)}: raise the limit (ulimit -f, LimitFSIZE=)"
        )


@contextmanager
def named_when_missing() -> Iterator[None]:
    """Raise `ConfigError` about the limit of open files out of the block, for whatever fails in it
    because that is reached."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_about_files(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        raise ConfigError(
            f"open files: this process may open {may_open()}, and that is too few to start: raise "
            "the limit (ulimit -n, LimitNOFILE=)"
        ) from error


def _is_about_files(error: BaseException) -> bool:
    return isinstance(error, OSError | zmq.ZMQError) and error.errno in NO_MORE_FILES


class Entrance:
    """A listening socket, which can be shut while there are no descriptors for connections.

    A peer that connects meanwhile gets no answer, tries again by TCP's own rules, and gets in when
    it is open again. Owned by one thread.
    """

    def __init__(self, listener: int) -> None:
        """`listener` stays the caller's; closed by `close`."""
        self._socket = socket.socket(fileno=os.dup(listener))
        self._soft = may_open()
        self.shut = False

    def shut_out(self) -> None:
        """Take no more connections, but let in those that wait already."""
        if self.shut:
            return
        self.shut = True
        self._soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        address = ctypes.addressof(_DROP_ALL)
        try:
            program = struct.pack("HP", 1, address)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("connections cannot be kept from a server without descriptors: %s", error)

    def open_again(self) -> bool:
        """Take connections again when there is room for some. Whether it is open."""
        if self.shut and num_open() <= self._soft - min(BACKLOG, self._soft // 8):
            self.shut = False
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, hard))
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            except OSError as error:  # where it could not be attached
                log.debug("no filter to detach: %s", error)
        return not self.shut

    def close(self) -> None:
        self._socket.close()
