"""The allocator of this process: what it keeps of freed memory, and what the process has."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# The largest that glibc accepts. Frames above it are mapped afresh each time, which is slow.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Make this process reuse the memory it frees instead of giving it back to the kernel.

    libzmq allocates every message it receives. By default glibc maps a fresh region for each of
    more than 128 KiB, and its page faults cost more than the copy. The price is up to 256 MiB kept
    after a burst. Call it once, at start. False where there is no glibc: receiving is slower then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
                (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))  # fmt: skip
    return all(mallopt(name, value) == 1 for name, value in settings)


def give_back_freed_memory() -> None:
    """Return what the allocator has kept to the kernel: milliseconds for each 100 MiB."""
    with suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes(pid: str = "self") -> int:
    """Resident memory of a process, this one by default, without its arenas, shared files. 0
    without /proc."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
