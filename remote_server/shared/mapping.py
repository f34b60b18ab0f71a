"""Maps of shared memory by address: made, faulted in, and given back without holding the GIL.

The `mmap` module would do, but unmapping some GiB of it takes tens of milliseconds with the GIL
held, it keeps a descriptor open for each map, and a read-only one has no address to copy from.
"""

import ctypes
import mmap
import os

MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module names neither
MADV_POPULATE_WRITE = 23

POPULATE_STEP_BYTES = 4 << 20  # about 2 ms of page faults, during which we cannot be stopped

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

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
    _libc.munmap(address, num_bytes)


def populate(address: int, num_bytes: int, advice: int) -> bool:
    """Fault in a part of a map, which begins on a page. False where the kernel cannot."""
    return bool(_libc.madvise(address, num_bytes, advice) == 0)
