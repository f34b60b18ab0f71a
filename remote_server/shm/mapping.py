"""Maps of shared memory by address: made, faulted in, and given back without holding the GIL.

The `mmap` module would do, but unmapping some GiB of it takes tens of milliseconds with the GIL
held, it keeps a descriptor open for each map, and a read-only one has no address to copy from.
"""

import ctypes
import mmap
import os
import threading
import time

import numpy as np

# What is faulted in between two looks at whether to go on: about 2 ms. Numpy lets go of the GIL
# for as many pages, and would not for half of them.
STEP_BYTES = 1024 * mmap.PAGESIZE

_UNMAP_BYTES = 16 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_libc_holding_the_gil = ctypes.PyDLL(None)
_libc_holding_the_gil.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

_MAP_FAILED = ctypes.c_void_p(-1).value


def map_read_only(fd: int, num_bytes: int) -> int:
    """Map the first `num_bytes` of `fd`, shared, and say where. The descriptor may be closed.

    Who holds the address must call `unmap` once. Raises `OSError`.
    """
    address: int | None = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def unmap(address: int, num_bytes: int) -> None:
    """Undo `map_read_only`. Nobody may touch these addresses from here on."""
    # In pieces: for as long as one takes, no other thread of this process gets memory mapped.
    for start in range(0, num_bytes, _UNMAP_BYTES):
        _libc.munmap(address + start, min(_UNMAP_BYTES, num_bytes - start))


def has_pages(address: int, num_bytes: int) -> bool:
    """Whether every page of a part of a map exists, and lies in memory: reading it allocates none.

    Of a file of another user the kernel always says yes, unless this process is root's. Costs 2
    to 3 µs, and as much for each MiB.
    """
    first = address // mmap.PAGESIZE
    number = -(-(address + num_bytes) // mmap.PAGESIZE) - first
    pages = (ctypes.c_ubyte * number)()
    if _libc_holding_the_gil.mincore(first * mmap.PAGESIZE, number * mmap.PAGESIZE, pages):
        return False
    return 0 not in memoryview(pages).cast("B").tobytes()


def touch(address: int, num_bytes: int) -> None:
    """Fault in a part of a map, which begins on a page, by reading a byte of each page: writing
    could race with whoever fills it. In shared memory a page that is read exists from then on.

    Not by MADV_POPULATE_READ or _WRITE: they hold the lock of the whole address space until they
    are done, also while their thread is kept from its core, and every mmap of the process waits
    for it. Python and malloc call that when they need memory, so now and then a server's loop
    stood still for a second. A page fault takes the lock of its own map.
    """
    part = (ctypes.c_char * num_bytes).from_address(address)
    np.frombuffer(memoryview(part).cast("B"), np.uint8)[:: mmap.PAGESIZE].max()


def touch_gently(address: int, num_bytes: int, over: threading.Event) -> bool:
    """`touch`, and then rest for as long as others kept this thread from its core meanwhile.
    Whether to go on: not when `over` is set.

    For a thread that shall starve nobody. Not by a lower priority: when it holds the interpreter
    or a lock and is kept from its core, so is whoever waits for that.
    """
    began, busy = time.monotonic(), time.thread_time()
    touch(address, num_bytes)
    kept_waiting = time.monotonic() - began - (time.thread_time() - busy)
    return not over.wait(max(0.0, kept_waiting))
