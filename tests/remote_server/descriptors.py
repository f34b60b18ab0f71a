"""Memory files for tests, and the descriptors that this process has open."""

import fcntl
import os
import socket


def memfd(num_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_fds() -> int:
    """How many files, memory files, pipes and Unix sockets this process has open.

    TCP sockets, eventfds and epolls are not counted: ZeroMQ's threads close those of every
    socket that ended, an earlier test's too, in their own time.
    """
    return sum(map(_is_ours, os.listdir("/proc/self/fd")))


def _is_ours(fd: str) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if not target.startswith("socket:"):
            return target not in ("anon_inode:[eventfd]", "anon_inode:[eventpoll]")
        with socket.socket(fileno=os.dup(int(fd))) as copy:
            return copy.family == socket.AF_UNIX
    except OSError:  # closed since it was listed
        return False
