"""Limits of this process: the memory and the files that it may have.

The limit of open files is raised at start, compared with the need, and enforced on new connections.
libzmq keeps trying to accept a connection for which there is no descriptor, which uses a whole
core. So a part of the limit is reserved. When the rest is used up, new connections are dropped
before they reach the listening socket, and the reserve is enough for those that wait in it.
"""

import ctypes
import errno
import logging
import os
import re
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import zmq

from remote_server.errors import ConfigError
from remote_server.values import KiB, format_bytes

log = logging.getLogger(__name__)

NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)

# Enough files where the limit is absent or larger.
MOST_FILES = 1 << 20

# Largest number of connections that wait in a listening socket until they are accepted.
BACKLOG = 100
KEPT_BACK = BACKLOG + 12

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_IP_MINTTL, _IPV6_MINHOPCOUNT, _MOST_HOPS = 21, 73, 255
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0

# memory.limit_in_bytes of an unlimited cgroup (v1) is a number near 2**63.
_UNLIMITED = 1 << 60


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, except for the reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    wanted = _without_reserve(most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


def _without_reserve(limit: int) -> int:
    """What this process may open of a limit, and what is the soft limit."""
    return limit - min(KEPT_BACK, limit // 4)


def make_room_for(files: int, what: str) -> bool:
    """Raise the soft limit when `files` more could not be opened. False, logged with `what` needs
    them, when the hard limit is too low as well."""
    if num_open() + files > may_open():
        raise_limit()
    limit = may_open()
    if num_open() + files <= limit:
        return True
    log.warning(
        "%s may need %d open files, and this process may have %d: raise the limit (ulimit -n, "
        "LimitNOFILE=)", what, files, limit,
    )  # fmt: skip
    return False


def backlog() -> int:
    """Number of connections that may wait to be accepted: no more than descriptors are reserved."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(BACKLOG, (hard - soft) * 3 // 4)) if 0 < soft < hard else BACKLOG


def may_open() -> int:
    """The soft limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """Number of files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


FILES_TO_START = 32
"""Files that a server opens until it is ready, with some to spare. When libzmq cannot open one of
its own, it ends the process by `abort`: no error comes, so there must be room beforehand."""


def _too_few_files(needed: int) -> ConfigError:
    """For a server that needs `needed` of them, beside the reserve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(limit for limit in count(needed) if _without_reserve(limit) >= needed)
    return ConfigError(
        f"open files: a limit of {hard} is too few to start, it takes at least {limit}: raise the "
        "limit (ulimit -n, LimitNOFILE=)"
    )


def check_room_for_files(others: int = 0) -> None:
    """Raise `ConfigError` when this process may open too few files for a server to start, which
    needs `others` beside its own."""
    needed = num_open() + FILES_TO_START + others
    if needed > may_open():
        raise _too_few_files(needed)


def warn_if_too_few(max_connections: int, others: int) -> bool:
    """Log one warning when the limit is less than `max_connections` and `others` together, and
    return whether it is."""
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
    """Raise `ConfigError` when `setting` needs a file of `largest` bytes and this process may not
    make it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest:
        raise ConfigError(
            f"{setting}: it needs a file of {format_bytes(largest)}, and this process may make "
            f"files of at most {format_bytes(limit)}: raise the limit (ulimit -f, LimitFSIZE=)"
        )


@contextmanager
def named_when_missing() -> Iterator[None]:
    """Raise `ConfigError` for any error in the block that the limit of open files caused."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_about_files(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        raise _too_few_files(may_open() + 1) from error


def _is_about_files(error: BaseException) -> bool:
    return isinstance(error, OSError | zmq.ZMQError) and error.errno in NO_MORE_FILES


class Entrance:
    """A listening socket, which can be shut while there are no descriptors for connections.

    A peer that connects meanwhile gets no answer, retries by TCP's own rules, and gets in when the
    socket is open again. While it is not closed nothing else can listen on its port. Owned by one
    thread.
    """

    def __init__(self, listener: int) -> None:
        """`listener` stays the caller's; this uses a duplicate until `close`."""
        self._socket = socket.socket(fileno=os.dup(listener))
        self._soft = may_open()
        self._filters = False
        self.shut = False

    def shut_out(self) -> None:
        """Accept no more connections, except those that wait already."""
        if self.shut:
            return
        self.shut = True
        self._soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            self._drop_all()
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("connections cannot be kept from a server without descriptors: %s", error)

    def _drop_all(self) -> None:
        self._filters = True
        try:
            program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError:  # some kernels allow filters only to root
            self._filters = False
            self._require_hops(_MOST_HOPS)

    def _require_hops(self, least: int) -> None:
        """Take only packets with so many hops left. Hosts send 64 or 128, and none has 255."""
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, least)
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, least)

    def open_again(self) -> bool:
        """Accept connections again when descriptors are free. Returns whether it is open."""
        if self.shut and num_open() <= self._soft - min(BACKLOG, self._soft // 8):
            self.shut = False
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, hard))
            try:
                if self._filters:
                    self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                else:
                    self._require_hops(0)
            except OSError as error:
                log.warning("connections may be kept from the server for good: %s", error)
        return not self.shut

    def duplicate(self) -> int:
        """Another descriptor of the listening socket; the caller closes it. Raises `OSError`."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        self._socket.close()


def check_memory_fits(
    memory: int,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    *,
    setting: str = "memory",
) -> None:
    """Raise `ConfigError` when `memory` is more than this machine or container can give.

    Without this check the kernel's OOM killer would end the server hours later, when the cache is
    full. `setting` is the name of the setting in the error.
    """
    available = _mem_available(proc)
    if memory > available:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} requested, but only {format_bytes(available)} is "
            "available on this machine (MemAvailable)"
        )
    limit = _cgroup_limit(proc, cgroups)
    if memory > limit:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} requested, but the memory limit of this container "
            f"or cgroup is {format_bytes(limit)}"
        )


def most_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this machine or container, used or not."""
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(all_of_it, _cgroup_limit(proc, cgroups))


def _mem_available(proc: Path) -> int:
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return _UNLIMITED  # not Linux: nothing to compare with
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * KiB if match else _UNLIMITED


def _cgroup_limit(proc: Path, cgroups: Path) -> int:
    """The tightest limit of our cgroup and its ancestors, version 2 or 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    limits = [_UNLIMITED]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(root):
                limits.append(_read_limit(folder / name))
    return min(limits)


def _read_limit(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file here, or the word "max"
        return _UNLIMITED


def warn_if_dev_shm_is_small(memory: int, folder: str = "/dev/shm") -> bool:
    """Log a warning when /dev/shm is too small for engines on this host; returns whether it did.

    The server does not need it, nor do our engines' pools, but vLLM does, and its own offloading
    keeps its pool there; a container has 64 MiB by default.
    """
    try:
        stats = os.statvfs(folder)
    except OSError:
        return False
    total = stats.f_blocks * stats.f_frsize
    if total >= memory:
        return False
    log.warning(
        "%s holds %s, less than the memory budget of %s: this server does not need it, but "
        "vLLM on this host does; in a container pass --shm-size=%dg",
        folder, format_bytes(total), format_bytes(memory), -(-memory // (1 << 30)),
    )  # fmt: skip
    return True
