"""Maps of memory files, the server's own and read-only ones of a peer's; and copies between maps.

The server copies puts, on its loop thread, and the client gets, on its I/O thread, one group at a
time: blocks that together fit the core's own cache, or one that is larger.
"""

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from operator import add

import numpy as np
import xxhash

# Bytes faulted in before the next check for the end: about 2 ms. Numpy releases the GIL for this
# many pages, and not for half of them.
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
    """Map the first `num_bytes` of `fd`, shared, and return the address. The descriptor may be
    closed.

    The caller must call `unmap` once. Raises `OSError`.
    """
    address: int | None = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def unmap(address: int, num_bytes: int) -> None:
    """Undo `map_read_only`. No thread may touch these addresses from here on."""
    # In pieces: during each call no other thread of this process can map memory.
    for start in range(0, num_bytes, _UNMAP_BYTES):
        _libc.munmap(address + start, min(_UNMAP_BYTES, num_bytes - start))


def has_pages(address: int, num_bytes: int) -> bool:
    """Whether every page of a part of a map is in memory: reading it allocates none.

    For a file of another user the kernel always returns yes, unless this process is root's. Costs 2
    to 3 µs, and as much for each MiB.
    """
    first = address // mmap.PAGESIZE
    number = -(-(address + num_bytes) // mmap.PAGESIZE) - first
    pages = (ctypes.c_ubyte * number)()
    if _libc_holding_the_gil.mincore(first * mmap.PAGESIZE, number * mmap.PAGESIZE, pages):
        return False
    return 0 not in memoryview(pages).cast("B").tobytes()


def touch(address: int, num_bytes: int) -> None:
    """Fault in a part of a map, which begins on a page, by reading a byte of each page: a write
    could race with the writer of the page. In shared memory a page that is read exists from then
    on.

    MADV_POPULATE_READ and _WRITE hold the lock of the whole address space until they are done, even
    while their thread waits for a core, and every mmap of the process waits for it. Python and
    malloc call mmap when they need memory, so a server's loop stood still for up to a second. A
    page fault takes the lock of its own map only.
    """
    part = (ctypes.c_char * num_bytes).from_address(address)
    np.frombuffer(memoryview(part).cast("B"), np.uint8)[:: mmap.PAGESIZE].max()


def touch_gently(address: int, num_bytes: int, over: threading.Event) -> bool:
    """`touch`, then sleep for as long as this thread waited for a core meanwhile. Returns False
    when `over` is set.

    For a thread that must not starve others. A lower priority would not do: while it waits for a
    core with the interpreter or a lock, every thread that needs that waits too.
    """
    began, busy = time.monotonic(), time.thread_time()
    touch(address, num_bytes)
    kept_waiting = time.monotonic() - began - (time.thread_time() - busy)
    return not over.wait(max(0.0, kept_waiting))


# The owner faults its own memory in at the same time; it is followed for this long.
_POPULATE_PASSES = 60
_POPULATE_PASS_S = 1.0

# Parts within this distance are checked by one call.
_NEAR_BYTES = 32 << 20


class ReadOnlyMap:
    """`num_bytes` of a file at `address`, until `close`.

    A thread of its own faults the map in, so that the first copies do not have to, and unmaps it at
    the end: both may take long.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """`fd` stays the caller's. Raises `OSError`, and then nothing is mapped."""
        self.num_bytes = num_bytes
        self._fd = os.dup(fd)
        try:
            self.address = map_read_only(fd, num_bytes)
        except OSError:
            os.close(self._fd)
            raise
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvferry-map", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError as error:  # no more threads
            self._undo()
            raise OSError(str(error)) from error

    def has_pages(self, starts: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether all of these parts, from `starts` in the file, can be read from the map without
        allocating a page. Valid until the owner punches a hole, which it can at any time."""
        first, end = min(starts), max(map(add, starts, lengths))
        if end - first <= _NEAR_BYTES and has_pages(self.address + first, end - first):
            return True
        return all(map(has_pages, [self.address + start for start in starts], lengths))

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy from `start` in the file without the map: a hole is read as zeros and stays one. It
        takes up to 1.6 times as long as from the map. Raises `OSError`."""
        done = 0
        while done < target.nbytes:
            read = os.preadv(self._fd, [target[done:]], start + done)
            if not read:
                raise OSError("the file is shorter than its map")
            done += read

    def close(self) -> None:
        """Unmap it, soon. No thread reads at `address` any more. Idempotent."""
        self._over.set()

    def join(self) -> None:
        """Wait until the unmapping is complete."""
        self._keeper.join()

    @property
    def unmapped(self) -> bool:
        """The unmapping is complete."""
        return not self._keeper.is_alive()

    def _keep(self) -> None:
        self._populate()
        self._over.wait()
        self._undo()

    def _undo(self) -> None:
        unmap(self.address, self.num_bytes)
        os.close(self._fd)

    def _populate(self) -> None:
        """Fault in the pages that exist, and only those: reading a page that its owner has never
        touched would allocate it, charged to this process and its cgroup. Each is checked again
        right before, because the owner may have punched a hole."""
        done = 0
        for _ in range(_POPULATE_PASSES):
            for start, end in self._extents(done):
                for at in range(start, end, STEP_BYTES):
                    step = min(STEP_BYTES, end - at)
                    if not has_pages(self.address + at, step):
                        end = at
                        break
                    if not touch_gently(self.address + at, step, self._over):
                        return
                if start == done:
                    done = end
            if done >= self.num_bytes or self._over.wait(_POPULATE_PASS_S):
                return

    def _extents(self, start: int) -> Iterator[tuple[int, int]]:
        """The ranges of the file with pages, from `start` on."""
        while start < self.num_bytes:
            try:
                first = os.lseek(self._fd, start, os.SEEK_DATA)
                start = os.lseek(self._fd, first, os.SEEK_HOLE)
            except OSError:  # only a hole from here to the end
                return
            yield first, start


# Bytes copied before they are hashed: small enough to be still in the core's own cache. Hashing a
# message after copying all of it costs 1.6 times a plain copy, hashing piece by piece 1.1. It is
# also the fastest size to copy in.
PIECE_BYTES = 256 << 10

# Releasing the GIL costs more than copying this much, when another thread then takes it.
_HOLD_GIL_BELOW_BYTES = 128 << 10

_copy_holding_the_gil = ctypes.PyDLL(None).memmove
_copy_holding_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_holding_the_gil.restype = None
_copy_without_the_gil = ctypes.CDLL(None).memmove
_copy_without_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_without_the_gil.restype = None


def group_blocks(largest: int) -> int:
    """Number of blocks of at most `largest` bytes in a group."""
    return max(1, PIECE_BYTES // largest)


def copy_group(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    """Copy each block from its address in `sources` to that in `targets`."""
    copy = _copy_holding_the_gil
    if lengths[0] >= _HOLD_GIL_BELOW_BYTES:
        copy = _copy_without_the_gil
    # Runs without bytecode: a block of 64 KiB is copied in 4 µs.
    deque(map(copy, targets, sources, lengths), maxlen=0)


def copy_and_hash_group(
    targets: Sequence[int],
    sources: Sequence[int],
    landed: Sequence[memoryview],
    seeds: Sequence[int],
) -> list[int]:
    """`copy_group`, then the checksum of each block. `landed` are the bytes at `targets`."""
    if landed[0].nbytes <= PIECE_BYTES:
        copy_group(targets, sources, [view.nbytes for view in landed])
        return [*map(xxhash.xxh3_64_intdigest, landed, seeds)]
    (view,), (target,), (source,), (seed,) = landed, targets, sources, seeds
    hasher = xxhash.xxh3_64(seed=seed)
    for start in range(0, view.nbytes, PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        _copy_without_the_gil(target + start, source + start, piece.nbytes)
        hasher.update(piece)
    return [hasher.intdigest()]
