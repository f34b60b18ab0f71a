"""The memory of this process beside its arenas: what libzmq and Python hold."""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from remote_server.config import MiB

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")

# Rows of the index, queues, and what the allocator keeps of a burst (`malloc.py`).
SPARE_BYTES = 512 * MiB
BYTES_PER_BLOCK = 2048

# Of one connection: puts that wait to be copied, a window of replies and gathered small blocks.
BYTES_PER_CONNECTION = 192 * MiB

LOOK_AGAIN_S = 0.05
GIVE_BACK_S = 10.0


class PrivateMemory:
    """Sees when libzmq holds more than any correct use of the server explains.

    libzmq receives a message as a whole, however many frames it has, and shows nothing of it
    before its last one. So what a peer makes it hold is known from the kernel's count alone.
    """

    def __init__(self, now: float) -> None:
        self._at_start = private_bytes()
        self._look_at = now

    def is_beyond(self, now: float, num_connections: int, num_blocks: Callable[[], int]) -> bool:
        """Whether the process has grown by more than these explain. Looks at most every
        `LOOK_AGAIN_S`, and counts blocks only then: the loop asks in every turn."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
        explained = (
            SPARE_BYTES + num_connections * BYTES_PER_CONNECTION + num_blocks() * BYTES_PER_BLOCK
        )
        return private_bytes() - self._at_start > explained

    def given_back(self, now: float) -> None:
        """The socket that held it is closed. What is free goes back to the kernel, and nothing is
        judged until libzmq's thread has had the time to free it."""
        with suppress(AttributeError):  # no glibc
            ctypes.CDLL(None).malloc_trim(0)
        self._look_at = now + GIVE_BACK_S


def private_bytes() -> int:
    """Resident memory of this process that is no arena: those are shared files. 0 without /proc."""
    try:
        _, resident, shared = _STATM.read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
