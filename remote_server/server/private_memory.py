"""The private memory of this process, held by libzmq and Python beside the arenas."""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from remote_server.protocol import MAX_MESSAGE_BYTES
from remote_server.sizes import MiB

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")

# One message of the largest size, which libzmq holds as a whole before any of it is counted; and 64
# MiB that the interpreter and the allocator keep of a burst.
SPARE_BYTES = MAX_MESSAGE_BYTES + 64 * MiB

# Of one connection, in libzmq and not received yet: a correct client's unanswered puts.
BYTES_PER_CONNECTION = 32 * MiB

# A row of an index: 300 to 500 bytes, and its part of tables that grow by doubling.
BYTES_PER_BLOCK = 1024

LOOK_AGAIN_S = 0.05
TRIM_SHARE = 10  # the next check waits this many times the duration of a trim
GIVE_BACK_S = 10.0


class PrivateMemory:
    """Detects that libzmq holds more than any correct use of the server explains.

    libzmq receives a message as a whole, of any number of frames, and shows nothing of it before
    its last frame. The memory of unfinished messages is therefore visible only in the kernel's
    count.
    """

    def __init__(self, now: float) -> None:
        self._at_start = private_bytes()
        self._look_at = now

    def is_beyond(self, now: float, num_connections: int, accounted: Callable[[], int]) -> bool:
        """Whether the process has grown by more than its connections and `accounted` explain. The
        loop calls this in every turn; it checks, and calls `accounted`, at most every
        `LOOK_AGAIN_S`."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
        explained = SPARE_BYTES + num_connections * BYTES_PER_CONNECTION + accounted()
        if private_bytes() - self._at_start <= explained:
            return False
        began = time.monotonic()
        _trim()  # the allocator keeps up to 256 MiB of a burst
        self._look_at += TRIM_SHARE * (time.monotonic() - began)
        return private_bytes() - self._at_start > explained

    def given_back(self, now: float) -> None:
        """The socket that held the memory is closed. Return free memory to the kernel, and check
        nothing until libzmq's thread has had the time to free it."""
        _trim()
        self._look_at = now + GIVE_BACK_S


def _trim() -> None:
    with suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Resident memory of this process without its arenas, which are shared files. 0 without
    /proc."""
    try:
        _, resident, shared = _STATM.read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
