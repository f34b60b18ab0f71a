"""The arena: the memory file that holds all blocks, and the thread that populates it."""

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence

from remote_server.shm.mapping import STEP_BYTES, touch_gently
from remote_server.sizes import format_bytes

log = logging.getLogger(__name__)

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
