"""Maps of memory files: the arena, which holds all blocks, and read-only maps of a peer's files."""

import ctypes
import fcntl
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from remote_server.errors import KVFerryError

log = logging.getLogger(__name__)

# Largest region, in multiples of the machine's memory; more than one allows for sparse files and
# swap.
MAX_REGION_MEMORIES = 4

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


# Of `st_blocks`, on any file system.
_BLOCK_BYTES = 512


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


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Let the first touch of `memory` take huge pages where the administrator allows it: for shared
    memory with `shmem_enabled` at `advise`, for private memory by default.

    They are touched ten times as fast. And a direct read passes the device one address for each
    stretch of contiguous memory: into scattered pages of 4 KiB a virtual disk read 1.0 GB/s, and
    into huge pages 2.3.
    """
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def has_no_hole(fd: int) -> bool:
    """Whether every page of a memfd exists, in memory or swapped out, as far as it reaches now:
    reading a map of it allocates none. Costs 1 µs for a file of any size. Raises `OSError`."""
    status = os.fstat(fd)
    return status.st_blocks * _BLOCK_BYTES >= status.st_size


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


class NotAttachable(KVFerryError):
    """The offered memory cannot be mapped safely. All transfers use TCP instead."""


def check_file(fd: int, num_bytes: int, client: int, what: str) -> None:
    """Raise `NotAttachable` unless reading a map of `fd` can never kill this process.

    A sealed memfd cannot shrink, so reading it cannot raise SIGBUS. A memfd of huge pages can, when
    the machine has none left. Any other file may be on a disk, or on another machine.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotAttachable(f"the {what} is not a regular file")
    if status.st_uid not in (client, os.getuid()):
        raise NotAttachable(f"the {what} belongs to user {status.st_uid}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise NotAttachable(f"the {what} is not a memfd sealed with F_SEAL_SHRINK")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise NotAttachable(f"the {what} is made of huge pages")
    if status.st_size != num_bytes:
        raise NotAttachable(f"the {what} has {status.st_size} bytes, not {num_bytes}")
    limit = MAX_REGION_MEMORIES * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if num_bytes > limit:
        raise NotAttachable(f"the {what} has {num_bytes} bytes; the most is {limit}")


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)  # the others: pid, gid
    return int(uid)


# The owner faults its own memory in at the same time; it is followed for this long.
_POPULATE_PASSES = 60
_POPULATE_PASS_S = 1.0


class ReadOnlyMap:
    """`num_bytes` of a file at `address`, until `close`.

    A thread of its own faults the map in, so that the first copies do not have to, and unmaps it at
    the end: both may take long.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """`fd` stays the caller's. Raises `OSError`, and then nothing is mapped."""
        self.num_bytes = num_bytes
        self.fd = os.dup(fd)
        try:
            self.address = map_read_only(fd, num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvferry-map", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError as error:  # no more threads
            self._undo()
            raise OSError(str(error)) from error

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
        os.close(self.fd)

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
                first = os.lseek(self.fd, start, os.SEEK_DATA)
                start = os.lseek(self.fd, first, os.SEEK_HOLE)
            except OSError:  # only a hole from here to the end
                return
            yield first, start


_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not name it

# Bytes per generation word, and so the smallest slot. The words add 1.6 % to the file, of which
# only the pages in use become memory.
BYTES_PER_WORD = 512
WORD_BYTES = 8


class Arena:
    """`num_bytes` of anonymous shared memory, a sealed memfd mapped once, followed by the
    generation words, by which a client that reads blocks in place detects reuse.

    A memfd has no name, so nothing remains after this process, however it ends, and the size of
    /dev/shm does not limit it (it counts as this process's memory, and against its cgroup). It is
    shared so that clients on this host can read blocks in place, through `open_read_only`. The
    seals guarantee them that it never shrinks under their mappings, and guarantee us that no other
    process ever writes to it, whatever descriptor it holds.

    `view` is the region for blocks, writable; `words` the table of words. The first touch of a page
    is slow (1.8 GB/s against 19 once touched), so a `Population` touches those of the blocks from a
    background thread, and start-up time does not depend on `num_bytes`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.words_offset = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file_bytes = self.words_offset + num_bytes // BYTES_PER_WORD * WORD_BYTES
        self.fd = os.memfd_create("kvferry-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)  # a memfd's default mode lets every user open it
            os.ftruncate(self.fd, self.file_bytes)
            self._map = mmap.mmap(self.fd, self.file_bytes)
            prefer_huge_pages(self._map)
            self._seal()
        except BaseException:
            os.close(self.fd)
            raise
        self._whole = memoryview(self._map)
        self.view = self._whole[:num_bytes]
        self.words = self._whole[self.words_offset :].cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._stop = threading.Event()
        self._stepping = threading.Lock()
        self._populated_bytes = 0
        self.closed = False

    def open_read_only(self) -> int:
        """A new descriptor of the arena that can only be mapped for reading. Raises `OSError`."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _seal(self) -> None:
        """Seal the file after our own mapping, the only one that may ever write."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
        except OSError:
            # An old kernel: a process of this user or of root that holds the read-only descriptor
            # could reopen it for writing. The mode prevents that for other users.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    @property
    def populated_bytes(self) -> int:
        """Bytes that `populate_some` has touched; equals `num_bytes` at the end."""
        return self._populated_bytes

    def populate_some(self) -> bool:
        """Touch some more pages, on any thread but one at a time. Contents do not change. Returns
        whether pages remain: False once the arena is closed."""
        with self._stepping:
            if self.closed:
                return False
            step = min(STEP_BYTES, self.num_bytes - self._populated_bytes)
            go_on = touch_gently(self.address + self._populated_bytes, step, self._stop)
            self._populated_bytes += step
            return go_on and self._populated_bytes < self.num_bytes

    def close(self) -> None:
        """Stop populating and give the memory back.

        The mapping stays alive until the last view of it is released.
        """
        self.closed = True
        self._stop.set()
        with self._stepping:
            self._unmap()
        os.close(self.fd)

    def _unmap(self) -> None:
        try:
            for view in (self.view, self.words, self._whole):
                view.release()
            self._map.close()
        except BufferError:
            log.debug("the arena is still in use; its memory is freed with the last view")


class Population:
    """Touches the pages of `arenas`, a step of each in turn, on one daemon thread that yields to
    others. Ends by itself when all are done or closed."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = [*arenas]
        self.failed = False
        """It ended with an error before it was done."""
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        left = self._arenas
        try:
            while left:
                left = [arena for arena in left if arena.populate_some()]
        except Exception:
            self.failed = True
            log.exception("the memory is populated no further; first puts are slower")


class ArenaView(ReadOnlyMap):
    """The arena behind a descriptor of the server. Used by the I/O thread only.

    The server may change the bytes at any time: bytes read are valid only if the block's generation
    word is still the same afterwards.
    """

    def __init__(self, fd: int, num_bytes: int, server: int) -> None:
        """Map a file of user `server`; `fd` stays the caller's. Raises `NotAttachable`,
        `OSError`."""
        check_file(fd, num_bytes, server, "arena")
        super().__init__(fd, num_bytes)
        self.mapped = True
        """True until `close`. A read after that would kill the process."""
        words = (ctypes.c_uint64 * (num_bytes // WORD_BYTES)).from_address(self.address)
        self.words = memoryview(words).cast("B").cast("Q").toreadonly()

    def close(self) -> None:
        """Unmap it, soon. No copy from it may be under way or begin."""
        self.mapped = False
        self.words.release()
        super().close()
