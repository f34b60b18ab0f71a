"""The memory of this process beside its arenas: what libzmq and Python hold."""

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

# One message of the largest size, which libzmq holds as a whole before anything of it is counted;
# and 64 MiB for what the interpreter and the allocator take and keep of a burst.
SPARE_BYTES = MAX_MESSAGE_BYTES + 64 * MiB

# Of one connection, in libzmq and not seen yet: what a correct client has unanswered of puts.
BYTES_PER_CONNECTION = 32 * MiB

# A row of an index: 300 to 500 bytes, and its part of tables that grow by doubling.
BYTES_PER_BLOCK = 1024

LOOK_AGAIN_S = 0.05
TRIM_SHARE = 10  # times as long as giving back took, until the next look
GIVE_BACK_S = 10.0


class PrivateMemory:
    """Sees when libzmq holds more than any correct use of the server explains.

    libzmq receives a message as a whole, however many frames it has, and shows nothing of it
    before its last one. So what a peer makes it hold is known from the kernel's count alone.
    """

    def __init__(self, now: float) -> None:
        self._at_start = private_bytes()
        self._look_at = now

    def is_beyond(self, now: float, num_connections: int, accounted: Callable[[], int]) -> bool:
        """Whether the process has grown by more than these explain. Looks at most every
        `LOOK_AGAIN_S`, and adds up what is `accounted` for only then: the loop asks in every turn.
        """
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
        """The socket that held it is closed. What is free goes back to the kernel, and nothing is
        judged until libzmq's thread has had the time to free it."""
        _trim()
        self._look_at = now + GIVE_BACK_S


def _trim() -> None:
    with suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Resident memory of this process that is no arena: those are shared files. 0 without /proc."""
    try:
        _, resident, shared = _STATM.read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
